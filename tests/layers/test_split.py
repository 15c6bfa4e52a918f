"""A layer with separate old and new pairs computes, loads and is copied like any other."""

import copy

import pytest
import torch

from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import (
    TOKENS,
    fuse_tokens,
    is_split,
    split_tokens,
    token_segments,
)


@pytest.fixture
def layer():
    layer = Pattention(8, 12, 20)
    split_tokens(layer, 13)
    return layer


def test_splitting_changes_nothing_that_is_computed(layer):
    x = torch.randn(3, 8)
    fused = copy.deepcopy(layer)
    fuse_tokens(fused)
    assert is_split(layer)
    assert not is_split(fused)
    assert torch.equal(fused(x), layer(x))
    assert [len(part) for part in token_segments(layer, TOKENS[0])] == [13, 7]
    layer(x).square().sum().backward()
    fused(x).square().sum().backward()
    for name in TOKENS:
        joined = torch.cat([part.grad for part in token_segments(layer, name)])
        torch.testing.assert_close(joined, getattr(fused, name).grad)
        token_segments(layer, name)[0].requires_grad_(False)
    fuse_tokens(layer)  # a joined parameter needs a gradient if a part did
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_state_dicts_of_both_forms_load_into_both(layer):
    plain, otherwise = Pattention(8, 12, 20), Pattention(8, 12, 20)
    split_tokens(otherwise, 5)
    x, state_dict = torch.randn(3, 8), plain.state_dict()
    assert list(layer.state_dict()) == list(state_dict)
    for other in (layer, otherwise):
        other.load_state_dict(state_dict)
        assert torch.equal(other(x), plain(x))
    assert set(state_dict) == {*TOKENS, "tau"}  # it is the caller's
    layer.reset_parameters()
    for other in (plain, otherwise):
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
    del state_dict["key_param_tokens"]
    with pytest.raises(RuntimeError, match="old_key_param_tokens"):
        layer.load_state_dict(state_dict)


def test_parameters_keep_the_order_of_a_new_layer():
    """Optimizers know parameters by their order."""
    arguments = {"theta": "softmax", "learn_tau": True, "gate": "learned", "nested": (4,)}
    layer, new = Pattention(8, 12, 20, **arguments), Pattention(8, 12, 20, **arguments)
    split_tokens(layer, 13)
    names = [name for name, _ in layer.named_parameters()]
    parts = [f"{part}_{name}" for name in TOKENS for part in ("old", "new")]
    assert names == [*parts, "tau", "gate", "nested_tau"]
    fuse_tokens(layer)
    names = [name for name, _ in layer.named_parameters()]
    assert names == [name for name, _ in new.named_parameters()]
