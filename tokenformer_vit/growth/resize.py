"""Give the layers of a model other pairs, all or none; Parameter objects stay, optimizers follow.

Optimizers, schedulers and parameter groups hold Parameter objects, so they go on by themselves.
"""

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block
from tokenformer_vit.layers.pattention import PER_PAIR
from tokenformer_vit.models.sizes import check_not_fused, find_layers, kind_of

Model = TypeVar("Model", bound=nn.Module)
MOMENTS = ("keep", "reset")
# States of an optimizer that start at the parameter: of Schedule-Free, MADGRAD, and Lookahead.
_START_AT_PARAMETER = ("z", "x0", "lookahead_slow_buff")
_NUMBERS = ("step", "mu_product", "eta", "mu")  # 0-dim, as a τ and its moments


class LayerState(NamedTuple):
    """Tensors of a layer: by name of ``PER_PAIR`` those with a row for each pair, and τ."""

    rows: dict[str, Tensor]
    tau: Tensor  # (), or (n + 1,) if nested
    nested: tuple[float, ...] = ()

    @property
    def num(self) -> int:
        """Number of pairs P."""
        return len(self.rows["key_param_tokens"])


def pattention_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of any module by name, in its order."""
    if layers := find_layers(model):
        return layers
    raise InputError(f"{type(model).__name__} has no Pattention layer; give a TokenFormer")


def count_pairs(model: nn.Module) -> dict[str, int]:
    """Count the pairs of each Pattention layer of a model, by layer name."""
    return {name: layer.num_param_tokens for name, layer in pattention_layers(model).items()}


def unwrapped_layers(model: nn.Module) -> dict[str, Pattention]:
    """Find the Pattention layers of a model that is not fused, nor wrapped by PyTorch or peft."""
    # By name: torch.distributed may be missing, and FSDP2 makes a class of its own.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    wrappers = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "ParamWrapper"}
    if found := kinds & wrappers:
        raise InputError(
            f"the model is wrapped by {found.pop()}, which would not notice other pairs: change "
            "the model before it is wrapped, or after merge_and_unload() of peft"
        )
    check_not_fused(model)
    if torch.is_inference_mode_enabled():
        raise InputError("inference mode is on, and its tensors cannot be trained: leave it first")
    return pattention_layers(model)


def counts_by_layer(
    layers: Mapping[str, Pattention], *counts: Counts | Mapping[str, Counts]
) -> dict[str, int]:
    """Return the given numbers of pairs by layer: of the three kinds, or of a dict, the first."""
    first: Any = counts[0]
    if isinstance(first, Mapping) and any(count is not None for count in counts[1:]):
        raise InputError("give all numbers of pairs in the dict, or none")
    named: Any = first if isinstance(first, Mapping) else dict(zip(COUNTS, counts, strict=True))
    named = {kind: count for kind, count in named.items() if count is not None}
    if not named:
        raise InputError(f"no number of pairs is given: give {', '.join(COUNTS.values())}")
    wanted = {}
    for kind, count in named.items():
        names = [name for name, each in layers.items() if kind in (kind_of(name, each), name)]
        if not names:
            known = sorted({kind_of(name, each) for name, each in layers.items()})
            raise InputError(f"no layer is of the kind {kind!r}; choose from {', '.join(known)}")
        argument = str(COUNTS.get(kind, kind))
        # In a list, a number stands for the three layers of a block.
        of_block = 3 if kind == "qkv" and isinstance(count, Sequence) else 1
        blocks = counts_by_block(len(names) // of_block, **{argument: count})
        numbers = (int(each[argument]) for each in blocks for _ in range(of_block))
        wanted |= dict(zip(names, numbers, strict=True))
    return wanted


def counts_to_keep(
    layers: Mapping[str, Pattention], *counts: Counts | Mapping[str, Counts]
) -> dict[str, int]:
    """Return :func:`counts_by_layer`, at least 1 and at most the present number of pairs."""
    wanted = counts_by_layer(layers, *counts)
    for name, kept in wanted.items():
        have = layers[name].num_param_tokens
        if not 1 <= kept <= have:
            remedy = "to add pairs, use grow()" if kept > have else "keep at least 1"
            raise InputError(f"{name} has {have} pairs and cannot be cut to {kept}: {remedy}")
    return wanted


def read_state(layer: Pattention) -> LayerState:
    """Return the tensors of a layer, detached, with old and new pairs joined."""
    parts = {name: layer.parts(name) for name in PER_PAIR}
    rows = {name: torch.cat([*each]).detach() for name, each in parts.items() if each}
    return LayerState(rows, layer.tau.detach(), layer.nested)


def select_pairs(layer: Pattention, index: Any) -> LayerState:
    """Return the tensors of a layer with these pairs alone, without nested sizes."""
    rows = {name: data[index] for name, data in read_state(layer).rows.items()}
    return LayerState(rows, layer.tau_at(1.0).detach())


@torch.no_grad()
def write_states(
    model: nn.Module,
    states: Mapping[str, LayerState],
    optimizer: Any = None,
    moments: str | None = None,
    sized: Collection[str] | None = None,
    split: bool = False,
    freeze: str | None = None,
    new_lr_scale: float | None = None,
) -> None:
    """Give layers new tensors, all or none; masks and sizes are reset.

    With ``moments``, the data begin with the old pairs, whose gradients and optimizer state go on.
    ``split`` holds all pairs that are new now in parameters of their own; ``freeze`` trains these
    alone. ``sized`` names the layers that have sizes; None for those that have them now.
    """
    layers, optimizers, changes = find_layers(model), unwrapped(optimizer), []
    groups = (group for each in optimizers for group in each.param_groups)
    if new_lr_scale and any(group.get("lr", 1.0) is None for group in groups):
        raise InputError("new_lr_scale needs a learning rate, but the optimizer's lr is None")
    merged_into: dict[nn.Parameter, nn.Parameter] = {}
    num_old = {n: layers[n].num_param_tokens if split else each.num for n, each in states.items()}
    for name, state in states.items():
        for row, data in state.rows.items():
            old, *new = parts = layers[name].parts(row)
            changes.append((data[: num_old[name]].clone(), parts))
            merged_into |= dict.fromkeys(new, old)
        tau = layers[name].tau
        if isinstance(tau, nn.Parameter) and tau.shape != state.tau.shape:
            changes.append((state.tau.to(tau).clone(), [tau]))
    resize(changes, optimizers, moments)
    for name, state in states.items():
        layer = layers[name]
        for row, data in state.rows.items():
            new = data[num_old[name] :].clone()
            trains = layer.get_parameter(row).requires_grad
            setattr(layer, f"new_{row}", nn.Parameter(new, trains) if len(new) else None)
        if not isinstance(layer.tau, nn.Parameter):
            layer.tau = state.tau.to(layer.tau).clone()  # not in place: a live graph may need it
        elif not torch.equal(layer.tau, state.tau.to(layer.tau)):
            layer.tau.copy_(state.tau)
        layer.nested = state.nested
    for name, layer in layers.items():
        layer.active, layer.size = None, 1.0
        layer.sized = layer.sized if sized is None else name in sized
    if freeze:  # before the optimizers, which take only what is trained
        freeze_old(model)
    if optimizers:
        follow(optimizers, model, merged_into, new_lr_scale)
    refresh_configs(model)


def freeze_old(model: nn.Module) -> None:
    """Freeze all parameters of a model grown with ``split=True``, but for its new pairs."""
    layers = find_layers(model).values()
    new = {part for layer in layers for row in PER_PAIR for part in layer.parts(row)[1:]}
    if not new:
        raise InputError("no layer stores its new pairs separately: grow with split=True")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in new)
        if parameter not in new:
            parameter.grad = None  # otherwise an optimizer would still make a step with it


def refresh_configs(model: nn.Module) -> None:
    """Write the pairs and sizes of the layers into the configurations of transformers' models."""
    for module in model.modules():
        if hasattr(module, "record_param_tokens"):
            module.record_param_tokens()  # type: ignore[operator]
        # The wrapper of timm's models.
        theirs: Any = getattr(getattr(module, "config", None), "model_args", None)
        ours: Any = getattr(getattr(module, "timm_model", None), "_model_args", None)
        if isinstance(theirs, dict) and ours is not None:
            theirs |= {key: ours[key] for key in (*COUNTS.values(), "nested", "nested_kinds")}


@torch.no_grad()
def resize(
    changes: Sequence[tuple[Tensor, Sequence[nn.Parameter]]],
    optimizers: Sequence[Optimizer],
    moments: str | None,
) -> None:
    """Give the first of old parameters new data, which begin with the rows of all, or none."""
    if moments not in (*MOMENTS, None):
        raise InputError(f"moments is {moments!r}; choose one of {', '.join(MOMENTS)}")
    owners = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    states = []
    for data, parts in changes:
        owner = next((owners[part] for part in parts if part in owners), None)
        lacks = optimizers and any(p.requires_grad and p not in owners for p in parts)
        if lacks or isinstance(owner, torch.optim.LBFGS):
            names = " and ".join(type(each).__name__ for each in optimizers)
            raise InputError(
                f"{names} does not have all parameters that grow, or keeps one state for all: give "
                "all optimizers, built from model.parameters() before growth; or build them anew"
            )
        keeps = owner is not None and moments == "keep"
        states.append((owner, _grown_state(owners, data, parts) if keeps else {}))
    # The cache of autocast holds weak references. torch.utils.swap_tensors, the public way, also
    # refuses those of Python, which torch.compile holds, and a graph that is alive but done with.
    torch.clear_autocast_cache()
    for parameter in (parts[0] for _, parts in changes):  # weak references of C++ forbid it
        other = nn.Parameter(parameter.detach(), parameter.requires_grad)
        torch._C._swap_tensor_impl(parameter, other)
        torch._C._swap_tensor_impl(parameter, other)
    for (data, parts), (owner, state) in zip(changes, states, strict=True):
        parameter, grad = parts[0], None
        grads = [part.grad if moments else None for part in parts]
        if any(each is not None for each in grads):
            grad = _with_rows(torch.zeros_like(data), grads, parts)
        for part in parts:  # to which a graph of before growth would write
            if part.requires_grad:
                get_gradient_edge(part).node.register_prehook(_refuse_old_graph)
        _swap(parameter, data, any(part.requires_grad for part in parts))
        parameter.grad = grad
        if owner is not None:
            owner.state.pop(parameter, None)
            if state:
                owner.state[parameter] = state
    _register_once(_check_fused_step)


def _swap(parameter: nn.Parameter, data: Tensor, trains: bool) -> None:
    """Put data into a parameter; its hooks and shared memory stay."""
    if data.device.type == "cpu" and parameter.is_shared():
        data = data.share_memory_()
    new = nn.Parameter(data, trains)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if trains else ():
        if (hooks := getattr(parameter, name)) is not None:
            setattr(new, name, hooks)
    torch._C._swap_tensor_impl(parameter, new)


def _refuse_old_graph(grads: Any) -> None:
    raise InputError(
        "this backward pass belongs to outputs from before the model's pairs changed: call "
        "backward() first, or compute the outputs again"
    )


def _grown_state(
    owners: Mapping[Any, Optimizer], data: Tensor, parts: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """Compute the state of a parameter; numbers, such as a step, are those of the first part."""
    of_parts = [owners[p].state.get(p) or {} if p in owners else {} for p in parts]
    like, first = next((each for each in zip(parts, of_parts, strict=True) if each[1]), (data, {}))
    state = dict(first)
    for name, value in state.items():
        fits = type(value) is Tensor and value.shape == like.shape
        if fits and name not in _NUMBERS and name != "step_size":  # Rprop's start at the rate
            start = data if name in _START_AT_PARAMETER else torch.zeros_like(data)
            values = [each.get(name) for each in of_parts]
            state[name] = _with_rows(start.to(value.dtype, copy=True), values, parts)
        elif getattr(value, "shape", isinstance(value, list | tuple | dict)):
            raise InputError(
                f"the optimizer has a state ({name}) that cannot be carried over to a larger "
                "parameter: give moments='reset', or build a new optimizer after growth"
            )
    return state


def _with_rows(data: Tensor, values: Sequence[Tensor | None], parts: Sequence[Tensor]) -> Tensor:
    """Write values of the shapes of ``parts``, where they exist, over the first rows of data."""
    start = 0
    for value, part in zip(values, parts, strict=True):
        count = len(part) if part.dim() else 1  # a τ () becomes the first of several
        if value is not None:
            data[start : start + count] = value
        start += count
    return data


def unwrapped(optimizer: Any) -> list[Any]:
    """Return the optimizers that have the states; timm's Lookahead and accelerate's wrap one."""
    if isinstance(optimizer, Sequence):
        return [each for one in optimizer for each in unwrapped(one)]
    for name in ("_base_optimizer", "optimizer"):
        if isinstance(inner := getattr(optimizer, name, None), Optimizer):
            return unwrapped(inner)
    return [] if optimizer is None else [optimizer]


def follow(
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    merged_into: Mapping[nn.Parameter, nn.Parameter],
    new_lr_scale: float | None,
) -> None:
    """Give optimizers the new parameters of layers, and take out those that others hold now."""
    holders, scaled = {*merged_into.values()}, {}
    places = {p: place for place, p in enumerate(model.parameters())}
    homes = {p: (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    for _, group in homes.values():
        group.pop("param_names", None)  # optional, and wrong from here on
    for layer in find_layers(model).values():
        parameters = dict(layer.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            # Others, such as τ, may belong to an optimizer that was not given.
            is_new = name.startswith("new_") or parameter in holders
            if parameter in homes or not parameter.requires_grad or not is_new:
                continue
            gone = (each for each, holder in merged_into.items() if holder is parameter)
            models = (parameters[name.removeprefix("new_")], *gone, *parameters.values())
            first = optimizers[0], optimizers[0].param_groups[0]
            optimizer, group = next((homes[p] for p in models if p in homes), first)
            if new_lr_scale is not None and name.startswith("new_"):
                if id(group) not in scaled:
                    own = scaled[id(group)] = copy.deepcopy({**group, "params": []})
                    for key in own.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
                        own[key] *= new_lr_scale  # with the rates of OneCycleLR
                    scaled[id(own)] = own
                    optimizer.add_param_group(own)
                group = scaled[id(group)]
            # In the order of the model, because PyTorch loads a state by position.
            held, place = group["params"], places[parameter]
            after = (i + 1 for i, p in enumerate(held) if places.get(p, place) < place)
            held.insert(max(after, default=0), parameter)
            homes[parameter] = optimizer, group
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in merged_into]
        for gone in (*merged_into, *(p for p in holders if p not in homes)):
            optimizer.state.pop(gone, None)  # PyTorch could not save it


# Not at import: a process in which nothing grows needs no hook.
_register_once = functools.cache(register_optimizer_step_pre_hook)


def _check_fused_step(optimizer: Optimizer, *_: Any) -> None:
    """Compare shapes, which fused steps do not: they would read and write other memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise InputError(
                        f"{type(optimizer).__name__} has a state of shape {tuple(value.shape)} for "
                        f"a parameter that has grown to {tuple(parameter.shape)}: call grow(..., "
                        "optimizer=optimizer), or build a new one"
                    )
