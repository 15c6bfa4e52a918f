"""Parameters and FLOPs of every part of a model: Table 3 of the paper.

A multiplication and an addition are two FLOPs, and a backward pass costs as much as two forward
passes. As in the paper, the FLOPs of Θ and other activations, softmax, norms, biases and sums are
not counted. The paper's training FLOPs are those of one forward pass; here training costs three.

Blocks are counted by the shapes of their parameters: a forward pass would call the hooks of a
training, and form the weight of linear tokens. A patch embedding, which may be any module, is run.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention as LinearAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, Pattention, TokenFormerBlock

PARTS = ("embedding", "qkv", "token_token", "output", "feed_forward", "head", "other")
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
_UNKNOWN = "the costs of a {} are unknown: give a TokenFormer, ViT or GPT-2"


@dataclass(frozen=True)
class Cost:
    """Cost of a part of a model. The FLOPs are per image or per sequence."""

    parameters: int = 0
    forward_flops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Add the costs of two parts."""
        return Cost(self.parameters + other.parameters, self.forward_flops + other.forward_flops)


def total(costs: Mapping[str, Cost]) -> Cost:
    """Return the cost of all parts of a model."""
    return sum(costs.values(), Cost())


def training_flops(model: nn.Module, num_tokens: int | None = None) -> int:
    """Return the FLOPs of training all parameters on one image or sequence; see `model_costs`."""
    return 3 * total(model_costs(model, num_tokens)).forward_flops


def model_costs(model: nn.Module, num_tokens: int | None = None) -> dict[str, Cost]:
    """Count the parameters and the forward FLOPs of each of ``PARTS``, per image or per sequence.

    An embedding that is also the head counts once, as embedding, and its product as head. Of pairs
    that a layer does not use, only the parameters count. Linear tokens cost as one product where
    that is cheaper. A language model predicts after each token, and each attends to all others.

    Args:
        model: ``TokenFormerViT``, timm ``VisionTransformer`` with ordinary blocks, or a language
            model of transformers with its head (TokenFormer, GPT-2, GPT-NeoX), also inside another
            module. It may be on the device ``meta``.
        num_tokens: Length of the sequence, including class and register tokens; default: the length
            for an image of the model's size, or the whole context.

    Raises:
        InputError: If the model is of another kind, or ``num_tokens`` leaves no token for patches.
    """
    counted = _vision if isinstance(model, VisionTransformer) else _language
    model, tokens, width, flops = counted(model, num_tokens)
    rows = dict.fromkeys(["qkv", "output", "feed_forward"], tokens)
    if "head" not in flops:
        rows["head"] = 1 if model.global_pool else tokens
    flops["token_token"] = 4 * width * tokens**2  # scores and weighted sums
    costs = {part: Cost(0, flops.get(part, 0)) for part in PARTS}
    for name, parameter in model.named_parameters():
        part, count = _part(name), parameter.numel()
        costs[part] += Cost(count, 2 * count * rows.get(part, 0) if parameter.ndim > 1 else 0)
    for name, layer in model.named_modules():
        if isinstance(layer, Pattention):  # which may multiply with less than its parameters
            every = layer.num_param_tokens * (layer.in_features + layer.out_features)
            added = layer_products(layer, layer.num_used) - every
            costs[_part(f"{name}.")] += Cost(0, 2 * tokens * added)
    return costs


def layer_products(layer: Pattention, pairs: int) -> int:
    """Return the multiplications of a layer with so many pairs for a token."""
    products = pairs * (layer.in_features + layer.out_features)
    fused = layer.in_features * layer.out_features
    return min(products, fused) if layer.theta == "linear" else products


def _part(name: str) -> str:
    return next((part for part, form in _PATTERNS.items() if re.search(form, name)), "other")


def _vision(vit: Any, num_tokens: int | None) -> tuple[Any, int, int, dict[str, int]]:
    """Return the model, tokens and width of all its blocks, and the FLOPs of other parts."""
    attentions = [getattr(block, "attn", None) for block in vit.blocks]
    for module in (*vit.blocks, *attentions, *([vit.attn_pool] if vit.attn_pool else [])):
        if not isinstance(module, TokenFormerBlock | Block | Attention | LinearAttention):
            raise InputError(_UNKNOWN.format(type(module).__name__))
    embed = copy.deepcopy(vit.patch_embed).to("meta", torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        embed(torch.empty(1, vit.in_chans, *embed.img_size, device="meta"))
    patches = embed.num_patches if num_tokens is None else num_tokens - vit.num_prefix_tokens
    if patches < 1:
        raise InputError(f"num_tokens is {num_tokens}: no token is left; give a larger number")
    flops = {"embedding": counter.get_total_flops() * patches // embed.num_patches}
    width = sum(getattr(block.attn, "attn_dim", vit.embed_dim) for block in vit.blocks)
    return vit, patches + vit.num_prefix_tokens, width, flops


def _language(model: nn.Module, num_tokens: int | None) -> tuple[Any, int, int, dict[str, int]]:
    """Find a language model, and return the same of it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        # Recognised by names, because transformers may not be installed.
        kind = hasattr(module, "lm_head") and getattr(config, "model_type", None)
        if kind in _LANGUAGE and not getattr(config, "add_cross_attention", False):
            width, depth = config.hidden_size, config.num_hidden_layers
            tokens = config.max_position_embeddings if num_tokens is None else num_tokens
            return module, tokens, width * depth, {"head": 2 * tokens * width * config.vocab_size}
    raise InputError(_UNKNOWN.format(type(model).__name__))
