"""Parameters and FLOPs of every part of a model, in closed form: Table 3 of the paper.

A multiplication and an addition are two FLOPs, and a backward pass costs as much as two forward
passes. As in the paper, the FLOPs of Θ and other activations, softmax, norms, biases and sums are
not counted. A later version of the paper counts 2·d·n parameters for every Pattention, for keys and
values; so does this module. The paper's training FLOPs are those of one forward pass; here training
costs three.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from timm.layers import Attention as LinearAttention
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, Pattention, TokenFormerBlock
from tokenformer_vit.models import TokenFormerLM

# Parts of a model, with their names in tables.
PARTS = {
    "embedding": "embedding, positions",
    "qkv": "q, k, v projections",
    "token_token": "token-token attention",
    "output": "output projection",
    "feed_forward": "feed-forward",
    "head": "head",
    "other": "norms, scales",
}
# The first part whose pattern a parameter's name has. The names are those of timm, of this package,
# and of GPT-2 and GPT-NeoX.
_PATTERNS = {
    "feed_forward": r"\bmlp\.",
    "qkv": r"\battn\.(qkv|query|key|value|c_attn)\.|\bquery_key_value\.",
    "output": r"\battn\.(proj|c_proj)\.|\battention\.dense\.",
    "head": r"^(lm_)?head",
    "embedding": r"^[^.]+$|^(model\.)?(patch_embed|embedding|positions)|\b(wte|wpe|embed_in)\.",
}
_LANGUAGE = ("tokenformer", "gpt2", "gpt_neox")  # kinds of transformers


@dataclass(frozen=True)
class Cost:
    """Cost of a part of a model. The FLOPs are per image or per sequence."""

    parameters: int = 0
    forward_flops: int = 0

    @property
    def training_flops(self) -> int:
        """FLOPs of a forward and a backward pass."""
        return 3 * self.forward_flops

    def __add__(self, other: "Cost") -> "Cost":
        """Add the costs of two parts."""
        return Cost(self.parameters + other.parameters, self.forward_flops + other.forward_flops)


def total(costs: Mapping[str, Cost]) -> Cost:
    """Return the cost of all parts of a model."""
    return sum(costs.values(), Cost())


def training_flops(model: nn.Module, num_tokens: int | None = None) -> int:
    """Return the FLOPs of training all parameters on one image or sequence; see `model_costs`."""
    return total(model_costs(model, num_tokens)).training_flops


def model_costs(model: nn.Module, num_tokens: int | None = None) -> dict[str, Cost]:
    """Count the parameters and the forward FLOPs of each of ``PARTS``, per image or per sequence.

    Sizes are read from the parameters, also after growth; they may be on the device ``meta``.
    Every parameter is counted once: an embedding that is also the head counts as embedding, and its
    product as head. Of pairs that a layer does not use, only the parameters count. Linear tokens
    count as one product where that is cheaper, without the making of its weight once a step. A
    language model predicts after every token, and every token attends to all others, as in the
    paper.

    Args:
        model: ``TokenFormerViT``, timm ``VisionTransformer`` with ordinary blocks,
            ``TokenFormerLM``, or GPT-2 or GPT-NeoX of transformers with its head. A language model
            may be inside another module, whose own parameters are not counted.
        num_tokens: Length of the sequence, including class and register tokens; default: the length
            for an image of the model's size, or the whole context.

    Raises:
        InputError: If the model is of another kind, or ``num_tokens`` leaves no token for patches.

    Source:
        TokenFormer, arXiv:2410.23168, Table 3, with patches instead of a vocabulary for images.
    """
    if isinstance(model, VisionTransformer):
        rows, width, shared = _vision(model, num_tokens)
    else:
        model, context, width, shared = _language(model)
        tokens = context if num_tokens is None else num_tokens
        rows = dict.fromkeys(["qkv", "output", "feed_forward", "head"], tokens)
    tokens = rows["qkv"]
    if min(rows.values()) < 1:
        raise InputError(f"num_tokens is {num_tokens}: no token is left; give a larger number")
    costs = dict.fromkeys(PARTS, Cost())
    for name, parameter in model.named_parameters():
        part, count = _part(name), parameter.numel()
        # Positions and the class token are only added; they are parameters of the model itself.
        is_matrix = parameter.ndim > 1 and "." in name
        costs[part] += Cost(count, 2 * count * rows.get(part, 0) if is_matrix else 0)
    for name, module in model.named_modules():
        if isinstance(module, Pattention):
            width = module.in_features + module.out_features
            used = module.num_used * width
            if module.theta == "linear":
                used = min(used, module.in_features * module.out_features)
            unused = module.num_param_tokens * width - used
            costs[_part(f"{name}.")] += Cost(0, -2 * unused * tokens)
    # Scores and weighted sums.
    costs["token_token"] += Cost(0, 4 * width * tokens**2)
    costs["head"] += Cost(0, 2 * shared * rows["head"])
    return costs


def _part(name: str) -> str:
    return next((part for part, form in _PATTERNS.items() if re.search(form, name)), "other")


def _vision(vit: Any, num_tokens: int | None) -> tuple[dict[str, int], int, int]:
    """Return the rows of the products of each part, the width of all heads of all blocks, and 0."""
    attentions: list[Any] = [getattr(block, "attn", None) for block in vit.blocks]
    for modules, known in (
        ([vit.attn_pool], type(None)),
        ([vit.patch_embed], PatchEmbed),
        (vit.blocks, TokenFormerBlock | Block),
        (attentions, Attention | LinearAttention),
    ):
        for module in modules:
            if not isinstance(module, known):
                raise InputError(
                    f"the costs of a {type(module).__name__} are unknown: give a plain ViT"
                )
    prefix: int = vit.num_prefix_tokens
    patches = vit.patch_embed.num_patches if num_tokens is None else num_tokens - prefix
    rows = dict.fromkeys(("qkv", "output", "feed_forward"), patches + prefix)
    rows |= {"embedding": patches, "head": 1 if vit.global_pool else patches + prefix}
    return rows, sum(each.num_heads * each.head_dim for each in attentions), 0


def _language(model: nn.Module) -> tuple[Any, int, int, int]:
    """Find a language model; return it, its context, its width, and what is embedding and head."""
    for module in model.modules():
        whole: Any = module
        config: Any = getattr(whole, "config", None)
        # Recognised by names, because transformers may not be installed.
        kind = hasattr(whole, "lm_head") and getattr(config, "model_type", None)
        if isinstance(whole, TokenFormerLM):
            embedding, head = whole.embedding.weight, whole.head
            width, context = config.embed_dim * config.depth, config.context_length
        elif kind in _LANGUAGE and not getattr(config, "add_cross_attention", False):
            embedding, head = whole.get_input_embeddings().weight, whole.lm_head
            width = config.hidden_size * config.num_hidden_layers
            context = config.max_position_embeddings
        else:
            continue
        shared = embedding.numel() if head is None or head.weight is embedding else 0
        return whole, context, width, shared
    raise InputError(
        f"the costs of a {type(model).__name__} are unknown: give a TokenFormer, a plain ViT of "
        "timm, or a GPT-2 or GPT-NeoX with its head and without cross-attention"
    )
