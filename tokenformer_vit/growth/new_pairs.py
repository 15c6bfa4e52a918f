"""Train only the new pairs of a grown model, open their gates, or join them to the old pairs."""

from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.segments import TOKENS, is_split, token_segments

from .optimizer import carry_over, check_optimizer, kept_order
from .tokens import check_stored, check_unsharded, join_layer, pattention_layers, trained_later

Model = TypeVar("Model", bound=nn.Module)


def freeze_old(model: nn.Module) -> None:
    """Freeze all parameters of a grown model except its new pairs.

    Args:
        model: Model that was grown with ``split=True``. To train also its classifier, call
            ``requires_grad_()`` of ``model.get_classifier()`` afterwards (of both if distilled).

    Raises:
        InputError: If no layer stores new pairs in separate parameters.
    """
    parts = [
        token_segments(layer, name)
        for layer in pattention_layers(model).values()
        for name in TOKENS
    ]
    if all(len(part) == 1 for part in parts):
        raise InputError("no layer stores its new pairs separately: grow with split=True")
    model.requires_grad_(False)
    for part in parts:
        for new in part[1:]:
            new.requires_grad_()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # otherwise an optimizer would still make a step with it


@torch.no_grad()
def open_gates(model: nn.Module, opened: float) -> None:
    """Set the fixed gates of new pairs.

    Args:
        model: Model that was grown with ``gate="fixed"``.
        opened: Value of the gates, from 0 (as at growth) to 1 (the pair counts fully).

    Raises:
        InputError: If ``opened`` is out of range, or no layer has a fixed gate.
    """
    if not 0 <= opened <= 1:
        raise InputError(f"opened must be from 0 to 1, but got {opened}")
    gates = [
        layer.gate
        for layer in pattention_layers(model).values()
        if layer.gate is not None and not isinstance(layer.gate, nn.Parameter)
    ]
    if not gates:
        raise InputError("no layer has a fixed gate: grow a softmax model with gate='fixed'")
    for gate in gates:
        gate[gate != 1] = opened


@trained_later
def join_tokens(model: Model, optimizer: Optimizer | None = None, moments: str = "keep") -> Model:
    """Store the old and the new pairs of a grown model in one parameter again, in place.

    This is not necessary for saving: a state dict always contains joined pairs.

    Args:
        model: Any module with TokenFormer blocks. Layers that are not split do not change. A joined
            parameter needs a gradient if one of its parts needed one.
        optimizer: Optimizer of the model's parameters, which continues with the joined parameters,
            in the group of the old pairs. Without it, build a new optimizer.
        moments: What to do with the optimizer's state; see :func:`carry_over`.

    Returns:
        ``model``, with the same outputs.

    Raises:
        InputError: If the model has no Pattention layer or is sharded, tensors of a split layer are
            computed from others, or the optimizer's state cannot be carried over. Then nothing is
            changed.
    """
    check_unsharded(model)
    split = {name: each for name, each in pattention_layers(model).items() if is_split(each)}
    check_stored(split)
    layers = list(split.values())
    parts = [part for layer in layers for name in TOKENS for part in token_segments(layer, name)]
    check_optimizer(optimizer, parts, moments)
    with kept_order(optimizer, model):
        changes = [change for layer in layers for change in join_layer(layer)]
        if optimizer is not None:
            carry_over(optimizer, changes, moments)
    return model
