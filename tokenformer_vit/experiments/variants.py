"""The variants of a question: changes to the model of a config, and to its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenformer_vit.benchmarking.matched import matched_hidden

Part = dict[str, Any]

PAIRS = ("num_qkv_param_tokens", "num_proj_param_tokens", "num_ffn_param_tokens")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a config's TokenFormer.

    Args:
        embed_dim: Width C.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        num_qkv_param_tokens: Pairs of each query, key and value projection.
        num_proj_param_tokens: Pairs of each output projection.
        num_ffn_param_tokens: Pairs of each feed-forward layer.
        outside: Sizes outside the blocks, such as ``patch_size`` or ``vocab_size``.
    """

    embed_dim: int
    depth: int
    num_heads: int
    num_qkv_param_tokens: int
    num_proj_param_tokens: int
    num_ffn_param_tokens: int
    outside: Mapping[str, Any]

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
            share: Share of the neurons, at least one of which is left.
            pairs: Share of the pairs whose weights the Transformer matches.

        Raises:
            InputError: If no Transformer matches.
        """
        number = round(pairs * self.num_param_tokens)
        remedy = "give --variants without the matched Transformers"
        whole = matched_hidden(self.embed_dim, number, remedy)
        return {"hidden_features": max(1, round(share * whole))}


# Of the part of a config that variants change, and of the sizes of the config's own model.
Change = Callable[[Part, Shape], Part]
# Of those sizes, and of the length of the config's run in epochs or iterations.
Outside = Callable[[Shape, int], dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Args:
        name: Name in files and on the command line.
        label: Name in tables and charts.
        change: Turns the config's backbone, or language model, into the variant's.
        paper: Top-1 in % that the paper reports for it on ImageNet-1K at base size.
        reference: Whether it is a ViT or Transformer that TokenFormers are compared with.
        outside: Returns what else the variant changes in the config.
        grown: Whether it grows during training.
        start: Name of an earlier variant; training starts from its end, of the same seed.
        text: Folder of the text to train on, for a question about several texts.
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


def arguments(**new: Any) -> Change:
    """Set arguments of the model; without any, the config's model stays as it is."""
    return lambda part, shape: {**part, **new}


def in_stages(
    unit: str, shares: Sequence[float], size: Callable[[Shape, float], dict[str, int]], **how: Any
) -> Outside:
    """Grow through shares of the full size, in stages of equal length.

    Args:
        unit: ``epoch`` or ``iteration``.
        shares: Share of the full size in each stage; the first one is the size at the start.
        size: Returns the arguments of a growth to a share, such as :meth:`Shape.pairs`.
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
    """Train for a share, or a multiple, of the length, with a whole learning rate schedule.

    Args:
        share: Share of the config's length.
        limit: Key of ``train_cfg``, ``max_epochs`` or ``max_iters``.
    """
    return lambda shape, length: {"train_cfg": {limit: round(share * length)}}
