import pytest
import timm

import tokenformer_vit  # noqa: F401


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
