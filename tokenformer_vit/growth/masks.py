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
    """Count the pairs of each Pattention layer of a model, by layer name.

    Args:
        model: Any module with TokenFormer blocks.

    Raises:
        InputError: If the model has no Pattention layer.
    """
    return {name: layer.num_param_tokens for name, layer in pattention_layers(model).items()}


class TokenMasks:
    """Named subsets of a model's pairs, such as one for each language or task.

    ::

        masks = TokenMasks(model)
        masks.add("english")                       # all present pairs
        before = count_pairs(model)
        grow(model, 1024, 1024, 4096)
        masks.add_appended("french", before)
        with masks.use("english"):
            model(x)                               # as before growth
        with masks.use("english", "french"):
            model(x).sum().backward()              # uses the pairs of both
        torch.save(masks.pairs, "masks.pt")        # and TokenMasks(model, torch.load("masks.pt"))

    A mask removes the other pairs from their layers and keeps τ. Growth keeps τ as well. Therefore
    a mask of the pairs from before growth gives exactly the outputs from before growth, for every
    Θ, also for ``softmax`` without a gate. Multiplying other pairs by zero would be exact only for
    the GELU variants: under ``softmax`` a pair with score 0 still takes a share.

    Args:
        model: Any module with TokenFormer blocks. Masks set ``active`` of its layers; they do not
            hold parameters.
        pairs: Indices of pairs by name of mask and name of layer, to start with.

    Attributes:
        pairs: The masks: sorted int64 indices by name of mask and name of layer, on the CPU.

    Note:
        Inactive pairs get zero gradients, but an optimizer's momentum and weight decay still change
        them. Freeze pairs that must not change.
        ``prune`` and ``reorder`` give pairs other numbers: make the masks again afterwards.

    Source:
        This project. One mask for each task is the idea of PackNet, arXiv:1711.05769.
    """

    def __init__(
        self, model: nn.Module, pairs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._model, self._layers = model, pattention_layers(model)
        self.pairs: dict[str, dict[str, Tensor]] = {}
        for name, own in (pairs or {}).items():
            self.add(name, own)

    @property
    def names(self) -> list[str]:
        """Names of the masks, in the order in which they were added."""
        return list(self.pairs)

    def add(self, name: str, pairs: Mapping[str, Any] | None = None) -> None:
        """Add or replace a mask. It does not contain pairs that are appended later.

        Args:
            name: Name of the mask.
            pairs: What indexes the P pairs of each layer, by the layer's full name: a slice, a list
                or tensor of numbers, or a boolean tensor. Layers without an entry have no pairs in
                the mask. None for all present pairs.

        Raises:
            InputError: If a layer does not exist.
            IndexError: If a layer does not have the pairs.
        """
        if unknown := set(pairs or ()) - self._layers.keys():
            raise InputError(
                f"mask {name!r}: {min(unknown)!r} is not a Pattention layer of the model; give "
                "names of pattention_layers(model)"
            )
        own = {}
        for layer_name, layer in self._layers.items():
            chosen = slice(None) if pairs is None else pairs.get(layer_name, slice(0))
            if isinstance(chosen, list | tuple | range):
                chosen = torch.tensor(chosen, dtype=torch.long, device="cpu")
            every = torch.arange(layer.num_param_tokens, device="cpu")
            own[layer_name] = every[chosen].unique()
        self.pairs[name] = own

    def add_appended(self, name: str, before: Mapping[str, int]) -> None:
        """Add a mask of the pairs that growth appended.

        Args:
            name: Name of the mask.
            before: Counts that :func:`count_pairs` returned before growth.

        Raises:
            InputError: If ``before`` has other layers than the model, or no pair is new.
        """
        now = {layer: self._layers[layer].num_param_tokens for layer in self._layers}
        if now.keys() != before.keys() or not any(now[layer] > before[layer] for layer in now):
            raise InputError(
                f"mask {name!r}: the model has no more pairs than were counted before; call "
                "count_pairs(model) before growth and add_appended() after it"
            )
        self.add(name, {layer: slice(before[layer], None) for layer in now})

    def activate(self, *names: str) -> None:
        """Use only the pairs of some masks from now on; without names, use all pairs.

        With gradient checkpointing, do not call it between a forward pass and its backward pass,
        which computes the blocks again with the pairs that are active then.

        Args:
            names: Names of masks; a pair is active if it is in any of them.

        Raises:
            InputError: If a mask does not exist or is of a larger model, a layer would have no
                active pairs, or a size is set. Then nothing is changed.
        """
        active: dict[str, Tensor | None] = {}
        for layer_name, layer in self._layers.items():
            num, index = layer.num_param_tokens, None
            if names:
                masks = [self._mask(name)[layer_name] for name in names]
                index = torch.cat(masks).unique()
                if layer.size is not None:
                    raise InputError(
                        f"{layer_name} uses only its first {layer.size} pairs; call "
                        "model.set_size(None) before a mask is activated"
                    )
                if not len(index) or index[-1] >= num:
                    raise InputError(
                        f"masks {' and '.join(names)} choose "
                        + (f"pair {index[-1]}" if len(index) else "none")
                        + f" of the {num} pairs of {layer_name}; activate another mask with them, "
                        "and make masks again after pruning"
                    )
                if len(index) == num:
                    index = None
            active[layer_name] = index
        for layer_name, index in active.items():
            layer = self._layers[layer_name]
            layer.active = None if index is None else index.to(layer.key_param_tokens.device)

    def _mask(self, name: str) -> dict[str, Tensor]:
        if name not in self.pairs:
            raise InputError(f"there is no mask {name!r}; choose from {', '.join(self.names)}")
        return self.pairs[name]

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """Activate masks within a ``with`` block, then restore the former state.

        Args:
            names: Names of masks, as in :meth:`activate`.

        Raises:
            InputError: In the cases of :meth:`activate`, or if the model trains with gradient
                checkpointing: the backward pass may come after the ``with`` block, and would
                compute the blocks again with other pairs.
        """
        check_not_recomputed(self._model)
        before = {name: layer.active for name, layer in self._layers.items()}
        self.activate(*names)
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                layer.active = before[name]
