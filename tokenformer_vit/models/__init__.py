"""Models built of Pattention; importing this package registers the vision models with timm."""

from .vit import TokenFormerViT, checkpoint_filter_fn

__all__ = ["TokenFormerViT", "checkpoint_filter_fn"]
