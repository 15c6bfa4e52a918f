from typing import Any

import timm
import torch
import torch.nn.functional as F

from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.models.sizes import at_size

# By default, feed-forward layers have 128 pairs, and all others 32.
SHAPE: dict[str, Any] = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 8,
    "num_classes": 10,
}
# As in a converted ViT.
LINEAR: dict[str, Any] = {
    "theta": {"qkv": "linear", "proj": "linear", "ffn": "gelu"},
    "pattention_args": {"bias": True},
}


def build(theta="gelu_l2", **kwargs) -> Any:
    return timm.create_model("tokenformer_tiny", **{**SHAPE, "theta": theta, **kwargs}).eval()


def images(count=3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, device="cpu")


@torch.no_grad()
def logits(model, x, size=None):
    if size is None:
        return model(x)
    with at_size(model, size):
        return model(x)


def step(model, optimizer, times=1, x=None):
    """Train on fresh images, or on these four."""
    for _ in range(times):
        optimizer.zero_grad()
        F.cross_entropy(model(images(4) if x is None else x), torch.arange(4)).backward()
        optimizer.step()


def in_float64(model):
    """Compute in float64 with a τ of float64, which otherwise stays float32."""
    model.double()
    for layer in pattention_layers(model).values():
        layer.tau = layer.tau.double()
    return model


def assert_same(actual, expected, limit=None):
    """Compare relative to the largest logit; by default, sums of thousands may be rounded."""
    limit = limit or 50 * torch.finfo(expected.dtype).eps
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error <= limit, error


def assert_equal(actual, expected):
    """Compare state dicts bit for bit, and in their order: some code goes by position."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
