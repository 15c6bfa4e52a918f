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
from tokenformer_vit.layers.split import TOKENS, is_split, set_segments, token_segments
from tokenformer_vit.models.sizes import find_layers, kind_of

MOMENTS = ("keep", "reset")


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
    """Find the Pattention layers of a model that no wrapper of PyTorch's watches."""
    # By name: torch.distributed may be missing, and FSDP2 makes a class of its own.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if found := kinds & {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}:
        raise InputError(
            f"the model is wrapped by {found.pop()}, which would not notice other pairs: change "
            "the model before it is wrapped, or its full state dict"
        )
    return pattention_layers(model)


def counts_by_layer(names: Iterable[str], *counts: Counts) -> dict[str, int | None]:
    """Give each layer its number of pairs, from numbers by kind (qkv, proj, ffn)."""
    # The number of a block is the last one in a name; a block alone has none.
    blocks = {name: int(([0] + [p for p in name.split(".") if p.isdigit()])[-1]) for name in names}
    by_name = dict(zip(COUNTS.values(), counts, strict=True))
    by_block = counts_by_block(1 + max(blocks.values()), **by_name)
    return {name: by_block[block][COUNTS[kind_of(name)]] for name, block in blocks.items()}


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
    names = (*TOKENS, "tau", "gate", "nested_tau")
    tensors = [None if (own := getattr(layer, name)) is None else own.detach() for name in names]
    return LayerTokens(*tensors[:4], layer.nested, tensors[4])  # type: ignore[arg-type]


@torch.no_grad()
def write_tokens(
    model: nn.Module,
    tokens: Mapping[str, LayerTokens],
    *,
    appended: bool = False,
    split: bool = False,
    learn_gate: bool | None = None,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> dict[nn.Parameter, nn.Parameter]:
    """Give layers of a model new tensors, all or none. All layers use all pairs then.

    With ``appended`` the new tensors begin with the old ones, and gradients and optimizer state go
    on. ``split`` holds the appended pairs apart. ``learn_gate`` makes gates parameters or buffers;
    None keeps their kind. Returns the parameter that holds the rows of each one that is gone.
    """
    layers = pattention_layers(model)
    changes, trained, joined = [], [], {}
    segments: dict[str, dict[str, tuple[nn.Parameter, ...]]] = {}
    for name, own in tokens.items():
        layer, segments[name] = layers[name], {}
        # Pairs that the last growth held apart are old now.
        num_old = layer.num_param_tokens if split else own.num
        if num_old < own.num and type(layer) is not Pattention and not is_split(layer):
            raise InputError(  # it would become another class
                f"{name} is a {type(layer).__name__}, derived from Pattention: grow it without "
                "split, freeze and new_lr_scale"
            )
        for token, whole in zip(TOKENS, (own.keys, own.values), strict=True):
            old, *new = parts = token_segments(layer, token)
            trains = any(part.requires_grad for part in parts)
            trained += [old] * trains
            changes.append(Change(old, whole[:num_old], parts if appended else ()))
            if num_old == own.num:
                joined |= dict.fromkeys(new, old)
                new = []
            elif new:
                changes.append(Change(new[0], whole[num_old:]))
            else:
                new = [nn.Parameter(whole[num_old:], trains)]
            segments[name][token] = (old, *new)
        for old, whole in ((layer.gate, own.gate), (layer.nested_tau, own.nested_tau)):
            if isinstance(old, nn.Parameter) and whole is not None:
                changes.append(Change(old, whole, (old,) if appended else ()))
    resize(changes, optimizer, moments)
    for old in trained:
        old.requires_grad_()
    for layer in layers.values():
        layer.active, layer.size = None, None
    for name, own in tokens.items():
        _set_others(layers[name], own, learn_gate)
        set_segments(layers[name], segments[name])
    record_counts(model)
    return joined


def _set_others(layer: Pattention, own: LayerTokens, learn_gate: bool | None) -> None:
    """Set all of a layer but its parameter tokens; parameters have their new shapes already."""
    layer.num_param_tokens = own.num
    if own.tau.data_ptr() != layer.tau.data_ptr():  # a live graph may need an unchanged τ
        layer.tau.copy_(own.tau)
    gate, nested_tau = layer.gate, layer.nested_tau
    layer.set_nested(own.nested, own.nested_tau)
    if own.nested and isinstance(nested_tau, nn.Parameter):
        layer.nested_tau = nested_tau
    if own.gate is not None and not isinstance(gate, nn.Parameter):
        del layer.gate
        if learn_gate or (learn_gate is None and gate is None):
            layer.gate = nn.Parameter(own.gate)
        else:
            layer.register_buffer("gate", own.gate)


@torch.no_grad()
def resize(changes: Sequence[Change], optimizer: Any, moments: str) -> None:
    """Give parameters new data and, with an optimizer, a state of the new shapes; all or none."""
    if moments not in MOMENTS:
        raise InputError(f"moments is {moments!r}; choose one of {', '.join(MOMENTS)}")
    optimizer, states = unwrapped(optimizer), [{} for _ in changes]
    if optimizer is not None:
        _check_optimizer(optimizer, changes)
        if moments == "keep":
            states = [_new_state(optimizer, change) for change in changes]
    grads = [
        _fit(change, [p.grad for p in change.sources], torch.zeros_like(change.data))
        for change in changes
    ]
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


def _check_optimizer(optimizer: Optimizer, changes: Iterable[Change]) -> None:
    """Refuse an optimizer that would not train what grows."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS keeps one state for all parameters together, which cannot grow: grow without "
            "optimizer=, and build a new one after growth"
        )
    known = {p for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and p not in known for change in changes for p in change.sources):
        raise InputError(
            "the optimizer does not have all parameters that grow: build it from "
            "model.parameters() before growth, or build a new one after growth"
        )


def _new_state(optimizer: Optimizer, change: Change) -> dict[str, Any]:
    """Compute the state of a parameter; numbers, such as a step, are those of the first source."""
    own = [optimizer.state.get(source) or {} for source in change.sources]
    state = dict(next(filter(None, own), {}))
    sized = [
        name
        for name, value in state.items()
        if isinstance(value, list | tuple | dict) or (isinstance(value, Tensor) and value.dim())
    ]
    try:
        first = _first_state(optimizer, change) if sized else {}
        for name in sized:
            state[name] = _fit(change, [each.get(name) for each in own], first[name])
    except Exception as error:
        raise InputError(
            f"{type(optimizer).__name__} has a state ({', '.join(sized)}) that cannot be carried "
            f"over to a larger parameter ({one_line(error)}): give moments='reset', or build a new "
            "optimizer after growth"
        ) from error
    return state


def _first_state(optimizer: Any, change: Change) -> dict[str, Any]:
    """Take a step with a zero gradient on a copy of new data, to see where its state starts.

    Moments start at 0, but z of Schedule-Free at the parameter, and steps of Rprop at the rate.
    """
    parameter = nn.Parameter(change.data.clone())
    parameter.grad = torch.zeros_like(parameter)
    sources = {*change.sources}
    like = next(g for g in optimizer.param_groups if not sources.isdisjoint(g["params"]))
    group = {**_copied(like), "params": [parameter]}
    if "weight_decay" in group:
        group["weight_decay"] = 0.0
    tried = object.__new__(type(optimizer))
    tried.__dict__ = {**vars(optimizer), "state": defaultdict(dict), "param_groups": [group]}
    inspect.unwrap(type(optimizer).step)(tried)  # without the hooks and schedulers of the real one
    # Of timm's Lookahead around another optimizer.
    return {"lookahead_slow_buff": change.data.clone(), **tried.state[parameter]}


def _fit(change: Change, parts: Sequence[Tensor | None], filled: Tensor) -> Tensor | None:
    """Write tensors of the sources' shapes into one of the new shape; None if there are none."""
    start = 0
    for part, source in zip(parts, change.sources, strict=True):
        if part is not None:
            if (type(part), part.shape) != (type(filled), source.shape):
                raise ValueError(f"it is a {type(part).__name__} of shape {tuple(part.shape)}")
            filled[(slice(start, start + len(source)), *map(slice, source.shape[1:]))] = part
        start += len(source)
    return None if all(part is None for part in parts) else filled


def follow(
    optimizer: Any,
    model: nn.Module,
    layers: Iterable[Pattention],
    joined: Mapping[nn.Parameter, nn.Parameter],
    new_lr_scale: float = 1.0,
) -> None:
    """Give an optimizer the new parameters of layers, and take out those that others hold now."""
    if optimizer is None:
        return
    added = [(holder, (gone,), 1.0) for gone, holder in joined.items()]
    for layer in layers:
        own = dict(layer.named_parameters(recurse=False))
        for name, parameter in own.items():
            scale = new_lr_scale if name.startswith("new_") else 1.0
            added.append((parameter, (own[name.replace("new_", "old_")], *own.values()), scale))
    add_parameters(optimizer, model, added)
    optimizer = unwrapped(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in joined]
    for gone in joined:
        optimizer.state.pop(gone, None)  # PyTorch could not save it


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
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # optional, and wrong from here on
    for parameter, others, scale in added:
        if parameter in groups or not parameter.requires_grad:
            continue
        like = next((groups[p] for p in others if p in groups), optimizer.param_groups[0])
        settings = _copied(like)
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):  # OneCycleLR reads the last three
            if key in settings:
                settings[key] = settings[key] * scale
        if parameter.dim() < 2:  # Muon takes only matrices
            fixed = {"weight_decay": 0.0, "use_muon": False}
            settings.update({key: value for key, value in fixed.items() if key in settings})
        # A scaled rate joins only groups of this growth: a resume repeats the growths of a run
        # before it loads the rates, when those of two growths are still the same.
        for group in optimizer.param_groups[number if scale != 1 else 0 :]:
            if {**group, "params": None} == settings:
                own, place = group["params"], places[parameter]
                before = [i for i, p in enumerate(own) if places.get(p, place) < place]
                own.insert(before[-1] + 1 if before else 0, parameter)
                break
        else:
            optimizer.add_param_group(group := {**settings, "params": [parameter]})
        groups[parameter] = group


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the settings of a group; some of timm's optimizers count its steps in a tensor."""
    copied = {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
    return copied | {"params": None}


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
