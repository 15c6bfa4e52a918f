"""Find, read and replace the parameter tokens of a model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block
from tokenformer_vit.layers.segments import (
    TOKENS,
    fuse_tokens,
    is_split,
    split_tokens,
    token_segments,
)
from tokenformer_vit.models import TokenFormerDecoder, TokenFormerViT
from tokenformer_vit.models.sizes import find_layers, kind_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Replaced parameters by id, for as long as somebody still holds them.
_replaced: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class LayerTokens:
    """All tensors of a Pattention layer.

    Args:
        keys: (P, C_in) key parameter tokens.
        values: (P, C_out) value parameter tokens.
        tau: 0-dim float32 scale.
        gate: (P,) gates, or None.
        nested: Nested sizes of the layer.
        nested_tau: (n,) scale of each of these sizes, or None if there are none.
    """

    keys: Tensor
    values: Tensor
    tau: Tensor
    gate: Tensor | None = None
    nested: tuple[int, ...] = ()
    nested_tau: Tensor | None = None

    @property
    def num(self) -> int:
        """Number of pairs P."""
        return len(self.keys)


@dataclass(frozen=True)
class Change:
    """Parameters that replace others, for :func:`~tokenformer_vit.growth.carry_over`.

    Args:
        sources: Old parameters.
        targets: New parameters. Along ``dim``, the entries of all sources come first; later entries
            are new.
        dim: Dimension that grew.
        like: If there are no sources, parameters whose optimizer settings the targets get; the
            first one that the optimizer has.
    """

    sources: tuple[nn.Parameter, ...]
    targets: tuple[nn.Parameter, ...]
    dim: int = 0
    like: tuple[nn.Parameter, ...] = ()


def trained_later(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function make tensors that can be trained, also under ``torch.inference_mode()``.

    Models that were built there stay as they are, because only that mode can change them.
    """

    @functools.wraps(function)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        models = [each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module)]
        if any(parameter.is_inference() for model in models for parameter in model.parameters()):
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside


def counts_by_layer(names: Iterable[str], **counts: Counts) -> dict[str, int | None]:
    """Give each layer its number of pairs.

    Args:
        names: Full names of all Pattention layers of a model.
        **counts: ``num_qkv_param_tokens``, ``num_proj_param_tokens`` and ``num_ffn_param_tokens``,
            as the arguments of a model. Layers without an argument get None.

    Raises:
        InputError: If a number is not whole, or a list does not have one for each block.
    """
    blocks = {name: block_of(name) for name in names}
    by_block = counts_by_block(1 + max(blocks.values()), **counts)
    return {name: by_block[block].get(COUNTS[kind_of(name)]) for name, block in blocks.items()}


def block_of(name: str) -> int:
    """Return the number of the block of a layer with this full name; 0 if it has none."""
    return next((int(part) for part in reversed(name.split(".")) if part.isdigit()), 0)


def pattention_layers(model: nn.Module) -> dict[str, Pattention]:
    """Find the Pattention layers of a model.

    Args:
        model: Any module that holds TokenFormer blocks: a backbone, a classifier, a language model.

    Returns:
        The layers by name, in the order of the model.

    Raises:
        InputError: If the model has no Pattention layer.
    """
    layers = find_layers(model)
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no Pattention layer to change; give a TokenFormer"
        )
    return layers


def check_rebuildable(model: nn.Module, layers: Mapping[str, Pattention]) -> None:
    """Check that a change of the number of pairs covers whole models, and no wrapper of one.

    A TokenFormerViT or TokenFormerDecoder is rebuilt from the counts of all its blocks.

    Args:
        model: Module that holds the layers.
        layers: Pattention layers by name.

    Raises:
        InputError: If a layer belongs to such a model, and ``model`` does not contain that model;
            ``model`` is or contains a DistributedDataParallel or is sharded; tensors of a layer are
            computed from other tensors; or two layers share a parameter.
    """
    check_unsharded(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise InputError(
            "the model is in a DistributedDataParallel, which would not notice new parameters: "
            "give its `module`, and wrap that again"
        )
    check_stored(layers)
    whole = {layer for module in find_models(model) for layer in module.modules()}
    owners: dict[nn.Parameter, str] = {}
    for name, layer in layers.items():
        if layer.of_model and layer not in whole:
            raise InputError(
                f"{name or 'the layer'} is only a part of a model, which cannot be rebuilt if its "
                "other blocks keep their number of pairs: give the whole model, not its "
                f"{type(model).__name__}"
            )
        for part, parameter in layer.named_parameters(recurse=False):
            other = owners.setdefault(parameter, name)
            if other != name and part.endswith(TOKENS):  # each would get a new one of its own
                raise InputError(
                    f"{name}.{part} is also a parameter of {other}, and would not be afterwards: "
                    "give each its own copy first, or use one layer in both places"
                )


def check_stored(layers: Mapping[str, Pattention]) -> None:
    """Check that all tensors of layers are parameters or buffers, which can be replaced.

    Raises:
        InputError: If one is computed from other tensors.
    """
    for name, layer in layers.items():
        parts = () if is_split(layer) else TOKENS
        for part in (*parts, "tau", "gate", "nested_tau"):
            if part not in layer._parameters and part not in layer._buffers:
                raise InputError(
                    f"{name}.{part} is computed from other tensors, as torch.nn.utils.prune and "
                    "parametrizations do: make it a parameter first, by prune.remove or "
                    "remove_parametrizations"
                )


def check_unsharded(model: nn.Module) -> None:
    """Check that each process has all of the parameters.

    Raises:
        InputError: If the model is sharded by FSDP, or its parameters are DTensors.
    """
    # By name: torch.distributed need not be there. FSDP2 changes the class of a module, whose
    # parameters may be whole for a while after a forward pass.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if sharded or kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise InputError(
            "the parameters of the model are sharded over processes (FSDP): change it before it is "
            "sharded, as by fully_shard, or load its full state dict "
            "(get_model_state_dict with full_state_dict=True) into a model that is not"
        )


def check_unmasked(layers: Mapping[str, Pattention]) -> None:
    """Check that no mask is active.

    Raises:
        InputError: If one is.
    """
    for name, layer in layers.items():
        if layer.active is not None:
            raise InputError(
                f"{name} has an active mask; call TokenMasks.activate() to use all pairs"
            )


def use_all_pairs(layers: Iterable[Pattention]) -> None:
    """Reset the mask and the size of layers, before the pairs of a model change."""
    for layer in layers:
        layer.active, layer.size = None, None


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
    layer: Pattention,
    tokens: LayerTokens,
    num_old: int | None = None,
    learn_gate: bool | None = None,
) -> list[Change]:
    """Replace the tokens of a layer; their number may change.

    Args:
        layer: Layer to change in place. Its parameters become new objects, which need a gradient
            if the old ones needed one. ``active`` and ``size`` are reset.
        tokens: New tensors of the layer.
        num_old: Number of old pairs to store apart from the others; None stores all pairs together.
        learn_gate: Whether the gate is a parameter (True) or a buffer (False). None keeps the kind
            of the present gate, and makes a new gate a parameter.

    Returns:
        The changes that an optimizer must follow.
    """
    before = {name: token_segments(layer, name) for name in TOKENS}
    fuse_tokens(layer)
    layer.num_param_tokens = tokens.num
    use_all_pairs([layer])
    for name, tensor in zip(TOKENS, (tokens.keys, tokens.values), strict=True):
        trained = getattr(layer, name).requires_grad
        setattr(layer, name, nn.Parameter(tensor.clone(), requires_grad=trained))
    layer.tau.copy_(tokens.tau)
    nested_tau = layer.nested_tau
    layer.set_nested(tokens.nested, tokens.nested_tau)
    gate, was_learned = layer.gate, isinstance(layer.gate, nn.Parameter)
    if tokens.gate is not None:
        opened = tokens.gate.clone()
        if learn_gate is None:
            learn_gate = gate is None or was_learned
        if learn_gate:
            trained = gate.requires_grad if was_learned else True  # type: ignore[union-attr]
            del layer.gate  # it may be a buffer, or None
            layer.gate = nn.Parameter(opened, requires_grad=trained)
        else:
            del layer.gate
            layer.register_buffer("gate", opened)
    # After the gate, because keys and values are the last parameters of a layer.
    if num_old is not None and 0 < num_old < tokens.num:
        split_tokens(layer, num_old)
    changes = [Change(before[name], token_segments(layer, name)) for name in TOKENS]
    for old, new in ((gate, layer.gate), (nested_tau, layer.nested_tau)):
        sources, targets = (
            (each,) if isinstance(each, nn.Parameter) else () for each in (old, new)
        )
        if old is not new and (sources or targets):
            like = () if sources else changes[0].targets
            changes.append(Change(sources, targets, like=like))
    mark_replaced(changes)
    return changes


def join_layer(layer: Pattention) -> list[Change]:
    """Store the old and new keys of a split layer in one parameter, and its values in another.

    Args:
        layer: Layer to change in place. Its outputs and ``active`` stay.

    Returns:
        The changes that an optimizer must follow; none if the layer was not split.
    """
    if not is_split(layer):
        return []
    before = {name: token_segments(layer, name) for name in TOKENS}
    fuse_tokens(layer)
    changes = [Change(before[name], token_segments(layer, name)) for name in TOKENS]
    mark_replaced(changes)
    return changes


def mark_replaced(changes: Iterable[Change]) -> None:
    """Make an optimizer raise InputError at its next step if it holds a replaced parameter.

    Without this, the step would silently train nothing.

    Args:
        changes: Parameters that were replaced.
    """
    _watch_optimizers()
    for change in changes:
        for parameter in change.sources:
            if all(parameter is not target for target in change.targets):
                _replaced[id(parameter)] = parameter


@functools.cache
def _watch_optimizers() -> None:
    # Not at import: a process in which nothing grows needs no hook.
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    kind = type(optimizer).__name__
    if _replaced and any(
        id(parameter) in _replaced
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise InputError(
            f"this {kind} holds parameters that growth, pruning, joining or nesting has replaced, "
            "and would not train the new ones: build a new optimizer, or call "
            "grow(..., optimizer=optimizer)"
        )
    # PyTorch's fused steps do not compare shapes: they read and write other memory.
    if any(
        value.dim() and value.shape != parameter.shape
        for group in optimizer.param_groups
        if group.get("fused")
        for parameter in group["params"]
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    ):
        raise InputError(
            f"the state of this {kind} has other shapes than its parameters, as if it was saved "
            "before growth: load it into an optimizer of the smaller model, and call "
            "grow(..., optimizer=optimizer)"
        )


def record_counts(model: nn.Module) -> None:
    """Update the numbers of pairs in the arguments from which a model is rebuilt.

    Args:
        model: Module that is or contains TokenFormer backbones or language models.
    """
    for module in find_models(model):
        module.record_param_tokens()
    for module in model.modules():
        # transformers' wrapper of timm's models saves arguments of its own.
        inner: Any = getattr(module, "timm_model", None)
        own: Any = getattr(module, "config", None)
        if isinstance(inner, TokenFormerViT) and hasattr(own, "model_args"):
            names = (*COUNTS.values(), "nested", "pattention_args")
            kept = {k: v for k, v in (own.model_args or {}).items() if k not in names}
            own.model_args = kept | {k: v for k, v in inner._model_args.items() if k in names}


def find_models(model: nn.Module) -> list[TokenFormerViT | TokenFormerDecoder]:
    """Return the TokenFormer backbones and language models that are or are in a module."""
    return [
        each for each in model.modules() if isinstance(each, TokenFormerViT | TokenFormerDecoder)
    ]
