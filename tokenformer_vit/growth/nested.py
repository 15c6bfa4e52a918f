"""Nested sizes of a trained model: make a small model of one, or make them of an ordinary model."""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import Size, nest_layers, set_size

from .prune import Usage, adapted_tau, check_usage, select_pairs
from .resize import LayerTokens, pattention_layers, record_counts, whole_layers, write_tokens

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def extract(model: Model, size: Size) -> Model:
    """Copy the first pairs of every layer into a new, ordinary model.

    Args:
        model: Any module with TokenFormer blocks; it does not change.
        size: Size, as for ``model.set_size``, whether it was trained or not.

    Returns:
        A model without the other pairs, saved like any other. On a CPU its outputs equal those of
        ``model.set_size(size)`` bit for bit. It keeps the smaller trained sizes.

    Raises:
        InputError: If the size is out of range, or a mask is active.
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
        keys, values, gate, tau = layer.used_tokens()
        nested = layer.nested[:fitting]
        nested_tau = torch.stack([layer.tau_of(each) for each in nested]) if nested else None
        gate = None if gate is None else gate.clone()
        own = LayerTokens(keys.clone(), values.clone(), tau.clone(), gate, nested, nested_tau)
        tokens[name] = own
    write_tokens(smaller, tokens)
    return smaller


@torch.no_grad()
def reorder(model: Model, usage: Mapping[str, Usage]) -> Model:
    """Sort the pairs of every layer by their usage, most used first, in place.

    Args:
        model: Any module with TokenFormer blocks. Build optimizers afterwards: the moments of an
            older one would belong to other pairs. A nested model becomes an ordinary one.
        usage: Usage that :func:`~tokenformer_vit.growth.measure_usage` returned for this model.

    Returns:
        ``model``, with the same outputs up to rounding.

    Raises:
        InputError: If the usage is of another model.
    """
    layers = whole_layers(model)
    check_usage(layers, usage)
    tokens = {name: select_pairs(layer, usage[name].order) for name, layer in layers.items()}
    write_tokens(model, tokens)
    return model


@torch.no_grad()
def nest(model: Model, sizes: Sequence[Size], usage: Mapping[str, Usage] | None = None) -> Model:
    """Give a trained model nested sizes, in place; train it afterwards at these sizes.

    ::

        usage = measure_usage(model, batches)
        nest(reorder(model, usage), (0.25, 0.5), usage)

    Args:
        model: Any module with TokenFormer blocks. Its outputs do not change; the sizes that it had
            are replaced. Build optimizers afterwards: a learned τ of a size is a new parameter.
        sizes: Sizes, as for ``model.set_size``. Empty for an ordinary model.
        usage: Usage by which :func:`reorder` has sorted the pairs. Then τ of a size is adapted as
            :func:`~tokenformer_vit.growth.prune` does; without it, τ is what ``set_size`` takes
            now.

    Returns:
        ``model``.

    Raises:
        InputError: If a size is out of range, a layer has more pairs in a smaller size, or the
            usage is of another model.
    """
    layers = whole_layers(model)
    if usage is not None:
        check_usage(layers, usage, reordered=True)
    names = {layer: name for name, layer in layers.items()}

    def tau_of(layer: Pattention, count: int) -> Tensor:
        if usage is not None:
            return adapted_tau(layer, usage[names[layer]], count)
        return layer.tau_of(count)

    models = [module for module in model.modules() if hasattr(module, "record_param_tokens")]
    for module in models or [model]:
        module.sizes = nest_layers(module, sizes, tau_of)  # type: ignore[assignment]
    record_counts(model)
    return model
