"""Named subsets of a model's pairs, such as one for each task, to switch between batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.sizes import check_not_recomputed

from .resize import pattention_layers


def count_pairs(model: nn.Module) -> dict[str, int]:
    """Count the pairs of each Pattention layer of a model, by layer name."""
    return {name: layer.num_param_tokens for name, layer in pattention_layers(model).items()}


class TokenMasks:
    """Named subsets of a model's pairs, such as one for each language or task.

    A mask removes the other pairs from their layers and keeps τ. They get zero gradients, but an
    optimizer's momentum and weight decay still change them: freeze what must not change. ``prune``
    and ``reorder`` give pairs other numbers.

    Args:
        model: Any module with TokenFormer blocks. Masks set ``active`` of its layers.
        pairs: Masks to start with, as in the attribute.

    Attributes:
        pairs: (n,) sorted indices of each mask in each layer, by the names of mask and layer.
    """

    def __init__(
        self, model: nn.Module, pairs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._model, self._layers = model, pattention_layers(model)
        self.pairs: dict[str, dict[str, Tensor]] = {}
        for name, own in (pairs or {}).items():
            self.add(name, own)

    def add(self, name: str, pairs: Mapping[str, Any] | None = None) -> None:
        """Add or replace a mask of all present pairs, or of those that ``pairs`` chooses.

        It has what indexes the pairs of a layer by the layer's full name: a slice, a tensor of
        numbers, or a boolean tensor. Other layers have no pairs in the mask.
        """
        if unknown := set(pairs or ()) - self._layers.keys():
            raise InputError(
                f"mask {name!r}: {min(unknown)!r} is not a Pattention layer of the model; give "
                "names of pattention_layers(model)"
            )
        self.pairs[name] = {}
        for layer, count in count_pairs(self._model).items():
            chosen = slice(None) if pairs is None else pairs.get(layer, slice(0))
            self.pairs[name][layer] = torch.arange(count, device="cpu")[chosen].unique()

    def add_appended(self, name: str, before: Mapping[str, int]) -> None:
        """Add a mask of the pairs that growth appended to these :func:`count_pairs`."""
        if count_pairs(self._model) == before:
            raise InputError(f"no pair is new for mask {name!r}; call count_pairs() before growth")
        self.add(name, {layer: slice(count, None) for layer, count in before.items()})

    def activate(self, *names: str) -> None:
        """Use only the pairs of these masks from now on; without names, use all pairs."""
        if unknown := set(names) - self.pairs.keys():
            known = ", ".join(self.pairs)
            raise InputError(f"there is no mask {min(unknown)!r}; choose from {known}")
        active: dict[str, Tensor | None] = dict.fromkeys(self._layers)
        for name, layer in self._layers.items() if names else ():
            index = torch.cat([self.pairs[mask][name] for mask in names]).unique()
            if layer.size is not None:
                raise InputError(
                    f"{name} uses only its first {layer.size} pairs; call model.set_size(None) "
                    "before a mask is activated"
                )
            have = layer.num_param_tokens
            if not len(index) or index[-1] >= have:
                what = f"pair {index[-1]} of" if len(index) else "no pair of the"
                raise InputError(
                    f"masks {' and '.join(names)} choose {what} {have} in {name}; activate another "
                    "mask with them, and make masks again after pruning"
                )
            if len(index) < have:
                active[name] = index.to(layer.key_param_tokens.device)
        for name, index in active.items():
            self._layers[name].active = index

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """Activate masks within a ``with`` block, then restore the former state."""
        check_not_recomputed(self._model)
        before = {name: layer.active for name, layer in self._layers.items()}
        self.activate(*names)
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                layer.active = before[name]
