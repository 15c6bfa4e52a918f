"""A layer with separate old and new pairs computes, loads and is copied like any other."""

import copy

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import (
    TOKENS,
    fuse_state_dict,
    fuse_tokens,
    is_split,
    part_name,
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
    assert list(layer.state_dict()) == list(plain.state_dict())
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


def test_parts_that_an_earlier_version_saved_apart_are_joined(layer):
    whole = Pattention(8, 12, 20).state_dict()
    saved = {"tau": whole["tau"]}
    for name in TOKENS:
        for index, part in enumerate(whole[name].split([15, 5])):
            saved[f"parametrizations.{name}.original{index}"] = part
    for each in (layer, Pattention(8, 12, 20)):
        each.load_state_dict(saved)
        for name, tensor in whole.items():
            assert torch.equal(each.state_dict()[name], tensor), name
    assert fuse_state_dict(saved).keys() == whole.keys()
    parameters = dict(layer.named_parameters())
    assert {part_name(name) for name in saved} - {"tau"} == set(parameters)
    assert part_name("a.mlp.parametrizations.key_param_tokens.original1") == (
        "a.mlp.new_key_param_tokens"
    )


def test_old_pairs_come_before_new_ones_and_keys_before_values():
    """Optimizers know parameters by their order, also those of earlier checkpoints."""
    layer = Pattention(8, 12, 20, theta="softmax", learn_tau=True, gate="learned")
    split_tokens(layer, 13)
    names = [name for name, _ in layer.named_parameters()]
    parts = [f"{part}_{name}" for name in TOKENS for part in ("old", "new")]
    assert names == ["tau", "gate", *parts]
    fuse_tokens(layer)
    names = [name for name, _ in layer.named_parameters()]
    assert names == [*TOKENS, "tau", "gate"]


def test_a_split_layer_draws_its_tokens_anew(layer):
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.reset_parameters()
    for name in TOKENS:
        assert (layer.state_dict()[name] != before[name]).all()


def test_missing_tokens_are_named(layer):
    state_dict = layer.state_dict()
    del state_dict["key_param_tokens"]
    with pytest.raises(RuntimeError, match="old_key_param_tokens"):
        layer.load_state_dict(state_dict)


class Derived(Pattention):
    """A layer of another package."""


def test_bad_splits_are_refused(layer):
    with pytest.raises(InputError, match="already split"):
        split_tokens(layer, 3)
    for number in (0, 20):
        with pytest.raises(InputError, match=f"num_old .* from 1 to 19 .*got {number}"):
            split_tokens(Pattention(8, 12, 20), number)
    with pytest.raises(InputError, match=r"Derived.* grow it without split"):
        split_tokens(Derived(8, 12, 20), 3)
    plain = Pattention(8, 12, 20)
    fuse_tokens(plain)
    assert not is_split(plain)
