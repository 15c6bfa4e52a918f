"""Nested sizes of a trained model: make a small model of one, or make them of an ordinary model."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.models.sizes import model_sizes, nest_layers, set_size

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
    layers, kept = pattention_layers(smaller), []
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
            if own < size and share not in (None, 1, *(known for _, known in kept)):
                kept.append((own, share))
    states = {}
    for name, layer in layers.items():
        state = select_pairs(layer, slice(layer.count_at(shares[name])))
        state = state._replace(tau=layer.tau_at(shares[name]))
        if kept and layer.sized:
            taus = torch.stack([*(layer.tau_at(own) for own, _ in kept), state.tau])
            state = state._replace(nested=tuple(share for _, share in kept), tau=taus)
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

    def adapted(name: str, layer: Pattention, size: float) -> Tensor:
        return adapted_tau(layer, usage[name], layer.count_at(size))  # type: ignore[index]

    if usage is not None:
        check_usage(layers, usage)
    nest_layers(model, sizes, kinds, adapted if usage is not None else None)
    refresh_configs(model)
    return model
