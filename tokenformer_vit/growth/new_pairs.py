"""What may be done with the new pairs of a grown model: train them alone, open them, join them."""

from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.segments import TOKENS, is_split, token_segments

from .optimizer import carry_over, check_optimizer
from .tokens import join_layer, pattention_layers

__all__ = ["freeze_old", "join_tokens", "open_gates"]

Model = TypeVar("Model", bound=nn.Module)


def freeze_old(model: nn.Module) -> None:
    """Train the new pairs of a grown model alone.

    Args:
        model: Grown with ``split=True``; no other parameter needs a gradient afterwards. A
            classifier that is to be trained too is switched on again by
            ``model.get_classifier().requires_grad_()``.

    Raises:
        InputError: If no layer holds new pairs apart from the old.
    """
    parts = [
        token_segments(layer, name)
        for layer in pattention_layers(model).values()
        for name in TOKENS
    ]
    if all(len(part) == 1 for part in parts):
        raise InputError("no layer holds new pairs apart from the old ones: grow with split=True")
    model.requires_grad_(False)
    for part in parts:
        for new in part[1:]:
            new.requires_grad_()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # an optimiser would still make a step of it


@torch.no_grad()
def open_gates(model: nn.Module, opened: float) -> None:
    """Open the fixed gates of new pairs so far.

    Args:
        model: Grown with ``gate="fixed"``.
        opened: From 0, where it was at growth, to 1, where a new pair is like any other.

    Raises:
        InputError: If ``opened`` is out of range, or no layer has a fixed gate.
    """
    if not 0 <= opened <= 1:
        raise InputError(f"gates open from 0 to 1, but opened is {opened}")
    gates = [
        layer.gate
        for layer in pattention_layers(model).values()
        if layer.gate is not None and not isinstance(layer.gate, nn.Parameter)
    ]
    if not gates:
        raise InputError("no layer has a fixed gate: grow a softmax model with gate='fixed'")
    for gate in gates:
        gate[gate != 1] = opened


def join_tokens(model: Model, optimizer: Optimizer | None = None, moments: str = "keep") -> Model:
    """Hold the old and the new pairs of a grown model in one parameter again, in place.

    A model need not be joined to be saved: its state dict is joined in any case.

    Args:
        model: Any module with TokenFormer blocks; layers that are not split stay as they are. A
            joined parameter needs a gradient if one of its parts did.
        optimizer: Of the model's parameters; it goes on with the joined ones, in the group of the
            old ones. Without it, build a new optimizer.
        moments: What becomes of its state; see :func:`carry_over`.

    Returns:
        ``model``. It computes what it did.

    Raises:
        InputError: If the model has no Pattention layer, or the optimizer's state cannot be carried
            over. Nothing is changed then.
    """
    layers = [layer for layer in pattention_layers(model).values() if is_split(layer)]
    parts = [part for layer in layers for name in TOKENS for part in token_segments(layer, name)]
    check_optimizer(optimizer, parts, moments)
    changes = [change for layer in layers for change in join_layer(layer)]
    if optimizer is not None:
        carry_over(optimizer, changes, moments)
    return model
