import pytest
import timm
import torch

import tokenformer_vit  # noqa: F401

SHAPE = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64}
LINEAR = {  # all parts of a converted ViT that has RMSNorms
    "theta": {"qkv": "linear", "proj": "linear", "ffn": "gelu"},
    "norm": "rms+weight",
    "pattention_args": {"bias": True},
}


@pytest.fixture
def small():
    """Build a TokenFormer of two narrow blocks at 64 px; any argument can be replaced."""

    def build(**kwargs):
        arguments = {**SHAPE, "num_classes": 10, **kwargs}
        return timm.create_model("tokenformer_tiny", **arguments).eval()

    return build


@pytest.fixture
def images():
    """Draw images for the model of ``small``."""
    return lambda size=64, channels=3, batch=2: torch.randn(batch, channels, size, size)
