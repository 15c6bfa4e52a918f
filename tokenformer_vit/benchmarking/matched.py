"""The matched baseline: a Transformer with a TokenFormer's width, depth and number of weights."""

import inspect
from typing import Any

import timm
from timm.models import get_model_args
from timm.models.vision_transformer import VisionTransformer

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs
from tokenformer_vit.models import TokenFormerViT


def matched_hidden(
    width: int, pairs: int, remedy: str = "give the TokenFormer more pairs, or less width"
) -> int:
    """Compute the hidden width of the matched Transformer.

    A TokenFormer block has 2C·pairs weights, and a Transformer block has 4C² + 2C·hidden. Biases
    and norms are not counted.

    Args:
        width: Width C of both models.
        pairs: Pairs of one TokenFormer block, 3·P_qkv + P_proj + P_ffn.
        remedy: What the user should do if no Transformer matches; the error message ends with it.

    Returns:
        The number of hidden neurons of each feed-forward part.

    Raises:
        InputError: If the attention of the Transformer alone has as many weights as the pairs.
    """
    hidden = pairs - 2 * width
    if hidden < 1:
        raise InputError(
            f"a Transformer of width {width} cannot match {pairs} pairs per block: its attention "
            f"alone has the weights of {2 * width} pairs; {remedy}"
        )
    return hidden


def matched_vit(model: TokenFormerViT) -> tuple[VisionTransformer, int]:
    """Build the ViT that matches a TokenFormer.

    Args:
        model: The TokenFormer. If its blocks have different numbers of pairs, the blocks of the ViT
            match their mean.

    Returns:
        The ViT, on the default device, and the number of its hidden neurons.

    Raises:
        InputError: If the model has no blocks, or no ViT matches; see :func:`matched_hidden`.
    """
    if not len(model.blocks):
        raise InputError("a model without blocks has no match; give another model with --against")
    block: Any = model.blocks[0]
    pairs = round(sum(count_pairs(model).values()) / len(model.blocks))
    hidden = matched_hidden(model.embed_dim, pairs, "give another model with --against")
    known = inspect.signature(VisionTransformer).parameters
    arguments = {name: value for name, value in get_model_args(model).items() if name in known}
    sizes = {
        "img_size": model.patch_embed.img_size,
        "patch_size": model.patch_embed.patch_size,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": mlp_ratio(hidden, model.embed_dim),
    }
    vit: Any = timm.create_model("vit_base_patch16_224", **{**arguments, **sizes})
    return vit, hidden


def mlp_ratio(hidden: int, width: int) -> float:
    """Compute the ``mlp_ratio`` that gives exactly this number of hidden neurons in timm."""
    ratio = hidden / width
    # timm multiplies by the width again and rounds down.
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width
