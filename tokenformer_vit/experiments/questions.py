"""What an ablation asks: its variants, as changes to the model of a config.

Plain values alone, so that the tables are rendered without OpenMMLab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenformer_vit.errors import InputError

from .fields import VISION, Field

Backbone = dict[str, Any]

PAIRS = ("num_qkv_param_tokens", "num_proj_param_tokens", "num_ffn_param_tokens")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a config's TokenFormer, whether the config gives them or a registry.

    Args:
        embed_dim: Width C.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        num_qkv_param_tokens: Pairs of each query, key and value projection.
        num_proj_param_tokens: Pairs of each output projection.
        num_ffn_param_tokens: Pairs of each feed-forward layer.
    """

    embed_dim: int
    depth: int
    num_heads: int
    num_qkv_param_tokens: int
    num_proj_param_tokens: int
    num_ffn_param_tokens: int

    def pairs(self, share: float) -> dict[str, int]:
        """Return a share of all pairs, at least one a layer, as a model or a growth takes them."""
        return {key: max(1, round(share * getattr(self, key))) for key in PAIRS}

    @property
    def num_param_tokens(self) -> int:
        """Count the pairs of a block."""
        return (
            3 * self.num_qkv_param_tokens + self.num_proj_param_tokens + self.num_ffn_param_tokens
        )


@dataclass(frozen=True, kw_only=True)
class ImageShape(Shape):
    """The sizes of a TokenFormer for images.

    Args:
        img_size: Height and width of the images.
        patch_size: Height and width of a patch.
        own_arguments: Names of the arguments that a TokenFormer takes and timm's ViT does not.
    """

    img_size: int
    patch_size: int
    own_arguments: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TextShape(Shape):
    """The sizes of a TokenFormer for language.

    Args:
        vocab_size: Entries of the embedding.
        context_length: Most tokens of a sequence.
        tie_embeddings: Whether the embedding is the head, too.
    """

    vocab_size: int
    context_length: int
    tie_embeddings: bool = True


# Of the part of a config that variants change, and of the sizes of the config's own model.
Change = Callable[[Backbone, Any], Backbone]
# Of those sizes, and of the length of the config's run in epochs or iterations.
Outside = Callable[[Any, int], dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Args:
        name: For files and the command line.
        label: For tables and charts.
        change: Makes the variant's backbone, or language model, out of the config's.
        outside: Says what the variant changes of the config besides, of the sizes and the length
            that the config has.
        paper: Top-1 in % that the paper reports for it on ImageNet-1K at base size.
        reference: It is there for comparison, and no step from the row above.
        grown: It gets larger while it trains.
        start: The variant from whose end it starts, one that comes before it, of the same seed.
        text: Folder of the text that it trains on, of those of its question.
    """

    name: str
    label: str
    change: Change
    paper: float | None = None
    reference: bool = False
    outside: Outside | None = None
    grown: bool = False
    start: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class Question:
    """One table.

    Args:
        name: That of the file which asks it.
        title: For the heading.
        text: What is asked, what the paper says, in a sentence or two of Markdown.
        variants: The rows, in order.
        field: Of images or of language.
        compute: The variant whose training cost is the measure of the others'; that is what the
            question is about, so that its variants differ in size. None where all have as many
            parameters.
        pretraining: The command that makes the weights from which the config starts; the question
            is then what to train of them, and how many parameters that are. None where every
            variant trains from scratch.
        baseline: The variant beside which all others are set, in size, cost and measure. None
            where rows are steps from one to the next.
        texts: Folders of the texts on which every run is measured; a variant says on which of them
            it trains, and may start from the end of another.
    """

    name: str
    title: str
    text: str
    variants: tuple[Variant, ...]
    field: Field = VISION
    compute: str | None = None
    pretraining: str | None = None
    baseline: str | None = None
    texts: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Tell whether all variants should have as many parameters."""
        return not (self.compute or self.pretraining or self.baseline or self.texts)


def arguments(**new: Any) -> Change:
    """Set arguments of the backbone; none leaves the config's model as it is."""
    return lambda backbone, shape: {**backbone, **new}


def pattention(**new: Any) -> Change:
    """Set arguments of every Pattention layer, and keep those that the config sets."""
    return lambda backbone, shape: {
        **backbone,
        "pattention_args": {**(backbone.get("pattention_args") or {}), **new},
    }


def attention_share(pairs_per_channel: float) -> Change:
    """Give each of q, k, v and o so many pairs a channel, and what is left to the feed-forward.

    Every split has as many parameters and FLOPs as the config's.
    """

    def change(backbone: Backbone, shape: Shape) -> Backbone:
        pairs = round(pairs_per_channel * shape.embed_dim)
        left = shape.num_param_tokens - 4 * pairs
        if left < 1:
            raise InputError(
                f"{pairs} pairs for each of q, k, v and o leave none of {shape.num_param_tokens} "
                "to the feed-forward layer; leave this variant out by --variants"
            )
        if pairs == shape.num_qkv_param_tokens == shape.num_proj_param_tokens:
            return backbone  # the config's own model, said as the config says it
        return {
            **backbone,
            "num_qkv_param_tokens": pairs,
            "num_proj_param_tokens": pairs,
            "num_ffn_param_tokens": left,
        }

    return change


def matched_vit(backbone: Backbone, shape: ImageShape) -> Backbone:
    """Replace the TokenFormer by timm's ViT of its width and depth with as many weights.

    A block has 2C(3·P_qkv + P_proj + P_ffn) weights as a TokenFormer and 4C² + 2C·hidden as a ViT.
    """
    width = shape.embed_dim
    hidden = shape.num_param_tokens - 2 * width
    if hidden < 1:
        raise InputError(
            f"no ViT of width {width} has as few weights as {shape.num_param_tokens} pairs a "
            f"block: its attention alone takes those of {2 * width}; leave vit out by --variants"
        )
    ratio = hidden / width
    if int(width * ratio) != hidden:  # timm rounds down
        ratio = (hidden + 0.5) / width
    return {
        **{key: value for key, value in backbone.items() if key not in shape.own_arguments},
        "model_name": "vit_base_patch16_224",
        "img_size": shape.img_size,
        "patch_size": shape.patch_size,
        "embed_dim": width,
        "depth": shape.depth,
        "num_heads": shape.num_heads,
        "mlp_ratio": ratio,
    }
