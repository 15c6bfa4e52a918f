"""Arguments of a model for its Pattention layers, and their valid values."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
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
_GATES = ("none", "learned", "fixed")
# A model passes these to all of its layers.
_SHARED_ARGS = ("tau", "learn_tau", "eps", "key_init_scale", "gate")
# A model computes these for its layers from ``init``.
_INIT_ARGS = ("key_init_std", "value_init_std")
_INITIALIZATIONS = ("scaled", "released")

# The range of numbers: their squares must also be normal float32 numbers.
_LARGEST, _SMALLEST = 1e18, 1e-18
_MAY_BE_ZERO = ("eps", "init_gain")


def check_argument(name: str, value: Any) -> None:
    """Check an argument of a layer.

    Args:
        name: Name of the argument.
        value: Value of the argument.

    Raises:
        InputError: If the value has another type, is not finite or is out of range.
    """
    if name == "gate":
        if value not in _GATES:
            raise InputError(f"gate must be one of {', '.join(_GATES)}, but got {value!r}")
        return
    if name == "learn_tau":
        if not isinstance(value, bool):
            raise InputError(f"learn_tau must be True or False, but got {value!r}")
        return
    if value is None and name in ("tau", *_INIT_ARGS):
        return
    zero = name in _MAY_BE_ZERO
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (_SMALLEST <= number <= _LARGEST or (zero and number == 0)):
        least = f"0, or from {_SMALLEST}" if zero else f"from {_SMALLEST}"
        raise InputError(f"{name} must be {least} to {_LARGEST}, but got {value!r}")


def check_pattention_args(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the arguments that all Pattention layers of a model share; return a plain dict.

    Args:
        arguments: Any of ``tau``, ``learn_tau``, ``eps``, ``key_init_scale`` and ``gate`` of
            :class:`Pattention`, and the results of :func:`model_pattention_args`; or ``None``.

    Raises:
        InputError: If another argument is among them, a value is out of range, or ``arguments``
            is not a mapping.
    """
    return _check_arguments(arguments, _SHARED_ARGS, _INIT_ARGS)


def counts_by_block(depth: int, **counts: Counts) -> list[dict[str, Any]]:
    """Give each block its numbers of pairs.

    Args:
        depth: Number of blocks.
        **counts: Numbers of pairs by name of the argument.

    Returns:
        The arguments of each block, ints or None.

    Raises:
        InputError: If a number is not whole, or there is a list with more or fewer numbers than
            blocks.
    """
    counts = {name: plain_count(name, count) for name, count in counts.items()}
    listed = {name: count for name, count in counts.items() if isinstance(count, list | tuple)}
    for name, numbers in listed.items():
        if depth and len(numbers) != depth:  # a model without blocks needs no numbers
            raise InputError(
                f"{name} has {len(numbers)} numbers for {depth} blocks: give one number for all "
                "blocks, or a list with one for each block"
            )
    return [
        {**counts, **{name: numbers[block] for name, numbers in listed.items()}}
        for block in range(depth)
    ]


def plain_count(name: str, count: Any) -> Counts:
    """Return a number of pairs, which may be one of numpy, as an int; or a list of them.

    Args:
        name: Name of the argument.
        count: Number of pairs, or a list with one for each block; None stays None.

    Raises:
        InputError: If a number is not whole.
    """
    numbers = count if isinstance(count, list | tuple) else [count]
    if any(isinstance(n, bool) or not isinstance(n, Integral | None) for n in numbers):
        raise InputError(
            f"{name} must be a whole number, or a list with one for each block, but got {count!r}"
        )
    plain: list[Any] = [None if n is None else int(n) for n in numbers]
    if isinstance(count, list | tuple):
        return tuple(plain) if isinstance(count, tuple) else plain
    return plain[0]


def model_pattention_args(
    arguments: Mapping[str, Any] | None, width: int, depth: int
) -> dict[str, Any]:
    """Convert the ``pattention_args`` of a model to ``pattention_args`` of its blocks.

    Args:
        arguments: Arguments of :func:`check_pattention_args`, and ``init``: ``scaled`` (the
            default), or ``released`` for keys N(0, 0.02²) and values N(0, (2 / (depth · √width))²),
            as in the authors' language code.
        width: Width C of the model.
        depth: Number of blocks of the model.

    Raises:
        InputError: As :func:`check_pattention_args`, or if ``init`` is unknown.
    """
    shared = _check_arguments(arguments, (*_SHARED_ARGS, "init"))
    init = shared.pop("init", "scaled")
    if init not in _INITIALIZATIONS:
        raise InputError(f"init must be one of {', '.join(_INITIALIZATIONS)}, but got {init!r}")
    if init == "released":
        keys, values = released_stds(width, depth)
        shared |= {"key_init_std": keys, "value_init_std": values}
    return shared


def released_stds(width: int, depth: int) -> tuple[float, float]:
    """Return the standard deviations of keys and values in the authors' language code.

    Args:
        width: Width C of the model.
        depth: Number of blocks of the model.
    """
    return 0.02, 2 / (depth * math.sqrt(width))


def _check_arguments(
    arguments: Mapping[str, Any] | None, names: tuple[str, ...], more: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(arguments, Mapping | None):
        raise InputError(
            f"pattention_args must be a dict with keys {', '.join(names)}, but got {arguments!r}"
        )
    for name, value in (arguments or {}).items():
        if name not in (*names, *more):
            raise InputError(
                f"a key of pattention_args must be one of {', '.join(names)}, but got {name!r}"
            )
        if name != "init":
            check_argument(name, value)
    return dict(arguments or {})
