"""Extracted, nested and grown models compute bit for bit what their sizes compute."""

import copy
from typing import Any

import pytest
import timm
import torch

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    extract,
    grow,
    grow_state_dict,
    measure_usage,
    nest,
    pattention_layers,
    prune,
    reorder,
)
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.ops import THETAS

SHAPE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 8,
    "num_classes": 10,
    "num_qkv_param_tokens": 48,
    "num_proj_param_tokens": 32,
    "num_ffn_param_tokens": 64,
}
GROWN = {"num_qkv_param_tokens": 64, "num_ffn_param_tokens": 128}


@torch.no_grad()
def build(**kwargs):
    """Build a model whose layers have a τ of their own for each size."""
    model: Any = timm.create_model("tokenformer_tiny", **{**SHAPE, **kwargs}).eval()
    for layer in pattention_layers(model).values():
        for tau in (layer.tau, layer.nested_tau):
            if tau is not None:
                tau.mul_(0.5 + torch.rand_like(tau))
    return model


@torch.no_grad()
def logits(model, x, size=None):
    model.set_size(size)
    y = model(x)
    model.set_size(None)
    return y


@torch.no_grad()
def train_a_little(model):
    """Change every parameter that training would change."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture
def x():
    return torch.randn(3, 3, 32, 32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("theta", THETAS)
def test_an_extracted_model_equals_the_size_bit_by_bit(theta, backend, x):
    model = build(theta=theta, nested=(0.25, 0.5))
    model.set_backend(backend)
    state = copy.deepcopy(model.state_dict())
    for size in (0.25, 0.4, {"qkv": 0.25, "ffn": 7}):
        small = extract(model, size)
        assert torch.equal(logits(small, x), logits(model, x, size))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(logits(small, x), logits(model, x, size))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_an_extracted_model_keeps_the_smaller_sizes_and_is_saved(x, tmp_path):
    model = build(nested=(0.25, 0.5, 0.75))
    for size, left in ((0.25, (1.0,)), (0.8, None)):
        small = extract(model, size)
        save_model(small, tmp_path / f"{size}")
        loaded = load_model(None, tmp_path / f"{size}")
        assert loaded.sizes == small.sizes
        assert len(small.sizes) == 4 if left is None else small.sizes == left
        assert torch.equal(logits(loaded, x), logits(model, x, size))
        assert torch.equal(logits(loaded, x, loaded.sizes[0]), logits(model, x, 0.25))
    assert not any("nested" in name for name in extract(model, 0.25).state_dict())


def test_a_model_that_uses_some_pairs_is_neither_extracted_nor_measured():
    model = build(nested=(0.25,))
    model.blocks[0].mlp.active = torch.arange(5)
    for size in (0.5, 1.0):
        with pytest.raises(InputError, match=r"blocks.0.mlp has an active mask.*activate\(\)"):
            extract(model, size)
    model.blocks[0].mlp.active = None
    model.set_size(0.5)
    with pytest.raises(InputError, match=r"24 of its pairs; call .*set_size\(None\)"):
        measure_usage(model, [])


@pytest.mark.parametrize("theta", THETAS)
def test_a_reordered_model_is_nested_as_pruning_would_make_it(theta, x):
    model = build(theta=theta)
    usage = measure_usage(model, [x])
    before = logits(model, x)
    pruned = prune(copy.deepcopy(model), usage, 12, 8, 16)
    nest(reorder(model, usage), (0.25, 0.5), usage)
    torch.testing.assert_close(logits(model, x), before, rtol=1e-4, atol=1e-5)
    assert model.sizes == (0.25, 0.5, 1.0)
    # The kept pairs are in another order.
    torch.testing.assert_close(logits(model, x, 0.25), logits(pruned, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"in another order; measure it again"):
        nest(build(theta=theta), (0.25,), usage)
    sorted_usage = measure_usage(model, [x])
    for name, own in sorted_usage.items():
        torch.testing.assert_close(
            own.sizes, usage[name].sizes.sort(descending=True).values, rtol=1e-4, atol=1e-6
        )


def test_an_ordinary_model_is_nested_without_a_change(x):
    model = build()
    before = {size: logits(model, x, size) for size in (None, 0.25, 0.5)}
    nest(model, (0.5, 0.25))
    assert model.sizes == (0.25, 0.5, 1.0)
    for size, expected in before.items():
        torch.testing.assert_close(logits(model, x, size), expected)
    nest(model, ())
    assert model.sizes == (1.0,)
    assert model.state_dict().keys() == build().state_dict().keys()
    with pytest.raises(InputError, match="another model"):
        nest(model, (0.5,), {})


@pytest.mark.parametrize(
    ("theta", "init"),
    [("gelu_l2", "zero_key"), ("gelu_l1", "released"), ("softmax", "random")],
)
def test_a_family_made_upwards_contains_its_small_models(theta, init, x, tmp_path):
    model = build(theta=theta)
    members = [logits(model, x)]
    for counts in (GROWN, {"num_qkv_param_tokens": 96, "num_proj_param_tokens": 48}):
        grow(model, **counts, init=init, nested=not model.sizes[1:], freeze="old")
        train_a_little(model)
        members.append(logits(model, x))
    assert len(model.sizes) == 3
    for size, expected in zip(model.sizes, members, strict=True):
        assert torch.equal(logits(model, x, size), expected)
        assert torch.equal(logits(extract(model, size), x), expected)
    save_model(model, tmp_path / "family")
    family = load_model(None, tmp_path / "family")
    assert family.sizes == model.sizes
    for size, expected in zip(family.sizes, members, strict=True):
        assert torch.equal(logits(family, x, size), expected)


def test_a_nested_model_grows_on_top(x):
    model = build(nested=(0.5,))
    before = [logits(model, x, size) for size in model.sizes]
    state = grow_state_dict(model.state_dict(), **GROWN)
    grow(model, **GROWN)
    assert model.sizes == (
        {"qkv": 24, "proj": 16, "ffn": 32},
        {"qkv": 48, "proj": 32, "ffn": 64},
        1.0,
    )
    for size, expected in zip(model.sizes, before, strict=False):
        assert torch.equal(logits(model, x, size), expected)
    own = model.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())
    ordinary = build()
    grown = grow_state_dict(ordinary.state_dict(), **GROWN, nested=True)
    grow(ordinary, **GROWN, nested=True).load_state_dict(grown)
    with pytest.raises(InputError, match=r"'duplicate'.*another init"):
        grow(model, num_ffn_param_tokens=256, init="duplicate")


def test_a_learned_tau_stays_where_sizes_of_a_small_layer_are_equal(x):
    sizes = (0.25, 0.5, 0.75)
    args = {"num_proj_param_tokens": 2, "pattention_args": {"learn_tau": True}}
    model = build(nested=sizes, **args)  # the output projections have 1, 1, 2 and 2 pairs
    before = [logits(model, x, size) for size in model.sizes]
    for size, expected in zip(sizes, before, strict=False):
        small = extract(model, size)
        for own, of_size in zip(small.sizes, before, strict=False):
            assert torch.equal(logits(small, x, own), of_size)
        assert torch.equal(logits(small, x), expected)
    grow(model, num_proj_param_tokens=16)
    for size, expected in zip(model.sizes, before, strict=False):
        assert torch.equal(logits(model, x, size), expected)


@torch.no_grad()
def test_a_model_that_grew_uses_all_pairs(x):
    model = build()
    before = logits(model, x)
    model.set_size(0.5)
    grow(model, num_ffn_param_tokens=80)
    assert torch.equal(model(x), before)
    model.blocks[0].attn.proj.active = torch.arange(5)
    grow(model, num_ffn_param_tokens=96)  # not those layers
    assert torch.equal(model(x), before)


def test_sizes_that_do_not_contain_one_another_are_refused():
    model = build(nested=(0.5,))
    with pytest.raises(InputError, match=r"64, 6.* contain one another"):
        nest(model, ({"qkv": 0.25, "ffn": 1.0}, {"ffn": 0.1}))
