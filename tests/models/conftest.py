import os

import pytest
import timm
import torch

import tokenformer_vit  # noqa: F401


@pytest.fixture(autouse=True)
def seed() -> int:
    """Draw fresh inputs in every test; SEED=<the number printed> repeats a failure."""
    seed = int(os.environ.get("SEED", 0)) or torch.seed() % 2**31
    print(f"SEED={seed}")
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def small():
    """Build a TokenFormer of two narrow blocks at 64 px; any argument can be replaced."""

    def build(**kwargs):
        arguments = {
            "embed_dim": 48,
            "depth": 2,
            "num_heads": 3,
            "img_size": 64,
            "num_classes": 10,
            **kwargs,
        }
        return timm.create_model("tokenformer_tiny", **arguments).eval()

    return build
