"""Models built of Pattention; importing this package registers the vision models with timm."""

from .compilation import compile_blocks
from .vit import (
    TokenFormerViT,
    checkpoint_filter_fn,
    classifier_state_dict,
    timm_state_dict,
)

__all__ = [
    "TokenFormerViT",
    "checkpoint_filter_fn",
    "classifier_state_dict",
    "compile_blocks",
    "timm_state_dict",
]
