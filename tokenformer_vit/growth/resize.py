"""Change the number of pairs of a model: every Parameter stays the same object, with its moments.

Optimizers, schedulers and parameter groups hold Parameter objects, so they go on by themselves.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block
from tokenformer_vit.layers.split import TOKENS, set_segments, token_segments
from tokenformer_vit.models.sizes import find_layers, kind_of

MOMENTS = ("keep", "reset")
_SLOW_WEIGHTS = "lookahead_slow_buff"  # of timm's Lookahead around another optimizer


@dataclass(frozen=True)
class LayerTokens:
    """All tensors of a Pattention layer: keys (P, C_in), values (P, C_out), τ (), gates (P,)."""

    keys: Tensor
    values: Tensor
    tau: Tensor
    gate: Tensor | None = None
    nested: tuple[int, ...] = ()
    nested_tau: Tensor | None = None  # one for each size in ``nested``

    @property
    def num(self) -> int:
        """Number of pairs P."""
        return len(self.keys)


class Change(NamedTuple):
    """New data of a parameter. They begin with the rows of ``sources``, whose state goes on."""

    parameter: nn.Parameter
    data: Tensor
    sources: Sequence[nn.Parameter] = ()


def pattention_layers(model: nn.Module) -> dict[str, Pattention]:
    """Find the Pattention layers of a model, by name and in its order.

    Args:
        model: Any module that holds TokenFormer blocks: a backbone, a classifier, a language model.

    Raises:
        InputError: If there are none.
    """
    if layers := find_layers(model):
        return layers
    raise InputError(f"{type(model).__name__} has no Pattention layer; give a TokenFormer")


def whole_layers(model: nn.Module) -> dict[str, Pattention]:
    """Find the Pattention layers of a model that nothing but this process knows."""
    # By name: torch.distributed may be missing, and FSDP2 makes a class of its own.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    wrappers = kinds & {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
    if wrappers or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise InputError(
            f"the model is wrapped by {', '.join(wrappers) or 'DTensor'}, which would not notice "
            "other pairs: change the model before it is wrapped, or its full state dict"
        )
    return pattention_layers(model)


def counts_by_layer(names: Iterable[str], **counts: Counts) -> dict[str, int | None]:
    """Give each layer its number of pairs, from the arguments of a model; None without one."""
    # The number of a block is the last one in a name; a block alone has none.
    blocks = {name: int(([0] + [p for p in name.split(".") if p.isdigit()])[-1]) for name in names}
    by_block = counts_by_block(1 + max(blocks.values()), **counts)
    return {name: by_block[block].get(COUNTS[kind_of(name)]) for name, block in blocks.items()}


def record_counts(model: nn.Module) -> None:
    """Update the numbers of pairs in the arguments from which models are rebuilt."""
    for module in model.modules():
        if hasattr(module, "record_param_tokens"):
            module.record_param_tokens()  # type: ignore[operator]
    for module in model.modules():
        # transformers' wrapper of timm's models saves arguments of its own.
        own: Any = getattr(getattr(module, "config", None), "model_args", None)
        inner: Any = getattr(getattr(module, "timm_model", None), "_model_args", None)
        if isinstance(own, dict) and inner is not None:
            for name in (*COUNTS.values(), "nested", "pattention_args"):
                own.pop(name, None)
                if name in inner:
                    own[name] = inner[name]


def read_tokens(layer: Pattention) -> LayerTokens:
    """Return the tensors of a layer, detached; without a copy unless the layer is split."""
    gate, nested_tau = layer.gate, layer.nested_tau
    return LayerTokens(
        layer.key_param_tokens.detach(),
        layer.value_param_tokens.detach(),
        layer.tau.detach(),
        None if gate is None else gate.detach(),
        layer.nested,
        None if nested_tau is None else nested_tau.detach(),
    )


@torch.no_grad()
def write_tokens(
    layers: Mapping[str, Pattention],
    tokens: Mapping[str, LayerTokens],
    *,
    appended: bool = False,
    split: bool = False,
    learn_gate: bool | None = None,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give layers new tensors, in all layers or in none. They use all pairs then.

    With ``appended`` the new tensors begin with the old ones, and gradients and optimizer state go
    on. ``split`` holds the appended pairs apart. ``learn_gate`` makes gates parameters or buffers;
    None keeps their kind. Returns former parameters of new pairs, and those that hold them now.
    """
    changes, segments, joined, trained = [], {}, [], []
    for name, own in tokens.items():
        layer, segments[name] = layers[name], {}
        # Pairs that the last growth held apart are old now.
        num_old = layer.num_param_tokens if split else own.num
        for token, whole in zip(TOKENS, (own.keys, own.values), strict=True):
            old, *new = parts = token_segments(layer, token)
            trains = any(part.requires_grad for part in parts)
            trained.append((old, trains))
            changes.append(Change(old, whole[:num_old], parts if appended else ()))
            if num_old == own.num:
                joined += [(part, old) for part in new]
                segments[name][token] = (old,)
            elif new:
                changes.append(Change(new[0], whole[num_old:]))
                segments[name][token] = (old, *new)
            elif type(layer) is not Pattention:  # it would become another class
                raise InputError(
                    f"{name} is a {type(layer).__name__}, derived from Pattention: grow it without "
                    "split, freeze and new_lr_scale"
                )
            else:
                segments[name][token] = (old, nn.Parameter(whole[num_old:], trains))
        for old, whole in ((layer.gate, own.gate), (layer.nested_tau, own.nested_tau)):
            if isinstance(old, nn.Parameter) and whole is not None:
                changes.append(Change(old, whole, (old,) if appended else ()))
    resize(changes, optimizer, moments)
    for old, trains in trained:
        old.requires_grad_(trains)
    for layer in layers.values():
        layer.active, layer.size = None, None
    for name, own in tokens.items():
        _rebuild(layers[name], own, learn_gate)
        set_segments(layers[name], segments[name])
    return joined


def _rebuild(layer: Pattention, tokens: LayerTokens, learn_gate: bool | None) -> None:
    """Set all of a layer but its parameter tokens; parameters have their new shapes already."""
    layer.num_param_tokens = tokens.num
    if tokens.tau.data_ptr() != layer.tau.data_ptr():  # a live graph may need an unchanged τ
        layer.tau.copy_(tokens.tau)
    gate, nested_tau = layer.gate, layer.nested_tau
    layer.set_nested(tokens.nested, tokens.nested_tau)
    if tokens.nested and isinstance(nested_tau, nn.Parameter):
        layer.nested_tau = nested_tau
    if tokens.gate is not None and not isinstance(gate, nn.Parameter):
        del layer.gate
        if learn_gate or (learn_gate is None and gate is None):
            layer.gate = nn.Parameter(tokens.gate)
        else:
            layer.register_buffer("gate", tokens.gate)


@torch.no_grad()
def resize(changes: Sequence[Change], optimizer: Optimizer | None, moments: str) -> None:
    """Give parameters new data and, with an optimizer, a state of the new shapes; all or none."""
    optimizer = unwrapped(optimizer)
    states = _new_states(optimizer, changes, moments)
    grads = [_fit(change, [p.grad for p in change.sources]) for change in changes]
    # Nothing below fails. The cache of autocast holds weak references, which forbid a swap.
    torch.clear_autocast_cache()
    for (parameter, data, _), state, grad in zip(changes, states, grads, strict=True):
        # torch.utils.swap_tensors also refuses a parameter that a live graph has saved, as that of
        # the last outputs has. Here an old graph keeps the old tensor.
        torch._C._swap_tensor_impl(parameter, nn.Parameter(data, parameter.requires_grad))
        parameter.grad = grad
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
    _guard_fused_steps()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the state: timm's Lookahead and accelerate's wrap another."""
    for name in ("_base_optimizer", "optimizer"):
        if isinstance(inner := getattr(optimizer, name, None), Optimizer):
            return unwrapped(inner)
    return optimizer


def _new_states(optimizer: Any, changes: Sequence[Change], moments: str) -> list[dict[str, Any]]:
    """Check that an optimizer can follow, and compute its state of each parameter."""
    if moments not in MOMENTS:
        raise InputError(f"moments is {moments!r}; choose one of {', '.join(MOMENTS)}")
    if optimizer is None:
        return [{} for _ in changes]
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            f"{kind} keeps one state for all parameters together, which cannot grow: grow without "
            "optimizer=, and build a new one after growth"
        )
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and p not in groups for change in changes for p in change.sources):
        raise InputError(
            "the optimizer does not have all parameters that grow: build it from "
            "model.parameters() before growth, or build a new one after growth"
        )
    if moments == "reset":
        return [{} for _ in changes]
    starts: dict[Any, dict[str, bool]] = {}
    states = []
    for change in changes:
        own = [optimizer.state.get(source) or {} for source in change.sources]
        state: dict[str, Any] = {}
        for name, value in next(filter(None, own), {}).items():
            scalar = not isinstance(value, Tensor | list | tuple | dict)
            if scalar or (isinstance(value, Tensor) and not value.dim()):
                state[name] = value  # such as a step
                continue
            try:
                group = next(groups[each] for each in change.sources if each in groups)
                key = id(group), change.data.shape
                if key not in starts:
                    starts[key] = _start_of_state(optimizer, group, change.data)
                state[name] = _fit(change, [each.get(name) for each in own], starts[key][name])
            except Exception as error:
                raise InputError(
                    f"{kind} has a state ({name}) that cannot be carried over to a larger "
                    f"parameter ({one_line(error)}): give moments='reset', or build a new "
                    "optimizer after growth"
                ) from error
        states.append(state)
    return states


def _start_of_state(optimizer: Any, group: Mapping[str, Any], like: Tensor) -> dict[str, bool]:
    """Take a step with a zero gradient on another parameter, to see where a state starts.

    Returns True for an entry that starts at the parameter, as z of Schedule-Free does, and False
    for one that starts at 0. There are no other entries.
    """
    rows = torch.linspace(1, 2, like.numel(), dtype=like.dtype, device=like.device).view_as(like)
    parameter = nn.Parameter(rows.clone())
    parameter.grad = torch.zeros_like(rows)
    settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
    settings.update({key: settings[key] * 0 for key in ("lr", "weight_decay") if key in settings})
    tried = object.__new__(type(optimizer))
    tried.__dict__.update(optimizer.__dict__)
    tried.state, tried.param_groups = defaultdict(dict), [{**settings, "params": [parameter]}]
    inspect.unwrap(type(optimizer).step)(tried)  # without the hooks and schedulers of the real one
    found = {k: v for k, v in tried.state[parameter].items() if isinstance(v, Tensor)}
    at_rows = {k: True for k, v in found.items() if v.shape == rows.shape and torch.equal(v, rows)}
    # Adamax and AdaBelief add an eps.
    at_zero = {k: False for k, v in found.items() if (v.abs() < 1e-7).all()}
    return at_zero | at_rows | {_SLOW_WEIGHTS: True}


def _fit(
    change: Change, parts: Sequence[Tensor | None], start_at_data: bool = False
) -> Tensor | None:
    """Join tensors of the sources' shapes, and append the rows that a new entry starts with."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    filled = like.new_zeros(change.data.shape)
    if type(filled) is not type(like) and type(like) is not nn.Parameter:
        raise TypeError(f"a {type(like).__name__} of another shape would be another type")
    if start_at_data:
        filled.copy_(change.data)
    start = 0
    for part, source in zip(parts, change.sources, strict=True):
        if part is not None:
            if part.shape != source.shape:
                raise ValueError(f"its shape is {tuple(part.shape)}, not {tuple(source.shape)}")
            filled[(slice(start, start + len(source)), *map(slice, source.shape[1:]))] = part
        start += len(source)
    return filled


def follow(
    optimizer: Any,
    model: nn.Module,
    joined: Iterable[tuple[nn.Parameter, nn.Parameter]],
    layers: Iterable[Pattention] = (),
    new_lr_scale: float = 1.0,
) -> None:
    """Give an optimizer the new parameters of layers, and take out those that others hold now."""
    if optimizer is None:
        return
    optimizer = unwrapped(optimizer)
    for gone, holder in joined:
        known = {p for group in optimizer.param_groups for p in group["params"]}
        instead = [] if holder in known else [holder]  # it was frozen, and not in the optimizer
        for group in optimizer.param_groups:
            group.pop("param_names", None)  # optional, and wrong from here on
            kept = [instead if p is gone else [p] for p in group["params"]]
            group["params"] = [p for each in kept for p in each]
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for gone in [p for p in optimizer.state if p not in known]:  # PyTorch could not save it
        del optimizer.state[gone]
    added = []
    for layer in layers:
        own = dict(layer.named_parameters(recurse=False))
        for name, parameter in own.items():
            scale = new_lr_scale if name.startswith("new_") else 1.0
            added.append((parameter, [own[name.replace("new_", "old_")], *own.values()], scale))
    add_parameters(optimizer, model, added)


def add_parameters(
    optimizer: Any,
    model: nn.Module,
    added: Iterable[tuple[nn.Parameter, Sequence[nn.Parameter], float]],
) -> None:
    """Add trained parameters to an optimizer, with the settings of another one and a scaled rate.

    The other one is the first of those given that the optimizer has. A parameter of fewer than two
    dimensions gets no weight decay. It joins a group with its settings, in the order of the model,
    because PyTorch loads a state by position.
    """
    optimizer = unwrapped(optimizer)
    places = {p: place for place, p in enumerate(model.parameters())}
    number = len(optimizer.param_groups)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    new = [each for each in added if each[0] not in groups and each[0].requires_grad]
    for group in optimizer.param_groups if new else ():
        group.pop("param_names", None)
    for parameter, others, scale in new:
        like = next((groups[p] for p in others if p in groups), optimizer.param_groups[0])
        # Some of timm's optimizers count the steps of a group in a tensor.
        settings = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in like.items()
            if key != "params"
        }
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):  # OneCycleLR reads the last three
            if key in settings:
                settings[key] = settings[key] * scale
        if parameter.dim() < 2:  # Muon takes only matrices
            fixed = {"weight_decay": 0.0, "use_muon": False}
            settings.update({key: value for key, value in fixed.items() if key in settings})
        # A scaled rate joins only groups of this growth: a resume repeats the growths of a run
        # before it loads the rates, when those of two growths are still the same.
        for group in optimizer.param_groups[number if scale != 1 else 0 :]:
            if {**group, "params": None} == {**settings, "params": None}:
                own, place = group["params"], places[parameter]
                before = [i for i, p in enumerate(own) if places.get(p, place) < place]
                own.insert(before[-1] + 1 if before else 0, parameter)
                break
        else:
            optimizer.add_param_group(group := {**settings, "params": [parameter]})
        groups[parameter] = group


@functools.cache
def _guard_fused_steps() -> None:
    # Not at import: a process in which nothing grows needs no hook.
    register_optimizer_step_pre_hook(_check_fused)


def _check_fused(optimizer: Optimizer, *_: Any) -> None:
    """Fused steps do not compare shapes: they would read and write other memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise InputError(
                        f"the state of this {type(optimizer).__name__} is of shape "
                        f"{tuple(value.shape)}, but its parameter has grown to "
                        f"{tuple(parameter.shape)}: call grow(..., optimizer=optimizer), or build "
                        "a new optimizer"
                    )
