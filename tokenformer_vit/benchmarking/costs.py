"""Parameters and FLOPs of every part of a model, in closed form: Table 3 of the paper.

A multiplication and an addition are two FLOPs, and a backward pass costs two forward passes. Left
out, as in the paper, are Θ and every other activation, the softmax, norms, biases and sums.

The first version of the paper prints d·n parameters for a Pattention of q, k, v or the output, and
2·d·n for that of the feed-forward part. Each has keys and values, 2·d·n, as later versions print.
What the table calls training FLOPs is a forward pass.
"""

from dataclasses import dataclass
from typing import Any

from timm.layers import Attention as LinearAttention
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, TokenFormerBlock

__all__ = ["PARTS", "Cost", "model_costs", "total", "training_flops"]

# Of a model, and how a table calls them.
PARTS = {
    "embedding": "embedding, positions",
    "qkv": "q, k, v projections",
    "token_token": "token-token attention",
    "output": "output projection",
    "feed_forward": "feed-forward",
    "head": "head",
    "other": "norms, scales",
}


@dataclass(frozen=True)
class Cost:
    """What a part of a model costs; the FLOPs are those of one image or one sequence."""

    parameters: int = 0
    forward_flops: int = 0

    @property
    def training_flops(self) -> int:
        """Of a forward and a backward pass."""
        return 3 * self.forward_flops

    def __add__(self, other: "Cost") -> "Cost":
        """Put two parts together."""
        return Cost(self.parameters + other.parameters, self.forward_flops + other.forward_flops)


def total(costs: dict[str, Cost]) -> Cost:
    """Add up the parts of a model."""
    return sum(costs.values(), Cost())


def model_costs(model: nn.Module, num_tokens: int | None = None) -> dict[str, Cost]:
    """Count the parameters and the forward FLOPs of every part of a timm model.

    Sizes are read off the parameters, so that a model may have grown. None of them is computed
    with: they may be on the device ``meta``.

    Args:
        model: A ``TokenFormerViT``, or a timm ``VisionTransformer`` of ordinary blocks.
        num_tokens: Length of the sequence, class token and the like included; default: as many as
            an image of the model's size gives.

    Returns:
        A cost for each of ``PARTS``, for one image. Every parameter belongs to one part.

    Raises:
        InputError: If the model is of another kind, or has no room for its class token in
            ``num_tokens``.

    Source:
        TokenFormer, arXiv:2410.23168, Table 3; patches instead of a vocabulary.
    """
    vit = _check_kind(model)
    prefix: int = vit.num_prefix_tokens
    patches: int = vit.patch_embed.num_patches if num_tokens is None else num_tokens - prefix
    tokens = patches + prefix
    if patches < 1:
        raise InputError(
            f"{tokens} tokens leave none for patches: the model adds {prefix} of its own"
        )
    # How many tokens each matrix of a part is multiplied with.
    rows = {
        "embedding": patches,
        **dict.fromkeys(("qkv", "output", "feed_forward"), tokens),
        "head": 1 if vit.global_pool else tokens,
    }
    costs = dict.fromkeys(PARTS, Cost())
    for name, parameter in vit.named_parameters():
        part, count = _part(name), parameter.numel()
        # Positions and the class token, which are only added, stand outside of every module.
        is_matrix = parameter.ndim > 1 and "." in name
        flops = _product_flops(count, rows.get(part, 0)) if is_matrix else 0
        costs[part] += Cost(count, flops)
    width = sum(block.attn.num_heads * block.attn.head_dim for block in vit.blocks)
    costs["token_token"] += Cost(0, _attention_flops(width, tokens))
    return costs


def training_flops(model: nn.Module, num_tokens: int | None = None) -> int:
    """Count the FLOPs of training a timm model on one image, were all of its parameters trained.

    Args:
        model: As for :func:`model_costs`.
        num_tokens: As for :func:`model_costs`.

    Returns:
        FLOPs of a forward and a backward pass, three times those of the forward.

    Raises:
        InputError: As :func:`model_costs` does.

    Source:
        TokenFormer, arXiv:2410.23168, Table 3, times three.
    """
    return total(model_costs(model, num_tokens)).training_flops


def _product_flops(elements: int, tokens: int) -> int:
    """Count the FLOPs of multiplying tokens with matrices of so many elements."""
    return 2 * elements * tokens


def _attention_flops(width: int, tokens: int) -> int:
    """Count those of scores and weighted sums; ``width`` is that of all heads of all blocks."""
    return 2 * 2 * width * tokens**2


def _part(name: str) -> str:
    """Name the part that a parameter of a VisionTransformer belongs to."""
    top, *path = name.split(".")
    if top == "blocks":
        _, layer, *inner = path
        if layer == "mlp":
            return "feed_forward"
        if layer == "attn" and "norm" not in inner[0]:
            return "output" if inner[0] == "proj" else "qkv"
        return "other"
    if top == "patch_embed" or not path:
        return "embedding"
    return "head" if top.startswith("head") else "other"


def _check_kind(model: nn.Module) -> Any:
    """Return the model if the rules above hold for it."""
    kind = type(model).__name__
    if not isinstance(model, VisionTransformer):
        raise InputError(f"{kind} is neither a TokenFormerViT nor a timm VisionTransformer")
    if model.attn_pool is not None:
        raise InputError(f"the costs of a pool by attention are not known: {kind} has one")
    if not isinstance(model.patch_embed, PatchEmbed):
        raise InputError(f"the costs of a {type(model.patch_embed).__name__} stem are not known")
    for block in model.blocks:
        for module, known in (
            (block, TokenFormerBlock | Block),
            (getattr(block, "attn", None), Attention | LinearAttention),
        ):
            if not isinstance(module, known):
                raise InputError(f"the costs of a {type(module).__name__} are not known")
    return model
