"""Use only some pairs of a model, such as those of one task, for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.sizes import check_not_recomputed

from .resize import pattention_layers


def count_pairs(model: nn.Module) -> dict[str, int]:
    """Count the pairs of each Pattention layer of a model, by layer name."""
    return {name: layer.num_param_tokens for name, layer in pattention_layers(model).items()}


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
