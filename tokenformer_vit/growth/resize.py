"""Change the number of pairs of a model: every Parameter stays the same object, with its moments.

Optimizers, schedulers and parameter groups hold Parameter objects, so they go on by themselves.
"""

import copy
import functools
import gc
import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block
from tokenformer_vit.layers.split import TOKENS, is_split, set_segments, token_segments
from tokenformer_vit.models.sizes import find_layers, kind_of

Model = TypeVar("Model", bound=nn.Module)
MOMENTS = ("keep", "reset")
_left_behind: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# A parameter, its new data, and the parameters with whose rows the data begin.
Change = tuple[nn.Parameter, Tensor, Sequence[nn.Parameter]]


class LayerTokens(NamedTuple):
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


def pattention_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of any module with TokenFormer blocks, by name, in its order."""
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
    for module in reversed([*model.modules()]):  # parts before what holds them
        if hasattr(module, "record_param_tokens"):
            module.record_param_tokens()  # type: ignore[operator]
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
    split: bool = False,
    learn_gate: bool = False,
    optimizer: Optimizer | None = None,
    moments: str | None = None,
) -> dict[nn.Parameter, nn.Parameter]:
    """Give layers new tensors, all or none; return who holds the rows of parameters that are gone.

    With ``moments`` they begin with the old ones, whose gradients and optimizer state go on.
    ``split`` holds the others apart. ``learn_gate`` makes a parameter of a gate that is none.
    """
    layers, plans, joined, known = pattention_layers(model), [], {}, {*model.parameters()}
    changes: list[Change] = []
    for name, own in tokens.items():
        layer, segments = layers[name], {}
        # Pairs that the last growth held apart are old now.
        num_old = layer.num_param_tokens if split else own.num
        if num_old < own.num and type(layer) is not Pattention and not is_split(layer):
            raise InputError(  # it would become another class
                f"{name} is a {type(layer).__name__}, derived from Pattention: grow it without "
                "split, freeze and new_lr_scale"
            )
        for token, whole in zip(TOKENS, (own.keys, own.values), strict=True):
            old, *new = parts = token_segments(layer, token)
            changes.append((old, whole[:num_old], parts))
            if num_old == own.num:
                joined |= dict.fromkeys(new, old)
                new = []
            elif new:
                changes.append((new[0], whole[num_old:], ()))
            else:
                new = [nn.Parameter(whole[num_old:], old.requires_grad)]
            segments[token] = [old, *new]
        for old, whole in ((layer.gate, own.gate), (layer.nested_tau, own.nested_tau)):
            if isinstance(old, nn.Parameter) and whole is not None:
                changes.append((old, whole, [old]))
        plans.append((layer, own, segments))
    resize(changes, optimizer, moments)
    for layer in layers.values():
        layer.active, layer.size = None, None
    for layer, own, segments in plans:
        layer.num_param_tokens = own.num
        if own.tau.data_ptr() != layer.tau.data_ptr():  # a live graph may need an unchanged τ
            layer.tau.copy_(own.tau)
        nested_tau = layer.nested_tau
        layer.set_nested(own.nested, own.nested_tau)
        if own.nested and isinstance(nested_tau, nn.Parameter):
            layer.nested_tau = nested_tau
        if own.gate is not None and not isinstance(layer.gate, nn.Parameter):
            del layer.gate
            layer._register("gate", own.gate, learn_gate)
        set_segments(layer, segments)
    record_counts(model)
    if moments is None or not known.issuperset(model.parameters()):
        leave_behind(model, optimizer)
    return joined


@torch.no_grad()
def resize(changes: Sequence[Change], optimizer: Any, moments: str | None) -> None:
    """Give parameters new data, with their gradients and optimizer state; all or none."""
    if moments not in (*MOMENTS, None):
        raise InputError(f"moments is {moments!r}; choose one of {', '.join(MOMENTS)}")
    optimizer, states = unwrapped(optimizer), [{} for _ in changes]
    if optimizer is not None:
        known = {p for group in optimizer.param_groups for p in group["params"]}
        lacks = any(p.requires_grad and p not in known for *_, parts in changes for p in parts)
        if lacks or isinstance(optimizer, torch.optim.LBFGS):
            raise InputError(
                f"{type(optimizer).__name__} does not have all parameters that grow, or keeps one "
                "state for all: build it from model.parameters() before growth, or build a new one "
                "after growth"
            )
        if moments == "keep":
            states = [_new_state(optimizer, change) for change in changes]
    grads = [
        _fit(each, [p.grad if moments else None for p in each[2]], torch.zeros_like(each[1]))
        for each in changes
    ]
    # Nothing below fails. The cache of autocast holds weak references, which forbid a swap.
    torch.clear_autocast_cache()
    for (parameter, data, sources), state, grad in zip(changes, states, grads, strict=True):
        trains = any(source.requires_grad for source in (parameter, *sources))
        # torch.utils.swap_tensors also refuses a parameter that a live graph has saved, as that of
        # the last outputs has. Here an old graph keeps the old tensor.
        torch._C._swap_tensor_impl(parameter, nn.Parameter(data, trains))
        parameter.grad = grad
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
    _watch_optimizers()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the state: timm's Lookahead and accelerate's wrap another."""
    for name in ("_base_optimizer", "optimizer"):
        if isinstance(inner := getattr(optimizer, name, None), Optimizer):
            return unwrapped(inner)
    return optimizer


def _new_state(optimizer: Any, change: Change) -> dict[str, Any]:
    """Compute the state of a parameter; numbers, such as a step, are those of the first source."""
    _, data, sources = change
    own = [optimizer.state.get(source) or {} for source in sources]
    state = dict(next(filter(None, own), {}))
    sized = [k for k, v in state.items() if getattr(v, "shape", isinstance(v, list | tuple | dict))]
    if not sized:
        return state
    # A step with a zero gradient on a copy shows where a state starts: moments at 0, z of
    # Schedule-Free at the parameter, steps of Rprop at the rate.
    parameter = nn.Parameter(data.clone())
    parameter.grad = torch.zeros_like(parameter)
    tried = object.__new__(type(optimizer))
    try:
        like = next(g for g in optimizer.param_groups if not {*sources}.isdisjoint(g["params"]))
        group = {**copy.deepcopy({**like, "params": []}), "weight_decay": 0.0}
        group["params"] = [parameter]
        tried.__dict__ = {**vars(optimizer), "state": defaultdict(dict), "param_groups": [group]}
        inspect.unwrap(type(optimizer).step)(tried)  # without the hooks of the real one
        # Of timm's Lookahead around another optimizer.
        first = {"lookahead_slow_buff": data.clone(), **tried.state[parameter]}
        for name in sized:
            state[name] = _fit(change, [each.get(name) for each in own], first[name])
    except Exception as error:
        raise InputError(
            f"{type(optimizer).__name__} has a state ({', '.join(sized)}) that cannot be carried "
            f"over to a larger parameter ({one_line(error)}): give moments='reset', or build a new "
            "optimizer after growth"
        ) from error
    return state


def _fit(change: Change, parts: Sequence[Tensor | None], filled: Tensor) -> Tensor | None:
    """Write tensors of the sources' shapes over the first rows; None if there are none."""
    start = 0
    for part, source in zip(parts, change[2], strict=True):
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
    new_lr_scale: float | None = None,
) -> None:
    """Give an optimizer the new parameters of layers, and take out those that others hold now."""
    if optimizer is None:
        return
    optimizer = unwrapped(optimizer)
    places = {p: place for place, p in enumerate(model.parameters())}
    number = len(optimizer.param_groups)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # optional, and wrong from here on
    owners = [dict(layer.named_parameters(recurse=False)) for layer in layers]
    for own, name in [(each, name) for each in owners for name in each]:
        parameter = own[name]
        if parameter in groups or not parameter.requires_grad:
            continue
        gone = (each for each, holder in joined.items() if holder is parameter)
        others = (own[name.replace("new_", "old_")], *gone, *own.values())
        like = next((groups[p] for p in others if p in groups), optimizer.param_groups[0])
        settings = copy.deepcopy({**like, "params": None})
        apart = new_lr_scale is not None and name.startswith("new_")
        scale = new_lr_scale if apart else 1.0
        rates = settings.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}  # of OneCycleLR as well
        settings |= {key: settings[key] * scale for key in rates}
        if parameter.dim() < 2:  # Muon takes only matrices, and decay is for them
            fixed = {"weight_decay": 0.0, "use_muon": False}
            settings |= {key: fixed[key] for key in settings.keys() & fixed}
        # New pairs apart join only groups of this growth: a resume repeats the growths of a run
        # before it loads the rates, when those of two growths are still the same.
        for group in optimizer.param_groups[number if apart else 0 :]:
            if {**group, "params": None} == settings:
                # In the order of the model, because PyTorch loads a state by position.
                held, place = group["params"], places[parameter]
                before = [i for i, p in enumerate(held) if places.get(p, place) < place]
                held.insert(before[-1] + 1 if before else 0, parameter)
                break
        else:
            optimizer.add_param_group(group := {**settings, "params": [parameter]})
        groups[parameter] = group
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in joined]
    for gone in joined:
        optimizer.state.pop(gone, None)  # PyTorch could not save it


def leave_behind(model: nn.Module, followed: Any = None) -> None:
    """Let other optimizers of pairs fail: they lack parameters, or have moments of other rows."""
    own = {p for layer in pattention_layers(model).values() for p in layer.parameters()}
    for each in [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]:
        held = {p for group in getattr(each, "param_groups", ()) for p in group["params"]}
        if unwrapped(each) is not unwrapped(followed) and not own.isdisjoint(held):
            _left_behind.add(each)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    # Not at import: a process in which nothing grows needs no hook.
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    kind, way = type(optimizer).__name__, "call grow(..., optimizer=optimizer), or build a new one"
    if optimizer in _left_behind:
        raise InputError(f"the pairs that this {kind} trains were changed without it: {way}")
    # Fused steps do not compare shapes: they would read and write other memory.
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise InputError(
                        f"{kind} has a state of shape {tuple(value.shape)} for a parameter that "
                        f"has grown to {tuple(parameter.shape)}: {way}"
                    )
