"""The ViT that a TokenFormer is compared with: of its width and depth, with as many weights."""

import inspect
from typing import Any

import timm
import torch
from timm.models import get_model_args
from timm.models.vision_transformer import VisionTransformer

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import TokenFormerViT

__all__ = ["matched_vit"]


def matched_vit(model: TokenFormerViT) -> tuple[VisionTransformer, int]:
    """Build the ViT of a TokenFormer's width and depth with as many weights in its blocks.

    A block has 2C(3·P_qkv + P_proj + P_ffn) weights as a TokenFormer and 4C² + 2C·hidden as a ViT,
    which has biases and norms besides.

    Args:
        model: The TokenFormer; all blocks have as many pairs as the first.

    Returns:
        The ViT, on the device ``meta``, and the number of its hidden neurons.

    Raises:
        InputError: If its attention alone has more weights, or there are no blocks.
    """
    if not len(model.blocks):
        raise InputError("a model without blocks has no match; name another model with --against")
    block: Any = model.blocks[0]
    width = model.embed_dim
    pairs = (
        3 * block.attn.query.num_param_tokens
        + block.attn.proj.num_param_tokens
        + block.mlp.num_param_tokens
    )
    hidden = pairs - 2 * width
    if hidden < 1:
        raise InputError(
            f"no ViT of width {width} has as few weights as {pairs} pairs a block: its attention "
            f"alone takes those of {2 * width}; name another model with --against"
        )
    known = inspect.signature(VisionTransformer).parameters
    arguments = {name: value for name, value in get_model_args(model).items() if name in known}
    sizes = {
        "img_size": model.patch_embed.img_size,
        "patch_size": model.patch_embed.patch_size,
        "num_classes": model.num_classes,
        "embed_dim": width,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": (hidden + 0.5) / width,  # timm rounds down
    }
    with torch.device("meta"):
        vit: Any = timm.create_model("vit_base_patch16_224", **{**arguments, **sizes})
    return vit, hidden
