"""An optimiser goes on after its parameters were replaced by larger ones."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError

from .tokens import Change

MOMENTS = ("keep", "reset")
# Key of a group that keeps a single parameter: each new one gets a group of its own behind it.
SEPARATE = "separate"
_OF_PARAMETERS = ("params", "param_names")
# Their state is of the parameter's shape, but a new entry of it is not zero.
_START_ELSEWHERE = ("MADGRAD", "RMSpropTF")


@torch.no_grad()
def carry_over(
    optimizer: Optimizer,
    changes: Iterable[Change],
    moments: str = "keep",
    new_lr_scale: float = 1.0,
) -> None:
    """Put new parameters where the old ones were in an optimiser.

    Args:
        optimizer: One whose state is of the parameters' shape and starts at zero (Adam and its
            kin, SGD, Lion, LAMB, ...), or any under ``reset``; changed in place. Its groups stay,
            in their order. A parameter that no old one stood for joins a group with the settings
            of the group it came from, without weight decay if it has less than two dimensions. If
            there is no such group, one is added behind the others.
        changes: What was replaced.
        moments: ``keep`` what the optimiser knows of old entries and start new ones at zero; or
            ``reset``, which forgets what it knows of these parameters.
        new_lr_scale: Factor on the learning rate in the groups of new pairs that are held apart
            from the old.

    Raises:
        InputError: If ``moments`` is neither, the optimiser has not the parameters that were
            replaced, or its state cannot be carried over.

    Note:
        Gradients that are still accumulating are carried over too. Under ``keep`` the number of
        steps goes on, so that Adam does not correct new moments for their start at zero: the first
        steps of a new pair are up to (1 − β₁)/√(1 − β₂) times the learning rate, as those of an
        entry whose gradient was zero until then.
    """
    changes = list(changes)
    check_optimizer(optimizer, (p for change in changes for p in change.sources), moments)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    number = len(optimizer.param_groups)
    for change in changes:
        old = change.sources
        known = [p for p in (*old, change.like) if p in groups]
        template = groups[known[0]] if known else optimizer.param_groups[0]
        states = [optimizer.state.pop(parameter, None) for parameter in old]
        if moments == "keep" and any(states) and change.targets:
            _carry_state(optimizer, change, states)
        if change.targets and any(parameter.grad is not None for parameter in old):
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in old]
            for target, grad in zip(change.targets, _fit(grads, change), strict=True):
                target.grad = grad if target.requires_grad else None
        for index, target in enumerate(change.targets):
            if index < len(old) and old[index] in groups:
                group = groups.pop(old[index])
                place = next(i for i, p in enumerate(group["params"]) if p is old[index])
                group["params"][place] = target
            elif target.requires_grad:  # else it is frozen, as its source was
                # A scaled rate joins only groups that this call added. A resume repeats growth
                # before it loads the rates, when those of two growths are still the same.
                scale = new_lr_scale if old else 1.0
                others = optimizer.param_groups[number if scale != 1 else 0 :]
                group = _join(optimizer, others, template, target, scale)
            else:
                continue
            groups[target] = group
        for parameter in old[len(change.targets) :]:
            if group := groups.pop(parameter, None):
                group["params"] = [p for p in group["params"] if p is not parameter]


def check_optimizer(
    optimizer: Optimizer | None, parameters: Iterable[nn.Parameter], moments: str
) -> None:
    """See that :func:`carry_over` will be possible, before anything is changed.

    Args:
        optimizer: The optimiser, or None if there is none.
        parameters: Those that will be replaced.
        moments: As there.

    Raises:
        InputError: As there.
    """
    if moments not in MOMENTS:
        raise InputError(f"moments is {moments!r}; choose one of {', '.join(MOMENTS)}")
    if optimizer is None:
        return
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    kind = type(optimizer).__name__
    for parameter in parameters:
        if id(parameter) not in known and parameter.requires_grad:
            raise InputError(
                "the optimiser does not have all parameters that grow: build it from "
                "model.parameters() before growth, or build a new one after it"
            )
        odd = [
            name
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape
        ]
        if moments == "keep" and (odd or kind in _START_ELSEWHERE):
            raise InputError(
                f"{kind} keeps {', '.join(odd) or 'what does not start at zero'} for a parameter, "
                "which cannot be carried over to a larger one: give moments='reset'"
            )


def _join(
    optimizer: Optimizer,
    others: Iterable[dict[str, Any]],
    template: dict[str, Any],
    parameter: Tensor,
    lr_scale: float,
) -> dict[str, Any]:
    """Add a parameter to one of the other groups, or to a new one, and return this group."""
    settings = {key: value for key, value in template.items() if key not in _OF_PARAMETERS}
    for key in ("lr", "initial_lr"):
        if key in settings:
            settings[key] = settings[key] * lr_scale
    if parameter.dim() < 2 and "weight_decay" in settings:
        settings["weight_decay"] = 0.0
    for group in others:
        if SEPARATE not in group and {**group, "params": None} == {**settings, "params": None}:
            group["params"].append(parameter)
            return group
    group = {**settings, "params": [parameter]}
    optimizer.add_param_group(group)
    return group


def _carry_state(optimizer: Optimizer, change: Change, states: list[dict[str, Any] | None]) -> None:
    known = next(state for state in states if state)
    for name, value in known.items():
        if isinstance(value, Tensor) and value.dim():
            parts = [
                state[name] if state else torch.zeros_like(parameter, dtype=value.dtype)
                for state, parameter in zip(states, change.sources, strict=True)
            ]
            carried: list[Any] = _fit(parts, change)
        else:
            carried = [
                value.clone() if isinstance(value, Tensor) else value for _ in change.targets
            ]
        for target, entry in zip(change.targets, carried, strict=True):
            optimizer.state[target][name] = entry


def _fit(parts: list[Tensor], change: Change) -> list[Tensor]:
    """Join tensors of the sources' shapes, fill up with zeros, and cut to the targets' shapes."""
    dim = change.dim
    sizes = [target.shape[dim] for target in change.targets]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes) - sum(part.shape[dim] for part in parts)
    filled = torch.cat([*parts, parts[0].new_zeros(shape)], dim)
    return [piece.clone() for piece in filled.split(sizes, dim)]
