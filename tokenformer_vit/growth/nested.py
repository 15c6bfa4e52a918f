"""Nested sizes of a trained model: make a small model of one, or make them of an ordinary model."""

import copy
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import Size, nest_layers, set_size, size_counts

from .prune import Usage, adapted_tau, check_usage, kept_pairs
from .tokens import (
    Change,
    LayerTokens,
    check_rebuildable,
    check_unmasked,
    find_models,
    mark_replaced,
    pattention_layers,
    read_tokens,
    record_counts,
    trained_later,
    write_tokens,
)

Model = TypeVar("Model", bound=nn.Module)


@trained_later
@torch.no_grad()
def extract(model: Model, size: Size) -> Model:
    """Copy the first pairs of every layer into a new, ordinary model.

    Args:
        model: Any module with TokenFormer blocks; it does not change.
        size: Size, as for ``model.set_size``, whether it was trained or not.

    Returns:
        A model without the other pairs, saved and exported like any other. On a CPU its outputs
        equal those of ``model.set_size(size)`` bit for bit. It keeps the smaller trained sizes.

    Raises:
        InputError: If the size is out of range, query, key and value of a block would differ in
            their number of pairs, a mask is active, or ``model`` is only a part of a model.
    """
    layers = pattention_layers(model)
    check_rebuildable(model, layers)
    check_unmasked(layers)
    counts = size_counts(layers, size)
    for name, count in counts.items():
        block, _, last = name.rpartition(".")
        if last in ("key", "value") and counts.get(f"{block}.query", count) != count:
            raise InputError(
                f"{name} would keep {count} pairs and {block}.query {counts[f'{block}.query']}: "
                "give query, key and value of a block the same number"
            )
    smaller = copy.deepcopy(model)
    set_size(smaller, size)
    layers = pattention_layers(smaller)
    # Sizes of a model have the same index in all layers.
    fitting = min(bisect_right(layer.nested, layer.num_used) for layer in layers.values())
    if fitting and all(layer.nested[fitting - 1] == layer.num_used for layer in layers.values()):
        fitting -= 1  # the whole of the new model
    for layer in layers.values():
        keys, values, gate, tau = layer.used_tokens()
        nested = layer.nested[:fitting]
        nested_tau = torch.stack([layer.tau_of(each) for each in nested]) if nested else None
        write_tokens(layer, LayerTokens(keys, values, tau, gate, nested, nested_tau))
    record_counts(smaller)
    return smaller


@trained_later
@torch.no_grad()
def reorder(model: Model, usage: Mapping[str, Usage]) -> Model:
    """Sort the pairs of every layer by their usage, most used first, in place.

    Args:
        model: Any module with TokenFormer blocks. Its Pattention parameters become new objects, as
            in :func:`~tokenformer_vit.growth.prune`. A nested model becomes an ordinary one.
        usage: Usage that :func:`~tokenformer_vit.growth.measure_usage` returned for this model.

    Returns:
        ``model``, with the same outputs up to rounding.

    Raises:
        InputError: If the usage is of another model, or ``model`` is only a part of a model.
    """
    layers = pattention_layers(model)
    check_rebuildable(model, layers)
    check_usage(layers, usage)
    for name, layer in layers.items():
        tokens = read_tokens(layer)
        order = usage[name].order.to(tokens.keys.device)
        gate = None if tokens.gate is None else tokens.gate[order]
        write_tokens(layer, LayerTokens(tokens.keys[order], tokens.values[order], tokens.tau, gate))
    record_counts(model)
    return model


@trained_later
@torch.no_grad()
def nest(model: Model, sizes: Sequence[Size], usage: Mapping[str, Usage] | None = None) -> Model:
    """Give a trained model nested sizes, in place; train it afterwards at these sizes.

    ::

        usage = measure_usage(model, batches)
        nest(reorder(model, usage), (0.25, 0.5), usage)

    Args:
        model: Any module with TokenFormer blocks. Its outputs do not change. The sizes that it had
            are replaced. If τ is learned and there are sizes, τ of the model and of each size
            become new parameters. Build optimizers afterwards: a step of one that holds a τ from
            before raises InputError.
        sizes: Sizes, as for ``model.set_size``. Empty for an ordinary model.
        usage: Usage by which :func:`reorder` has sorted the pairs. Then τ of a size is adapted as
            :func:`~tokenformer_vit.growth.prune` does; without it, τ is what ``set_size`` takes
            now.

    Returns:
        ``model``.

    Raises:
        InputError: If a size is out of range, a layer has more pairs in a smaller size, the usage
            is of another model, or ``model`` is only a part of a model. Then nothing is changed.
    """
    layers = pattention_layers(model)
    check_rebuildable(model, layers)
    if usage is not None:
        check_usage(layers, usage)
    names = {layer: name for name, layer in layers.items()}

    def tau_of(layer: Pattention, count: int) -> Tensor:
        if usage is not None:
            own = usage[names[layer]]
            return adapted_tau(layer, own.shares[kept_pairs(own, count)].sum().item())
        return layer.tau_of(count)

    before = [layer.nested_tau for layer in layers.values()]
    for module in find_models(model) or [model]:
        module.sizes = nest_layers(module, sizes, tau_of)  # type: ignore[assignment]
    old = [each for each in before if isinstance(each, nn.Parameter)]
    old += _replace_taus(layers.values())
    mark_replaced([Change(tuple(old), ())])
    record_counts(model)
    return model


def _replace_taus(layers: Iterable[Pattention]) -> list[nn.Parameter]:
    """Replace the learned τ of layers with nested sizes by copies, and return the old ones.

    An older optimizer, which would not train the new τ of the sizes, is then known by these.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for layer in layers:
        tau = layer.tau
        if layer.nested and isinstance(tau, nn.Parameter) and tau.requires_grad:
            if tau not in copies:  # layers may share one
                copies[tau] = nn.Parameter(tau.detach().clone())
                copies[tau].grad = tau.grad
            layer.tau = copies[tau]
    return list(copies)


def keep_size(grown: LayerTokens, before: LayerTokens) -> LayerTokens:
    """Add the pairs and τ from before growth to the nested sizes of a layer.

    Args:
        grown: Tensors of the layer after growth; the first pairs are the old ones.
        before: Tensors of the layer before growth.
    """
    taus = [] if before.nested_tau is None else [before.nested_tau]
    nested_tau = torch.cat([*taus, before.tau.reshape(1)])
    return replace(grown, nested=(*before.nested, before.num), nested_tau=nested_tau)
