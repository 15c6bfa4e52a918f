"""Parameters and FLOPs of every part of a model, in closed form: Table 3 of the paper.

A multiplication and an addition are two FLOPs, and a backward pass costs as much as two forward
passes. As in the paper, the FLOPs of Θ and other activations, softmax, norms, biases and sums are
not counted.

The first version of the paper counts d·n parameters for a Pattention of q, k, v or the output. A
later version counts 2·d·n for every Pattention, because it has keys and values; this module does
the same. The paper's table gives the FLOPs of one forward pass as training FLOPs; here training
costs three forward passes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from timm.layers import Attention as LinearAttention
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, Pattention, TokenFormerBlock
from tokenformer_vit.models import TokenFormerDecoder, TokenFormerLM

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


def model_costs(model: nn.Module, num_tokens: int | None = None) -> dict[str, Cost]:
    """Count the parameters and the forward FLOPs of every part of a model.

    Sizes are read from the parameters, also after growth. Nothing is computed with them: they may
    be on the device ``meta``.

    Args:
        model: ``TokenFormerViT``, timm ``VisionTransformer`` with ordinary blocks,
            ``TokenFormerLM``, or GPT-2 or GPT-NeoX of transformers with its head. A language model
            may be inside another module, whose own parameters are not counted.
        num_tokens: Length of the sequence, including class and register tokens; default: the length
            for an image of the model's size, or the whole context.

    Returns:
        The cost of each of ``PARTS``, per image or per sequence. Every parameter is counted in one
        part. If the embedding is also the head, its parameters are counted in the embedding, and
        its matrix product in the head. In a layer with ``active`` or ``size``, all pairs count as
        parameters, and only the pairs that are used count as FLOPs. A language model
        predicts after every token, and every token attends to all others, as in the paper: the
        savings of a causal kernel are not subtracted.

    Raises:
        InputError: If the model is of another kind, or ``num_tokens`` leaves no token for patches.

    Source:
        TokenFormer, arXiv:2410.23168, Table 3, with patches instead of a vocabulary for images.
    """
    plan = _plan(model, num_tokens)
    tokens = plan.rows["qkv"]
    costs = dict.fromkeys(PARTS, Cost())
    for name, parameter in plan.model.named_parameters():
        part, count = plan.part(name), parameter.numel()
        # Positions and the class token are only added; they are parameters of the model itself.
        is_matrix = parameter.ndim > 1 and "." in name
        flops = _product_flops(count, plan.rows.get(part, 0)) if is_matrix else 0
        costs[part] += Cost(count, flops)
    for name, module in plan.model.named_modules():
        if isinstance(module, Pattention):
            costs[plan.part(name)] += Cost(0, -_product_flops(_idle_elements(module), tokens))
    costs["token_token"] += Cost(0, _attention_flops(plan.width, tokens))
    costs["head"] += Cost(0, _product_flops(plan.shared, plan.rows["head"]))
    return costs


def training_flops(model: nn.Module, num_tokens: int | None = None) -> int:
    """Count the FLOPs of training all parameters of a model on one image or sequence.

    Args:
        model: Model, as for :func:`model_costs`.
        num_tokens: Length of the sequence, as for :func:`model_costs`.

    Returns:
        FLOPs of a forward and a backward pass: three times the forward FLOPs.

    Raises:
        InputError: In the cases of :func:`model_costs`.
    """
    return total(model_costs(model, num_tokens)).training_flops


def _product_flops(elements: int, tokens: int) -> int:
    """Return the FLOPs of multiplying tokens with matrices of ``elements`` elements."""
    return 2 * elements * tokens


def _attention_flops(width: int, tokens: int) -> int:
    """Return the FLOPs of scores and weighted sums; ``width`` sums all heads of all blocks."""
    return 2 * 2 * width * tokens**2


def _idle_elements(layer: Pattention) -> int:
    """Count the elements of keys and values that this layer does not use."""
    idle = layer.num_param_tokens - layer.num_used
    return idle * (layer.in_features + layer.out_features)


class _Plan(NamedTuple):
    """Parts of a model for counting.

    Args:
        model: Model whose parameters count.
        width: Width of all heads of all blocks.
        rows: Number of tokens that the matrices of a part are multiplied with.
        part: Function from the name of a parameter to its part.
        shared: Number of elements of the embedding that are also the head.
    """

    model: nn.Module
    width: int
    rows: Mapping[str, int]
    part: Callable[[str], str]
    shared: int = 0


def _plan(model: nn.Module, num_tokens: int | None) -> _Plan:
    if isinstance(model, VisionTransformer):
        return _vision(model, num_tokens)
    for module in model.modules():
        if isinstance(module, TokenFormerLM):
            return _language(module, module, module.head, num_tokens)
        # Recognised by their attributes, because transformers may not be installed.
        inner = getattr(module, "model", None)
        if hasattr(module, "lm_head") and isinstance(inner, TokenFormerDecoder):
            return _language(module, inner, module.lm_head, num_tokens)
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if hasattr(module, "lm_head") and kind in ("gpt2", "gpt_neox"):
            return _transformer(module, num_tokens)
    raise InputError(
        f"the costs of a {type(model).__name__} are unknown; give a TokenFormerViT, a timm "
        "VisionTransformer, a TokenFormer language model, or a GPT-2 or GPT-NeoX with its head"
    )


def _language(model: nn.Module, decoder: Any, head: Any, num_tokens: int | None) -> _Plan:
    shared = 0
    if head is None or head.weight is decoder.embedding.weight:
        shared = decoder.embedding.weight.numel()
    rows = _rows(num_tokens, decoder.config.context_length)
    width = _width(decoder.blocks)
    return _Plan(model, width, rows, lambda name: _part(name.removeprefix("model.")), shared)


def _width(blocks: Iterable[Any]) -> int:
    return sum(block.attn.num_heads * block.attn.head_dim for block in blocks)


def _rows(num_tokens: int | None, context: int) -> dict[str, int]:
    """Return the rows of a language model; its embedding is looked up, not multiplied."""
    tokens = context if num_tokens is None else num_tokens
    if tokens < 1:
        raise InputError(f"num_tokens must be at least 1, but got {tokens}")
    return dict.fromkeys(("qkv", "output", "feed_forward", "head"), tokens)


def _vision(vit: Any, num_tokens: int | None) -> _Plan:
    _check_vision(vit)
    prefix: int = vit.num_prefix_tokens
    patches: int = vit.patch_embed.num_patches if num_tokens is None else num_tokens - prefix
    tokens = patches + prefix
    if patches < 1:
        raise InputError(
            f"num_tokens must be above {prefix}, the number of class and register tokens, but got "
            f"{tokens}"
        )
    rows = {
        "embedding": patches,
        **dict.fromkeys(("qkv", "output", "feed_forward"), tokens),
        "head": 1 if vit.global_pool else tokens,
    }
    return _Plan(vit, _width(vit.blocks), rows, _part)


def _check_vision(vit: Any) -> None:
    """Check that the closed form holds for this model."""
    kind = type(vit).__name__
    if vit.attn_pool is not None:
        raise InputError(
            f"the costs of attention pooling in {kind} are unknown; choose another global_pool"
        )
    if not isinstance(vit.patch_embed, PatchEmbed):
        raise InputError(
            f"the costs of a {type(vit.patch_embed).__name__} stem are unknown; give a plain ViT"
        )
    for block in vit.blocks:
        for module, known in (
            (block, TokenFormerBlock | Block),
            (getattr(block, "attn", None), Attention | LinearAttention),
        ):
            if not isinstance(module, known):
                raise InputError(
                    f"the costs of a {type(module).__name__} are unknown; give a plain ViT"
                )


def _transformer(model: Any, num_tokens: int | None) -> _Plan:
    """Plan a GPT-2 or a GPT-NeoX."""
    config, embedding = model.config, model.get_input_embeddings().weight
    if getattr(config, "add_cross_attention", False):
        raise InputError(
            "the costs of a GPT-2 with cross-attention are unknown; give one without it"
        )
    width = config.hidden_size * config.num_hidden_layers
    rows = _rows(num_tokens, config.max_position_embeddings)
    shared = embedding.numel() if model.lm_head.weight is embedding else 0
    return _Plan(model, width, rows, _transformer_part, shared)


def _part(name: str) -> str:
    """Name the part that a parameter of a VisionTransformer or a TokenFormerLM belongs to."""
    top, *path = name.split(".")
    if top == "blocks":
        _, layer, *inner = path
        if layer == "mlp":
            return "feed_forward"
        if layer == "attn" and "norm" not in inner[0]:
            return "output" if inner[0] == "proj" else "qkv"
        return "other"
    if top in ("patch_embed", "embedding", "positions") or not path:
        return "embedding"
    return "head" if top.startswith(("head", "lm_head")) else "other"


def _transformer_part(name: str) -> str:
    """Name the part that a parameter of a GPT-2 or a GPT-NeoX belongs to."""
    path = name.split(".")
    for module, part in (
        ("lm_head", "head"),
        ("wte", "embedding"),
        ("wpe", "embedding"),
        ("embed_in", "embedding"),
        ("mlp", "feed_forward"),
        ("c_attn", "qkv"),
        ("query_key_value", "qkv"),
        ("c_proj", "output"),  # after mlp, which also has one
        ("dense", "output"),
    ):
        if module in path:
            return part
    return "other"
