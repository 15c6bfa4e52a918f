"""Rotary positions, registers, RMSNorm, QK-norm and LayerScale do not change what growth keeps."""

import copy

import pytest
import timm
import torch

import tokenformer_vit  # noqa: F401
from tokenformer_vit.growth import (
    extract,
    grow,
    measure_usage,
    nest,
    prune,
    reorder,
)
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.ops import THETAS

SHAPE = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}
PAIRS = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 64}
DOUBLED = {name: 2 * count for name, count in PAIRS.items()}


@pytest.fixture
def build(parts):
    """Build a model in which every part matters: no scale is small, no token is near zero."""

    @torch.no_grad()
    def build(theta="gelu_l2", **kwargs):
        arguments = {**SHAPE, **PAIRS, **parts, "num_classes": 10, "theta": theta, **kwargs}
        model = timm.create_model("tokenformer_tiny", **arguments).eval()
        for name, parameter in model.named_parameters():
            if not name.endswith("param_tokens"):
                parameter += 0.3 * torch.randn_like(parameter)
        return model

    return build


@pytest.fixture
def x():
    return torch.randn(3, 3, 32, 32)


def logits(model, x, size=None):
    model.set_size(size)
    with torch.no_grad():
        y = model(x)
    model.set_size(None)
    return y


def assert_same(after, before, limit):
    """Compare relative to the largest logit."""
    error = ((after - before).abs().max() / before.abs().max()).item()
    assert error <= limit, error


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("init", ["zero_key", "duplicate"])
def test_growth_is_exact(build, x, theta, init, rounding):
    model = build(theta)
    before = logits(model, x)
    grown = grow(copy.deepcopy(model), **DOUBLED, init=init)
    assert_same(logits(grown, x), before, rounding(grown))
    model.double()
    grown = grow(copy.deepcopy(model), **DOUBLED, init=init)
    # τ is float32 whatever the model is, and √2 is none of its numbers.
    dtype = torch.float32 if init == "duplicate" else torch.float64
    assert_same(logits(grown, x.double()), logits(model, x.double()), rounding(grown, dtype))


@pytest.mark.parametrize("theta", ["gelu_l2", "softmax"])
def test_sizes_are_exact_and_saved(build, x, theta, tmp_path):
    model = build(theta, nested=(0.25, 0.5))
    assert torch.equal(logits(extract(model, 0.25), x), logits(model, x, 0.25))
    save_model(model, tmp_path / "nested")
    loaded = load_model(None, tmp_path / "nested")
    for size in (None, 0.25, 0.4):
        assert torch.equal(logits(loaded, x, size), logits(model, x, size))

    model = build(theta)
    usage, before = measure_usage(model, [x]), logits(model, x)
    pruned = prune(copy.deepcopy(model), usage, 8, 8, 16)
    nest(reorder(model, usage), (0.25,), usage)
    torch.testing.assert_close(logits(model, x), before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model, x, 0.25), logits(pruned, x), rtol=1e-4, atol=1e-5)
