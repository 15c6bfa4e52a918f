"""The matched baseline: a Transformer with a TokenFormer's width, depth and number of weights."""

import inspect
from typing import Any

import timm
from timm.models import get_model_args
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs
from tokenformer_vit.models import TokenFormerViT


def matched_hidden(width: int, pairs: int) -> int:
    """Return the hidden width of a Transformer with the weights of ``pairs`` in each block.

    A TokenFormer block has 2C·pairs weights, and a Transformer block has 4C² + 2C·hidden.
    """
    if pairs <= 2 * width:
        needs = f"attention of width {width} alone has the weights of {2 * width} pairs"
        raise InputError(f"no Transformer matches {pairs} pairs in a block: {needs}; give more")
    return pairs - 2 * width


def matched_vit(model: nn.Module) -> tuple[Any, int]:
    """Return the ViT that matches a TokenFormer (the mean of its blocks), and its hidden width."""
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"a {type(model).__name__} is no TokenFormer: give --against NAME as well")
    pairs = round(sum(count_pairs(model).values()) / len(model.blocks))
    hidden = matched_hidden(model.embed_dim, pairs)
    known = inspect.signature(VisionTransformer).parameters
    arguments = {name: value for name, value in get_model_args(model).items() if name in known}
    block: Any = model.blocks[0]
    sizes = {
        "img_size": model.patch_embed.img_size,
        "patch_size": model.patch_embed.patch_size,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": mlp_ratio(hidden, model.embed_dim),
        "embed_layer": type(model.patch_embed),
        # Those of a named model are not among the arguments.
        "class_token": model.has_class_token,
        "reg_tokens": model.num_reg_tokens,
        "global_pool": model.global_pool,
    }
    return timm.create_model("vit_base_patch16_224", **{**arguments, **sizes}), hidden


def mlp_ratio(hidden: int, width: int) -> float:
    """Return the ``mlp_ratio`` that gives exactly this number of hidden neurons in timm."""
    ratio = hidden / width
    # timm multiplies by the width again and rounds down.
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width
