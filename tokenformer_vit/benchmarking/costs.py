"""Parameters and FLOPs of every part of a model, in closed form: Table 3 of the paper.

A multiplication and an addition are two FLOPs, and a backward pass costs two forward passes. Of
the FLOPs are left out, as in the paper, those of Θ and other activations, softmax, norms, biases
and sums.

The first version of the paper prints d·n parameters for a Pattention of q, k, v or the output, and
2·d·n for that of the feed-forward part. Each has keys and values, 2·d·n, as a later version prints.
What the table calls training FLOPs is one forward pass; here it is three times that.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from timm.layers import Attention as LinearAttention
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.layers import Attention, Pattention, TokenFormerBlock

__all__ = [
    "PARTS",
    "Cost",
    "Pairs",
    "draw_lengths",
    "equal_width",
    "language_costs",
    "model_costs",
    "total",
    "training_flops",
]

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


class Pairs(NamedTuple):
    """How many pairs each Pattention of a block has."""

    qkv: int
    proj: int
    ffn: int


# The paper's language models that grow at a fixed width, from 124M to what it calls 1.4B.
GROWN_DEPTH, GROWN_WIDTH, GROWN_VOCABULARY = 12, 768, 50_304
GROWN_PAIRS = tuple(Pairs(n, n, 4 * n) for n in (576, 2140, 4850, 8620))


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


def total(costs: Mapping[str, Cost]) -> Cost:
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
        A cost for each of ``PARTS``, for one image. Every parameter belongs to one part; of a layer
        with ``active`` or ``top_k`` all pairs are counted, and the FLOPs of those that are read.

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
    for name, module in vit.named_modules():
        if isinstance(module, Pattention):
            costs[_part(name)] += Cost(0, -_product_flops(_idle_elements(module), tokens))
    width = sum(block.attn.num_heads * block.attn.head_dim for block in vit.blocks)
    costs["token_token"] += Cost(0, _attention_flops(width, tokens))
    return costs


def training_flops(model: nn.Module, num_tokens: int | None = None) -> int:
    """Count the FLOPs of training a timm model on one image, were all of its parameters trained.

    Arguments and errors are those of :func:`model_costs`.

    Returns:
        FLOPs of a forward and a backward pass, three times those of the forward.
    """
    return total(model_costs(model, num_tokens)).training_flops


def language_costs(
    depth: int, width: int, vocabulary: int, num_tokens: int, pairs: Pairs | None = None
) -> dict[str, Cost]:
    """Count the parameters and the forward FLOPs of every part of a language model, from its sizes.

    Args:
        depth: Number of blocks.
        width: Width d of the tokens.
        vocabulary: Entries of the embedding, which the head shares.
        num_tokens: Length T of the sequence.
        pairs: Those of a TokenFormer; None for a Transformer, whose feed-forward part is 4·d wide.

    Returns:
        A cost for each of ``PARTS``, for one sequence. Every token attends to every other, as in
        the paper: what a causal kernel saves is not taken off. The head is counted for all tokens,
        where the paper prints it for one.

    Source:
        TokenFormer, arXiv:2410.23168, Table 3.
    """
    if pairs is None:
        sizes = {"qkv": 3 * width**2, "output": width**2, "feed_forward": 8 * width**2}
    else:
        numbers = {"qkv": 3 * pairs.qkv, "output": pairs.proj, "feed_forward": pairs.ffn}
        sizes = {part: 2 * width * number for part, number in numbers.items()}
    costs = {
        part: Cost(depth * size, _product_flops(depth * size, num_tokens))
        for part, size in sizes.items()
    }
    costs["embedding"] = Cost(vocabulary * width)
    costs["token_token"] = Cost(0, _attention_flops(depth * width, num_tokens))
    costs["head"] = Cost(0, _product_flops(vocabulary * width, num_tokens))
    return {part: costs.get(part, Cost()) for part in PARTS}


def equal_width(depth: int, vocabulary: int, parameters: int) -> int:
    """Find the width at which a Transformer of :func:`language_costs` has so many parameters.

    Args:
        depth: Number of blocks.
        vocabulary: Entries of the embedding.
        parameters: How many, with the embedding.

    Returns:
        The nearest whole number to the solution d of 12·depth·d² + vocabulary·d = parameters.
    """
    square = 12 * depth
    root = math.sqrt(vocabulary**2 + 4 * square * parameters)
    return round((root - vocabulary) / (2 * square))


def draw_lengths(path: Path) -> None:
    """Draw what a token costs against the length of its sequence into a PNG file.

    TokenFormers that grow by pairs, at one width, stand against Transformers of the same depth and
    as many parameters, which grow by width.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written; ``filename`` is ``path``.

    Source:
        TokenFormer, arXiv:2410.23168, Figure 5; the sizes are those of its growing language models.
    """
    from matplotlib.figure import Figure  # what counts does without it

    lengths = range(1024, 32 * 1024 + 1, 1024)
    figure = Figure(figsize=(11, 4), layout="constrained")
    whole, between = figure.subplots(1, 2)
    for index, pairs in enumerate(GROWN_PAIRS):
        grown = language_costs(GROWN_DEPTH, GROWN_WIDTH, GROWN_VOCABULARY, 1, pairs)
        parameters = total(grown).parameters
        wider = equal_width(GROWN_DEPTH, GROWN_VOCABULARY, parameters)
        for kind, line, width, own in (
            ("TokenFormer", "-", GROWN_WIDTH, pairs),
            ("Transformer", "--", wider, None),
        ):
            flops = {whole: [], between: []}
            for length in lengths:
                costs = language_costs(GROWN_DEPTH, width, GROWN_VOCABULARY, length, own)
                flops[whole].append(total(costs).training_flops / length / 1e9)
                flops[between].append(costs["token_token"].training_flops / length / 1e9)
            label = f"{kind}, {parameters / 1e6:,.0f}M, width {width}"
            for axes, values in flops.items():
                axes.plot(lengths, values, line, color=f"C{index}", label=label)
    whole.set(title="training GFLOPs a token", xlabel="tokens in a sequence", ylim=0)
    between.set(title="of these, token-token attention", xlabel="tokens in a sequence", ylim=0)
    between.legend(loc="upper left", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())


def _product_flops(elements: int, tokens: int) -> int:
    """Count the FLOPs of multiplying tokens with matrices of so many elements."""
    return 2 * elements * tokens


def _attention_flops(width: int, tokens: int) -> int:
    """Count those of scores and weighted sums; ``width`` is that of all heads of all blocks."""
    return 2 * 2 * width * tokens**2


def _idle_elements(layer: Pattention) -> int:
    """Count the elements of keys and values that a token of this layer does not meet."""
    pairs = layer.num_param_tokens
    active = pairs if layer.active is None else len(layer.active)
    chosen = active if layer.top_k is None else layer.top_k
    return (pairs - active) * layer.in_features + (pairs - chosen) * layer.out_features


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
