"""Continue with an optimizer after its parameters were replaced by larger ones."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError

from .tokens import Change, trained_later

MOMENTS = ("keep", "reset")
# Key of a group of one parameter that no other joins: each new parameter gets its own group.
SEPARATE = "separate"
# Key of groups whose new parameters stay at the end, as in a state that an earlier version saved.
APPENDED = "appended"
# Their state has the shape of the parameter, but does not start at zero.
_START_ELSEWHERE = ("MADGRAD", "RMSpropTF", "Rprop")
_SLOW_WEIGHTS = "lookahead_slow_buff"  # the same for timm's Lookahead, around any optimizer


@trained_later
@torch.no_grad()
def carry_over(
    optimizer: Optimizer,
    changes: Iterable[Change],
    moments: str = "keep",
    new_lr_scale: float = 1.0,
) -> None:
    """Replace the old parameters of an optimizer by the new ones, in place.

    The groups keep their order. A new parameter takes the place of its old one. Further parameters,
    such as a gate, get the settings of the layer's old parameters, without weight decay if they
    have fewer than two dimensions. They join a group with these settings; if there is none, a group
    is added at the end.

    Args:
        optimizer: Optimizer. With ``keep``, its state must have the shape of the parameters and
            start at zero, as in Adam, SGD, Lion, LAMB and Muon.
        changes: Parameters that were replaced.
        moments: ``keep`` keeps the state of old entries and starts new entries at zero; ``reset``
            deletes the state of these parameters.
        new_lr_scale: Factor on the learning rate of new pairs in separate parameters.

    Raises:
        InputError: If ``moments`` is unknown, the optimizer is LBFGS or does not have the replaced
            parameters, or its state cannot be carried over.

    Note:
        Accumulated gradients are carried over. With ``keep`` the step count continues, and Adam
        does not correct new moments for their start at zero. Therefore the first steps of a new
        pair are up to (1 − β₁)/√(1 − β₂) times the learning rate, like the steps of an entry whose
        gradient has been zero so far.
    """
    changes = list(changes)
    check_optimizer(optimizer, (p for change in changes for p in change.sources), moments)
    optimizer = _inner(optimizer)
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # optional, and wrong from here on
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    number = len(optimizer.param_groups)
    for change in changes:
        old = change.sources
        known = [p for p in (*old, *change.like) if p in groups]
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
            elif target.requires_grad:  # otherwise it is frozen, like its source
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


@contextmanager
def kept_order(optimizer: Optimizer | None, model: nn.Module) -> Iterator[None]:
    """Keep groups in the order of the model's parameters while :func:`carry_over` changes them.

    PyTorch loads the state of an optimizer by position. Therefore an optimizer that is built of the
    grown model must have its parameters at the same places.

    Args:
        optimizer: Optimizer, or None. A group in another order keeps that order.
        model: Model that grows within the ``with`` block.
    """
    if optimizer is None:
        yield
        return
    optimizer = _inner(optimizer)
    places = {p: place for place, p in enumerate(model.parameters())}
    known = [
        (group, [places[p] for p in group["params"] if p in places])
        for group in optimizer.param_groups
    ]
    others = {id(group) for group, found in known if found != sorted(found)}
    yield
    kept = [
        group
        for group in optimizer.param_groups
        if id(group) not in others and APPENDED not in group
    ]
    order_groups(kept, model)


def order_groups(groups: Iterable[dict[str, Any]], model: nn.Module) -> None:
    """Put the parameters of groups into the order of the model's parameters, in place.

    A parameter of another module stays behind the one before it.
    """
    places = {p: place for place, p in enumerate(model.parameters())}
    for group in groups:
        place, keys = -1, []
        for parameter in group["params"]:
            place = places.get(parameter, place)
            keys.append(place)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        group["params"] = [group["params"][index] for index in order]


def check_optimizer(
    optimizer: Optimizer | None, parameters: Iterable[nn.Parameter], moments: str
) -> None:
    """Check that :func:`carry_over` is possible, before anything is changed.

    Args:
        optimizer: Optimizer, or None.
        parameters: Parameters that will be replaced.
        moments: ``keep`` or ``reset``.

    Raises:
        InputError: In the cases of :func:`carry_over`.
    """
    if moments not in MOMENTS:
        raise InputError(f"moments is {moments!r}; choose one of {', '.join(MOMENTS)}")
    if optimizer is None:
        return
    optimizer = _inner(optimizer)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    kind = type(optimizer).__name__
    for parameter in parameters:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError(
                f"{kind} keeps one state for all parameters together, which cannot grow: grow "
                "without optimizer=, and build a new one after growth"
            )
        if id(parameter) not in known and parameter.requires_grad:
            raise InputError(
                "the optimizer does not have all parameters that grow: build it from "
                "model.parameters() before growth, or build a new one after growth"
            )
        odd = [
            name
            for name, value in optimizer.state.get(parameter, {}).items()
            if not _can_be_carried(name, value, parameter)
        ]
        if moments == "keep" and (odd or kind in _START_ELSEWHERE):
            raise InputError(
                f"{kind} has a state ({', '.join(odd) or 'not zero at the start'}) that cannot be "
                "carried over to a larger parameter: give moments='reset'"
            )


def _can_be_carried(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of a state fits a larger parameter with zeros or a copy."""
    if isinstance(value, Tensor):
        return not value.dim() or (value.shape == parameter.shape and name != _SLOW_WEIGHTS)
    return not isinstance(value, (list, tuple, dict))  # as timm's Kron keeps its matrices


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state: timm's Lookahead and accelerate's wrap another."""
    for name in ("_base_optimizer", "optimizer"):
        wrapped = getattr(optimizer, name, None)
        if isinstance(wrapped, Optimizer):
            return _inner(wrapped)
    return optimizer


def _join(
    optimizer: Optimizer,
    others: Iterable[dict[str, Any]],
    template: dict[str, Any],
    parameter: Tensor,
    lr_scale: float,
) -> dict[str, Any]:
    """Add a parameter to one of the other groups, or to a new one, and return this group."""
    # Some of timm's optimizers count the steps of a group in a tensor, which groups must not share.
    settings = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in template.items()
        if key != "params"
    }
    for key in ("lr", "initial_lr", "max_lr", "min_lr"):  # OneCycleLR reads the last three
        if key in settings:
            settings[key] = settings[key] * lr_scale
    if parameter.dim() < 2:
        # Muon takes only matrices.
        fixed = {"weight_decay": 0.0, "use_muon": False}
        settings.update({key: value for key, value in fixed.items() if key in settings})
    for group in others:
        if SEPARATE not in group and {**group, "params": None} == {**settings, "params": None}:
            group["params"].append(parameter)
            return group
    group = {**settings, "params": [parameter]}
    optimizer.add_param_group(group)
    _watch_rate(optimizer, template, group)
    return group


def _watch_rate(optimizer: Optimizer, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse a step after a scheduler from before growth has passed over a new group.

    timm's schedulers do so silently; PyTorch's raise an error or serve all groups.
    """
    before, rate = old["lr"], new["lr"]
    if isinstance(rate, Tensor):  # a comparison would wait for the GPU
        return

    def check(*_: Any) -> None:
        # A scheduler that knows the new group would have put another object there.
        if new["lr"] is rate and old["lr"] != before:
            raise InputError(
                f"the learning rate of a group that growth added is still {rate:g}, but that of "
                "older groups has changed: build a new scheduler after growth"
            )

    optimizer.register_step_pre_hook(check)


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
    """Join tensors of the sources' shapes, append zeros, and split to the targets' shapes."""
    dim = change.dim
    sizes = [target.shape[dim] for target in change.targets]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes) - sum(part.shape[dim] for part in parts)
    filled = torch.cat([*parts, parts[0].new_zeros(shape)], dim)
    return [piece.clone() for piece in filled.split(sizes, dim)]
