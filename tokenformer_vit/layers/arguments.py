"""What all Pattention layers of a model have in common: the arguments, and what they may be."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from tokenformer_vit.errors import InputError

GATES = ("none", "learned", "fixed")
# What a model hands on to all of its layers alike.
_SHARED_ARGS = ("tau", "learn_tau", "eps", "key_init_scale", "gate")
# What a model makes of its ``init``, for its layers.
_INIT_ARGS = ("key_init_std", "value_init_std")
INITIALIZATIONS = ("scaled", "released")

# The range of numbers, whose squares are to be normal float32 numbers, too.
_LARGEST, _SMALLEST = 1e18, 1e-18
_MAY_BE_ZERO = ("eps", "init_gain")


def check_argument(name: str, value: Any) -> None:
    """See that an argument of a layer is a value that it can compute with.

    Args:
        name: Name of the argument.
        value: What was given.

    Raises:
        InputError: If it is of another type, not finite or out of range.
    """
    if name == "gate":
        if value not in GATES:
            raise InputError(f"unknown gate {value!r}; choose one of {', '.join(GATES)}")
        return
    if name == "learn_tau":
        if not isinstance(value, bool):
            raise InputError(f"learn_tau must be True or False, but it is {value!r}")
        return
    if value is None and name in ("tau", *_INIT_ARGS):
        return
    zero = name in _MAY_BE_ZERO
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (_SMALLEST <= number <= _LARGEST or (zero and number == 0)):
        need = "0 or positive" if zero else "positive"
        raise InputError(
            f"{name} must be {need}, but it is {value!r}; give a number from "
            f"{'0' if zero else _SMALLEST} to {_LARGEST}"
        )


def check_pattention_args(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that all Pattention layers of a model share, as a plain dict.

    Args:
        arguments: ``tau``, ``learn_tau``, ``eps``, ``key_init_scale`` and ``gate`` of
            :class:`Pattention`, any of them, and what :func:`model_pattention_args` adds; ``None``
            for none.

    Raises:
        InputError: If there is another among them, a value is out of range, or no mapping was
            given.
    """
    return _check_arguments(arguments, _SHARED_ARGS, _INIT_ARGS)


def model_pattention_args(
    arguments: Mapping[str, Any] | None, width: int, depth: int
) -> dict[str, Any]:
    """Turn the ``pattention_args`` of a model into those of its blocks.

    Args:
        arguments: As :func:`check_pattention_args` takes them, and ``init``: ``scaled`` (the
            default), or ``released`` for keys N(0, 0.02²) and values N(0, (2 / (depth · √width))²),
            as the authors' language code draws them.
        width: Width C of the model.
        depth: Number of blocks of the model.

    Raises:
        InputError: As :func:`check_pattention_args`, or if ``init`` is unknown.
    """
    shared = _check_arguments(arguments, (*_SHARED_ARGS, "init"))
    init = shared.pop("init", "scaled")
    if init not in INITIALIZATIONS:
        raise InputError(f"unknown init {init!r}; choose one of {', '.join(INITIALIZATIONS)}")
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
            f"pattention_args must be a dict with keys of {', '.join(names)}, but it is "
            f"{arguments!r}"
        )
    for name, value in (arguments or {}).items():
        if name not in (*names, *more):
            raise InputError(
                f"unknown key {name!r} in pattention_args; choose among {', '.join(names)}"
            )
        if name != "init":
            check_argument(name, value)
    return dict(arguments or {})
