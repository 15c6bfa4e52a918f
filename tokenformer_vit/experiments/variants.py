"""The variants of a question: changes to the model of a config, and to its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenformer_vit.benchmarking.matched import matched_hidden
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.block import token_arguments

Part = dict[str, Any]

PAIRS = tuple(COUNTS.values())


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a config's TokenFormer."""

    embed_dim: int  # width C
    depth: int
    num_heads: int
    num_qkv_param_tokens: int  # pairs of each query, key and value projection
    num_proj_param_tokens: int
    num_ffn_param_tokens: int
    outside: Mapping[str, Any]  # sizes outside the blocks, such as patch_size or vocab_size

    @classmethod
    def of(cls, blocks: Any, embed_dim: int, outside: Mapping[str, Any]) -> "Shape":
        """Read the sizes from the blocks of a TokenFormer.

        Raises:
            InputError: If the blocks have different numbers of pairs.
        """
        pairs, heads = token_arguments(blocks), blocks[0].attn.num_heads
        sizes = {key: pairs[key] for key in PAIRS}
        for key, size in sizes.items():
            if isinstance(size, list):
                raise InputError(
                    f"{key} is {size}: give one number for all blocks, which the variants share"
                )
        return cls(
            embed_dim=embed_dim, depth=len(blocks), num_heads=heads, outside=outside, **sizes
        )

    def pairs(self, share: float) -> dict[str, int]:
        """Return a share of all pairs, at least one per layer."""
        return {key: max(1, round(share * getattr(self, key))) for key in PAIRS}

    @property
    def num_param_tokens(self) -> int:
        """Number of pairs of a block."""
        return (
            3 * self.num_qkv_param_tokens + self.num_proj_param_tokens + self.num_ffn_param_tokens
        )

    def hidden(self, share: float, pairs: float = 1) -> dict[str, int]:
        """Return a share of the hidden neurons of the matched Transformer.

        Args:
            share: Share of the neurons; at least one stays.
            pairs: Share of the pairs; the whole Transformer has as many weights as these pairs.

        Raises:
            InputError: If no Transformer matches.
        """
        number = round(pairs * self.num_param_tokens)
        remedy = "give --variants without the matched Transformers"
        whole = matched_hidden(self.embed_dim, number, remedy)
        return {"hidden_features": max(1, round(share * whole))}


# Arguments: the part of a config that variants change, and the sizes of the config's own model.
ModelChange = Callable[[Part, Shape], Part]
# Arguments: the same sizes, and the length of the config's run in epochs or iterations.
Outside = Callable[[Shape, int], dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str  # in files and on the command line
    label: str  # in tables and charts
    change: ModelChange  # turns the config's backbone, or language model, into the variant's
    paper: float | None = None  # top-1 in % that the paper reports for it on ImageNet-1K
    # A ViT or Transformer that TokenFormers are compared with; of several kinds, which one.
    reference: bool | str = False
    outside: Outside | None = None  # returns what else changes in the config
    # Variants and shares: its training costs as many FLOPs as these shares of theirs together.
    costs: tuple[tuple[str, float], ...] = ()
    grown: bool = False  # grows during training
    start: str | None = None  # name of the earlier variant that training continues
    start_folder: str = "."  # where its weights are, within the folder of the earlier run
    text: str | None = None  # folder of the text to train on, where a question has several
    against: tuple[tuple[str, str], ...] = ()  # heading of a column, name of the other variant
    line: str | None = None  # line of a chart that it is a point of
    recorded: bool = False  # only its records are left: it can no longer be trained
    prepares: bool = False  # trains weights that others start from, and has no result of its own


def arguments(**new: Any) -> ModelChange:
    """Set arguments of the model; without any, the config's model stays as it is."""
    return lambda part, shape: {**part, **new}


def in_stages(
    unit: str, shares: Sequence[float], size: Callable[[Shape, float], dict[str, int]], **how: Any
) -> Outside:
    """Grow the model in stages of equal length, each with a share of the full size.

    Args:
        unit: ``epoch`` or ``iteration``.
        shares: Share of the full size in each stage; the first one is the size at the start.
        size: Function that returns the sizes for a share, such as :meth:`Shape.pairs`.
        how: Other arguments of GrowthHook.
    """

    def outside(shape: Shape, length: int) -> dict[str, Any]:
        schedule = [
            {unit: round(stage / len(shares) * length), **size(shape, share)}
            for stage, share in enumerate(shares)
        ]
        return {"custom_hooks": [{"type": "GrowthHook", "schedule": schedule[1:], **how}]}

    return outside


def lasting(share: float, limit: str) -> Outside:
    """Multiply the length of the training; the learning rate schedule is stretched with it."""
    return lambda shape, length: {"train_cfg": {limit: round(share * length)}}
