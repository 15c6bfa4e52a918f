"""Nested sizes of a trained model: make a small model of one, or make them of an ordinary model."""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import Size, nest_layers, set_size

from .prune import Usage, adapted_tau, check_usage, select_pairs
from .resize import (
    Model,
    leave_behind,
    pattention_layers,
    record_counts,
    whole_layers,
    write_tokens,
)


@torch.no_grad()
def extract(model: Model, size: Size) -> Model:
    """Copy the first pairs of every layer into a new model.

    Args:
        model: Any module with TokenFormer blocks; it does not change.
        size: Size, as for ``model.set_size``, whether it was trained or not.

    Returns:
        A model with the outputs of this size, on a CPU bit for bit. It keeps smaller trained sizes.
    """
    if masked := [name for name, layer in whole_layers(model).items() if layer.active is not None]:
        raise InputError(
            f"{masked[0]} has an active mask; call TokenMasks.activate() for all pairs"
        )
    smaller = copy.deepcopy(model)
    set_size(smaller, size)
    layers = pattention_layers(smaller)
    # Sizes of a model have the same index in all layers.
    fitting = min(bisect_right(layer.nested, layer.num_used) for layer in layers.values())
    if fitting and all(layer.nested[fitting - 1] == layer.num_used for layer in layers.values()):
        fitting -= 1  # the whole of the new model
    tokens = {}
    for name, layer in layers.items():
        own = select_pairs(layer, torch.arange(layer.num_used, device="cpu"))
        taus = [layer.tau_of(count) for count in (*layer.nested[:fitting], layer.num_used)]
        nested, nested_tau = layer.nested[:fitting], torch.stack(taus)[:-1]
        tokens[name] = own._replace(tau=taus[-1], nested=nested, nested_tau=nested_tau)
    write_tokens(smaller, tokens)
    return smaller


@torch.no_grad()
def reorder(model: Model, usage: Mapping[str, Usage]) -> Model:
    """Sort the pairs of every layer by their :class:`Usage`, most used first, in place.

    Outputs stay up to rounding. The model is not nested afterwards; build optimizers anew.
    """
    layers = whole_layers(model)
    check_usage(layers, usage)
    tokens = {name: select_pairs(layer, usage[name].order) for name, layer in layers.items()}
    write_tokens(model, tokens)
    return model


@torch.no_grad()
def nest(model: Model, sizes: Sequence[Size], usage: Mapping[str, Usage] | None = None) -> Model:
    """Give a trained model nested sizes, in place; train it afterwards at these sizes.

    Args:
        model: Any module with TokenFormer blocks. Its outputs stay; build optimizers anew.
        sizes: Sizes, as for ``model.set_size``. Empty for an ordinary model.
        usage: Usage by which :func:`reorder` has sorted the pairs, to adapt τ of the sizes as
            :func:`~tokenformer_vit.growth.prune` does. None keeps what the sizes compute now.
    """
    layers = whole_layers(model)
    if usage is not None:
        check_usage(layers, usage, reordered=True)
    names = {layer: name for name, layer in layers.items()}

    def tau_of(layer: Pattention, count: int) -> Tensor:
        own = None if usage is None else usage[names[layer]]
        return layer.tau_of(count) if own is None else adapted_tau(layer, own, count)

    models = [module for module in model.modules() if hasattr(module, "record_param_tokens")]
    for module in models or [model]:
        module.sizes = nest_layers(module, sizes, tau_of)  # type: ignore[assignment]
    record_counts(model)
    if any(layer.tau.requires_grad for layer in layers.values()):  # a size has a new parameter
        leave_behind(model)
    return model
