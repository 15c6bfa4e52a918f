"""The parameter tokens of a model: found, read, and put back in another number."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.segments import (
    TOKENS,
    fuse_tokens,
    is_split,
    split_tokens,
    token_segments,
)
from tokenformer_vit.models import TokenFormerLM, TokenFormerViT

# Parameters that others took the place of, by id, for as long as somebody still holds them.
_replaced: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()

# Which of a model's three counts of pairs a layer belongs to, by the layer's own name.
KINDS = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "mlp": "ffn"}


@dataclass(frozen=True)
class LayerTokens:
    """All that a Pattention layer stores.

    Args:
        keys: (P, C_in).
        values: (P, C_out).
        tau: 0-dim, float32.
        gate: (P,), or None where the layer has none.
    """

    keys: Tensor
    values: Tensor
    tau: Tensor
    gate: Tensor | None = None

    @property
    def num(self) -> int:
        """Number of pairs P."""
        return len(self.keys)


@dataclass(frozen=True)
class Change:
    """Parameters that took the place of others, for :func:`~tokenformer_vit.growth.carry_over`.

    Args:
        sources: Those that were there.
        targets: Those that are there now. Along ``dim`` the sources' entries, one source after
            another, are the first of the targets', and what is beyond them is new.
        dim: The dimension that grew.
        like: Where there are no sources, a parameter that is trained as the targets are to be.
    """

    sources: tuple[nn.Parameter, ...]
    targets: tuple[nn.Parameter, ...]
    dim: int = 0
    like: nn.Parameter | None = None


def kind_of(name: str) -> str:
    """Tell which count of pairs, ``qkv``, ``proj`` or ``ffn``, a layer belongs to.

    Args:
        name: Full name of a Pattention layer in a model.

    Raises:
        InputError: If it is not a layer of a TokenFormer block.
    """
    last = name.rpartition(".")[2]
    if last not in KINDS:
        raise InputError(
            f"the Pattention layer {name!r} is none of a TokenFormer block's "
            f"({', '.join(KINDS)}); its pairs cannot be changed by kind"
        )
    return KINDS[last]


def pattention_layers(model: nn.Module) -> dict[str, Pattention]:
    """Find the Pattention layers of a model.

    Args:
        model: Any module that holds TokenFormer blocks: a backbone, a classifier, a language model.

    Returns:
        The layers by name, in the model's order.

    Raises:
        InputError: If there is none.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Pattention)}
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no Pattention layer, hence no parameter tokens to change"
        )
    return layers


def check_rebuildable(model: nn.Module, layers: Mapping[str, Pattention]) -> None:
    """See that layers whose number of pairs is to change are not only a part of a model.

    A TokenFormerViT or TokenFormerLM is rebuilt by one count for all layers of a kind.

    Args:
        model: What holds the layers.
        layers: Its Pattention layers by name.

    Raises:
        InputError: If a layer belongs to such a model, and ``model`` does not hold that model.
    """
    whole = {
        layer
        for module in model.modules()
        if isinstance(module, TokenFormerViT | TokenFormerLM)
        for layer in module.modules()
    }
    for name, layer in layers.items():
        if layer.of_model and layer not in whole:
            raise InputError(
                f"{name or 'the layer'} belongs to a model whose other blocks would keep their "
                "number of pairs, which could not be saved and rebuilt: give the whole model, not "
                f"its {type(model).__name__}"
            )


def read_tokens(layer: Pattention) -> LayerTokens:
    """Return what a layer stores, without history; of an ordinary layer not copied."""
    gate = layer.gate
    return LayerTokens(
        layer.key_param_tokens.detach(),
        layer.value_param_tokens.detach(),
        layer.tau.detach(),
        None if gate is None else gate.detach(),
    )


@torch.no_grad()
def write_tokens(
    layer: Pattention,
    tokens: LayerTokens,
    num_old: int | None = None,
    learn_gate: bool | None = None,
) -> list[Change]:
    """Give a layer other tokens, in any number.

    Args:
        layer: Changed in place; its parameters are new objects, which need a gradient if the old
            ones did. A selection of pairs (``active``) and ``top_k`` are given up.
        tokens: What it stores from now on.
        num_old: Hold so many pairs apart from the others; None holds all in one.
        learn_gate: Make the gate, if there is one, a parameter (True) or a buffer (False); None
            leaves it what it is, and makes a new one a parameter.

    Returns:
        What an optimiser has to know.
    """
    before = {name: token_segments(layer, name) for name in TOKENS}
    fuse_tokens(layer)
    layer.num_param_tokens = tokens.num
    layer.active, layer.top_k = None, None
    for name, tensor in zip(TOKENS, (tokens.keys, tokens.values), strict=True):
        trained = getattr(layer, name).requires_grad
        setattr(layer, name, nn.Parameter(tensor.clone(), requires_grad=trained))
    layer.tau.copy_(tokens.tau)
    gate, was_learned = layer.gate, isinstance(layer.gate, nn.Parameter)
    if tokens.gate is not None:
        opened = tokens.gate.clone()
        if learn_gate is None:
            learn_gate = gate is None or was_learned
        if learn_gate:
            trained = gate.requires_grad if was_learned else True  # type: ignore[union-attr]
            del layer.gate  # it may be a buffer, maybe an empty one
            layer.gate = nn.Parameter(opened, requires_grad=trained)
        else:
            del layer.gate
            layer.register_buffer("gate", opened)
    # After the gate: the parts come last among the layer's parameters.
    if num_old is not None and 0 < num_old < tokens.num:
        split_tokens(layer, num_old)
    changes = [Change(before[name], token_segments(layer, name)) for name in TOKENS]
    if layer.gate is not gate and (was_learned or isinstance(layer.gate, nn.Parameter)):
        sources = (gate,) if was_learned else ()
        targets = (layer.gate,) if isinstance(layer.gate, nn.Parameter) else ()
        like = None if was_learned else changes[0].targets[-1]
        changes.append(Change(sources, targets, like=like))  # type: ignore[arg-type]
    mark_replaced(changes)
    return changes


def join_layer(layer: Pattention) -> list[Change]:
    """Hold the old and the new pairs of a split layer in one parameter each for keys, values.

    Args:
        layer: Changed in place; what it computes stays, and so do ``active`` and ``top_k``.

    Returns:
        What an optimiser has to know; nothing where the layer was not split.
    """
    if not is_split(layer):
        return []
    before = {name: token_segments(layer, name) for name in TOKENS}
    fuse_tokens(layer)
    changes = [Change(before[name], token_segments(layer, name)) for name in TOKENS]
    mark_replaced(changes)
    return changes


def mark_replaced(changes: Iterable[Change]) -> None:
    """Let a step of any optimiser that still holds a replaced parameter raise InputError.

    Such a step would train nothing, without a word.

    Args:
        changes: What was replaced.
    """
    _watch_optimizers()
    for change in changes:
        for parameter in change.sources:
            if all(parameter is not target for target in change.targets):
                _replaced[id(parameter)] = parameter


@functools.cache
def _watch_optimizers() -> None:
    # At the first replacement, not at import: a process in which nothing grows has no hook.
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _replaced and any(
        id(parameter) in _replaced
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise InputError(
            f"this {type(optimizer).__name__} holds parameters that were replaced when the model "
            "was grown, pruned or joined, and would train nothing of what took their place: build "
            "a new optimizer, or hand this one to grow(..., optimizer=optimizer)"
        )


def record_counts(model: nn.Module) -> None:
    """Write a model's present counts of pairs into what it is saved and rebuilt by.

    Args:
        model: A module that is, or holds, TokenFormer backbones or language models.
    """
    for module in model.modules():
        if isinstance(module, TokenFormerViT | TokenFormerLM):
            module.record_param_tokens()
