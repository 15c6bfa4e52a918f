"""Arguments of a model for its Pattention layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenformer_vit.errors import InputError

# The numbers of pairs: one for all blocks, or one for each block. None is the default of a block.
Counts = int | Sequence[int] | None
# The argument with the number of pairs of each kind of layer.
COUNTS = {
    "qkv": "num_qkv_param_tokens",
    "proj": "num_proj_param_tokens",
    "ffn": "num_ffn_param_tokens",
}

EPS = 1e-6  # of a layer that is given none


def counts_by_block(depth: int, **counts: Counts) -> list[dict[str, Any]]:
    """Return the numbers of pairs of each block, by name of the argument; ints or None."""
    for name, count in counts.items():
        if isinstance(count, Sequence) and len(count) != depth:
            raise InputError(
                f"{name} has {len(count)} numbers for {depth} blocks: give one number for all "
                "blocks, or a list with one for each block"
            )
    return [
        {name: c[block] if isinstance(c, Sequence) else c for name, c in counts.items()}
        for block in range(depth)
    ]


def arguments_of(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Choose from the arguments of all layers those of a kind; a dict has a value for each kind."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value.keys() != COUNTS.keys():
            raise InputError(
                f"{name} must be one value, or a dict for {', '.join(COUNTS)}, but got {value!r}"
            )
    return {n: v[kind] if isinstance(v, Mapping) else v for n, v in arguments.items()}


def model_pattention_args(
    arguments: Mapping[str, Any] | None, width: int, depth: int
) -> dict[str, Any]:
    """Convert the ``pattention_args`` of a model to those of its blocks.

    They are arguments of :class:`~tokenformer_vit.layers.Pattention`, and ``init``: ``scaled`` (the
    default), or ``released`` for :func:`released_stds`.
    """
    shared = dict(arguments or {})
    init = shared.pop("init", "scaled")
    if init not in ("scaled", "released"):
        raise InputError(f"init must be one of scaled, released, but got {init!r}")
    if init == "released":
        stds = zip(("key_init_std", "value_init_std"), released_stds(width, depth), strict=True)
        shared = {**dict(stds), **shared}
    return shared


def released_stds(width: int, depth: int) -> tuple[float, float]:
    """Return the standard deviations of keys and values in the authors' language code."""
    return 0.02, 2 / (depth * math.sqrt(width))
