"""Extracted, nested and grown models compute bit for bit what their sizes compute."""

import copy

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    count_pairs,
    extract,
    grow,
    measure_usage,
    nest,
    pattention_layers,
    prune,
    reorder,
)
from tokenformer_vit.ops import THETAS

from .conftest import LINEAR, assert_equal, build, images, logits


@torch.no_grad()
def with_own_taus(**kwargs):
    """Build a model whose layers have a τ of their own for each size."""
    model = build(**kwargs)
    for layer in pattention_layers(model).values():
        layer.tau.mul_(0.5 + torch.rand_like(layer.tau))
    return model


@pytest.mark.parametrize("theta", THETAS)
def test_an_extracted_model_equals_the_size_bit_by_bit(theta):
    model, x = with_own_taus(theta=theta, nested=(0.25, 0.5)), images()
    before = copy.deepcopy(model.state_dict())
    for size in (0.25, 0.4, 0.5):
        small = extract(model, size)
        assert torch.equal(logits(small, x), logits(model, x, size))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(logits(small, x), logits(model, x, size))
    assert extract(model, 0.5).sizes == (0.5, 1.0)
    assert_equal(model.state_dict(), before)
    by_kind = extract(model, num_qkv_param_tokens=[8, 16], num_ffn_param_tokens=7)
    assert [*count_pairs(by_kind).values()] == [8, 8, 8, 32, 7, 16, 16, 16, 32, 7]
    with pytest.raises(InputError, match="has 128 pairs and cannot be cut to 129"):
        extract(model, num_ffn_param_tokens=129)


@pytest.mark.parametrize("theta", THETAS)
def test_a_reordered_model_is_nested_as_pruning_would_make_it(theta):
    model, x = build(theta), images()
    usage, before = measure_usage(model, [x]), logits(model, x)
    pruned = prune(copy.deepcopy(model), usage, 8, 8, 32)
    nest(reorder(model, usage), (0.25, 0.5), usage)
    torch.testing.assert_close(logits(model, x), before, rtol=1e-4, atol=1e-5)
    # The kept pairs are in another order.
    torch.testing.assert_close(logits(model, x, 0.25), logits(pruned, x), rtol=1e-4, atol=1e-5)
    for name, own in measure_usage(model, [x]).items():
        expected = usage[name].sizes.sort(descending=True).values
        torch.testing.assert_close(own.sizes, expected, rtol=1e-4, atol=1e-6)


def test_an_ordinary_model_is_nested_without_a_change():
    model, x = build(), images()
    before = {size: logits(model, x, size) for size in (None, 0.25, 0.5)}
    nest(model, (0.5, 0.25))
    assert model.sizes == (0.25, 0.5, 1.0)
    for size, expected in before.items():
        torch.testing.assert_close(logits(model, x, size), expected)
    nest(model, ())
    assert model.sizes == (1.0,)
    assert model.state_dict().keys() == build().state_dict().keys()


@pytest.mark.parametrize("kinds", [None, ["ffn"]])
@pytest.mark.parametrize(
    ("how", "init"),
    [
        ({}, "zero_key"),
        ({"theta": "gelu_l1"}, "released"),
        ({"theta": "softmax"}, "random"),
        (LINEAR, "zero_key"),
    ],
)
def test_a_family_made_upwards_contains_its_small_models(how, init, kinds):
    model, x = with_own_taus(**how), images()
    members = [logits(model, x)]
    for factor in (2, 3):
        counts = [None, None] if kinds else [32 * factor] * 2
        grow(model, *counts, 128 * factor, init=init, nested=factor == 2, freeze="old")
        for parameter in model.parameters():  # as training would
            if parameter.requires_grad:
                parameter.detach().add_(0.1 * torch.randn_like(parameter))
        members.append(logits(model, x))
    assert model.sizes == (1 / 3, 2 / 3, 1.0)
    assert model.blocks[0].attn.query.sized == (kinds is None)
    for size, expected in zip(model.sizes, members, strict=True):
        assert torch.equal(logits(model, x, size), expected)
        small = extract(model, size)
        assert torch.equal(logits(small, x), expected)
        assert small.blocks[0].mlp.num_param_tokens == round(384 * size)


def test_a_nested_model_grows_on_top():
    model, x = with_own_taus(nested=(0.5,)), images()
    before = [logits(model, x, size) for size in model.sizes]
    model.set_size(0.5)
    grow(model, 64, 64, 256)
    assert torch.equal(logits(model, x), before[1])  # the size is reset
    assert model.sizes == (0.25, 0.5, 1.0)
    for size, expected in zip(model.sizes, before, strict=False):
        assert torch.equal(logits(model, x, size), expected)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"is 'duplicate'.* choose another init"):
        grow(model, num_ffn_param_tokens=512, init="duplicate")
    with pytest.raises(InputError, match=r"size 0\.25 of before .* let these layers alone grow"):
        grow(model, num_ffn_param_tokens=512)
    assert_equal(model.state_dict(), state)
