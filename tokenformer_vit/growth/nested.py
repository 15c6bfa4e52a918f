"""Some pairs of a trained model: nested sizes, small models made of it, and pairs for a while."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.models.sizes import check_not_recomputed, model_sizes, nest_layers, set_size

from .grow import common_share
from .prune import Usage, adapted_tau, check_usage
from .resize import (
    Model,
    counts_to_keep,
    pattention_layers,
    refresh_configs,
    select_pairs,
    unwrapped_layers,
    write_states,
)


@torch.no_grad()
def extract(
    model: Model,
    size: float | None = None,
    num_qkv_param_tokens: Counts | Mapping[str, Counts] = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
) -> Model:
    """Copy the first pairs of layers into a new model.

    Args:
        model: Any module with Pattention layers; it does not change.
        size: Size, as for ``model.set_size``, whether it was trained or not; or None, and instead
        num_qkv_param_tokens: Number of pairs to copy in each query, key and value projection, as in
            :func:`~tokenformer_vit.growth.grow`; None for all.
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.

    Returns:
        A model with the outputs of this size, on a CPU bit for bit. Of a size, it keeps the smaller
        trained sizes that are a share of its pairs.
    """
    if any(layer.active is not None for layer in unwrapped_layers(model).values()):
        raise InputError("a mask is in use: extract outside of use_pairs()")
    smaller = copy.deepcopy(model)
    layers, kept = pattention_layers(smaller), {}
    if size is None:
        counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
        wanted = counts_to_keep(layers, *counts)
        shares = dict.fromkeys(layers, 1.0)
        shares |= {name: n / layers[name].num_param_tokens for name, n in wanted.items()}
    else:
        set_size(smaller, size)
        shares = {name: layer.size for name, layer in layers.items()}
        sized = [layer for layer in layers.values() if layer.sized]
        for own in model_sizes(smaller)[:-1]:
            share = common_share((each.count_at(own), each.count_at(size)) for each in sized)
            if own < size and share not in (None, 1, *kept):
                kept[share] = own
    states = {}
    for name, layer in layers.items():
        state = select_pairs(layer, slice(layer.count_at(shares[name])))
        state = state._replace(tau=layer.tau_at(shares[name]))
        if kept and layer.sized:
            taus = torch.stack([*(layer.tau_at(own) for own in kept.values()), state.tau])
            state = state._replace(nested=tuple(kept), tau=taus)
        states[name] = state
    write_states(smaller, states)
    return smaller


@torch.no_grad()
def reorder(model: Model, usage: Mapping[str, Usage]) -> Model:
    """Sort the pairs of every layer by their :class:`Usage`, most used first, in place.

    Outputs stay up to rounding. The model is not nested afterwards; build optimizers anew.
    """
    layers = unwrapped_layers(model)
    check_usage(layers, usage)
    states = {name: select_pairs(layer, usage[name].order) for name, layer in layers.items()}
    write_states(model, states)
    return model


@torch.no_grad()
def nest(
    model: Model,
    sizes: Sequence[float],
    usage: Mapping[str, Usage] | None = None,
    kinds: Sequence[str] | None = None,
) -> Model:
    """Give a trained model nested sizes, in place; train it afterwards at these sizes.

    Args:
        model: Any module with Pattention layers. Its outputs stay; build optimizers anew.
        sizes: Shares, as for ``model.set_size``. Empty for an ordinary model.
        usage: Usage by which :func:`reorder` has sorted the pairs, to adapt τ of the sizes as
            :func:`~tokenformer_vit.growth.prune` does. None keeps what the sizes compute now.
        kinds: Kinds of layers that have sizes, such as ``["ffn"]``; None for all.
    """
    layers = unwrapped_layers(model)
    if usage is not None:
        check_usage(layers, usage)
    nest_layers(model, sizes, kinds)
    for name, layer in layers.items() if usage is not None else ():
        taus = [adapted_tau(layer, usage[name], layer.count_at(size)) for size in layer.nested]
        layer.set_nested(layer.nested, taus)
    refresh_configs(model)
    return model


@contextmanager
def use_pairs(model: nn.Module, pairs: Mapping[str, Any]) -> Iterator[None]:
    """Use only these pairs of layers within a ``with`` block, and those of before after it.

    The other pairs are as if removed, but τ stays. They get zero gradients; an optimizer's momentum
    and weight decay still change them, so freeze what must not change. Not thread-safe.

    Args:
        model: Any module with Pattention layers.
        pairs: What indexes the pairs of a layer, by the full name of the layer: a slice, integers,
            or a boolean tensor (P,). Layers that are not named use all pairs.
    """
    check_not_recomputed(model)
    layers, active = pattention_layers(model), {}
    for name, chosen in pairs.items():
        if name not in layers:
            raise InputError(f"{name!r} is no Pattention layer; give names of pattention_layers()")
        if layers[name].size != 1:
            raise InputError(f"{name} uses a size: call set_size(None) before you choose pairs")
        count, device = layers[name].num_param_tokens, layers[name].key_param_tokens.device
        active[name] = torch.arange(count, device="cpu")[chosen].unique().to(device)
        if not len(active[name]):
            raise InputError(f"no pair of {name} is chosen: give at least one of its {count}")
    before = {layer: layer.active for layer in layers.values()}
    for name, layer in layers.items():
        layer.active = active.get(name)
    try:
        yield
    finally:
        for layer, indices in before.items():
            layer.active = indices
