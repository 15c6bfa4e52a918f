"""A layer that holds its pairs in two parts computes, loads and is copied as any other."""

import copy

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.segments import (
    TOKENS,
    fuse_state_dict,
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
    assert set(fused.state_dict()) == {"tau", *TOKENS}
    layer(x).square().sum().backward()
    fused(x).square().sum().backward()
    for name in TOKENS:
        joined = torch.cat([part.grad for part in token_segments(layer, name)])
        torch.testing.assert_close(joined, getattr(fused, name).grad)


def test_a_fused_parameter_needs_a_gradient_if_a_part_did(layer):
    for name in TOKENS:
        token_segments(layer, name)[0].requires_grad_(False)
    fuse_tokens(layer)
    assert all(parameter.requires_grad for parameter in layer.parameters())
    layer.requires_grad_(False)
    split_tokens(layer, 4)
    fuse_tokens(layer)
    assert {name for name, _ in layer.named_parameters()} == set(TOKENS)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_state_dicts_of_both_forms_load_into_both(layer):
    plain = Pattention(8, 12, 20)
    assert set(fuse_state_dict(layer.state_dict())) == {*TOKENS, "tau"}
    assert list(fuse_state_dict(plain.state_dict())) == list(plain.state_dict())
    state_dict = plain.state_dict()
    layer.load_state_dict(state_dict)
    assert set(state_dict) == {*TOKENS, "tau"}  # it is the caller's
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict())
    plain.load_state_dict(fuse_state_dict(again.state_dict()))
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), plain(x))
    otherwise = Pattention(8, 12, 20)
    split_tokens(otherwise, 5)
    for other in (plain, otherwise):  # also where the file's parts are not the layer's
        torch.nn.init.ones_(token_segments(other, TOKENS[0])[0])
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
    fuse_tokens(again)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again(x), plain(x))


def test_bad_splits_are_refused(layer):
    with pytest.raises(InputError, match="split already"):
        split_tokens(layer, 3)
    for number in (0, 20):
        with pytest.raises(InputError, match=f"num_old is {number}"):
            split_tokens(Pattention(8, 12, 20), number)
    plain = Pattention(8, 12, 20)
    fuse_tokens(plain)
    assert not is_split(plain)
