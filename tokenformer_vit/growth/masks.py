"""Named subsets of a model's pairs, such as one for each task, to switch between batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import check_not_recomputed, kind_of

from .tokens import pattention_layers, trained_later

# Anything that can index a tensor of P entries, one for each pair.
Pairs = Any


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

    A mask removes the other pairs from their layers and keeps τ. Growth keeps τ as well. Therefore
    a mask of the pairs from before growth gives exactly the outputs from before growth, for every
    Θ, also for ``softmax`` without a gate. Multiplying other pairs by zero would be exact only for
    the GELU variants: under ``softmax`` a pair with score 0 still takes a share.

    Args:
        model: Any module with TokenFormer blocks. Masks set ``active`` of its layers; they do not
            hold parameters.

    Note:
        Inactive pairs get zero gradients, but an optimizer's momentum and weight decay still change
        them. Freeze pairs that must not change.
        ``prune`` and ``reorder`` give pairs other numbers: make the masks again afterwards.

    Source:
        This project. One mask for each task is the idea of PackNet, arXiv:1711.05769.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._layers = model, pattention_layers(model)
        self._masks: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the masks, in the order in which they were added."""
        return list(self._masks)

    def add(
        self,
        name: str,
        pairs: Mapping[str, Pairs] | Callable[[str, Pattention], Pairs] | None = None,
    ) -> None:
        """Add or replace a mask. It does not contain pairs that are appended later.

        Args:
            name: Name of the mask.
            pairs: Pairs in the mask; None for all present pairs. A mapping has an index for each
                layer, by its full name or its kind (``qkv``, ``proj`` or ``ffn``): a slice, a list
                or tensor of indices, or a boolean tensor of P entries. Layers without an index have
                no pairs in the mask. A function gets the name of a layer and the layer, and returns
                an index.

        Raises:
            InputError: If a layer does not exist, or an entry does not index its pairs.
        """
        if pairs is None:
            pairs = _all
        elif isinstance(pairs, Mapping):
            pairs = self._lookup(name, pairs)
        masks = {}
        for layer_name, layer in self._layers.items():
            try:
                masks[layer_name] = _mask(pairs(layer_name, layer), layer.num_param_tokens)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                raise InputError(
                    f"mask {name!r} does not index the {layer.num_param_tokens} pairs of "
                    f"{layer_name} ({one_line(error)}); give a slice, numbers of pairs, or a "
                    "boolean tensor with an entry for each pair"
                ) from error
        self._masks[name] = masks

    def _lookup(self, name: str, chosen: Mapping[str, Pairs]) -> Callable[[str, Pattention], Pairs]:
        known = {*self._layers, *map(kind_of, self._layers)}
        if unknown := [key for key in chosen if key not in known]:
            raise InputError(
                f"mask {name!r}: {unknown[0]!r} is not a Pattention layer of the model; give its "
                "full name, or a kind: qkv, proj or ffn"
            )
        return lambda layer, _: chosen.get(layer, chosen.get(kind_of(layer), []))

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

    @trained_later
    def activate(self, *names: str) -> None:
        """Use only the pairs of some masks from now on; without names, use all pairs.

        With gradient checkpointing, do not call it between a forward pass and its backward pass,
        which computes the blocks again with the pairs that are active then.

        Args:
            names: Names of masks; a pair is active if it is in any of them.

        Raises:
            InputError: If a mask does not exist, a layer would have no active pair, or a size is
                set. Then nothing is changed.
        """
        for name in names:
            if name not in self._masks:
                raise InputError(f"there is no mask {name!r}; choose from {', '.join(self.names)}")
        chosen: dict[str, Tensor | None] = {}
        for layer_name, layer in self._layers.items():
            if names and layer.size is not None:
                raise InputError(
                    f"{layer_name} uses only its first {layer.size} pairs; call "
                    "model.set_size(None) before a mask is activated"
                )
            mask = torch.zeros(layer.num_param_tokens, dtype=torch.bool, device="cpu")
            for name in names:
                own = self._masks[name][layer_name]
                _check_size(own, layer, name, layer_name)
                mask[: len(own)] |= own
            count = int(mask.sum())
            if names and not count:
                raise InputError(
                    f"masks {' and '.join(names)} leave 0 active pairs in {layer_name}: activate "
                    "another mask with them"
                )
            everything = not names or count == len(mask)
            index = None if everything else mask.nonzero()[:, 0].to(layer.key_param_tokens.device)
            chosen[layer_name] = index
        for layer_name, index in chosen.items():
            self._layers[layer_name].active = index

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

    def save(self, path: str | Path) -> None:
        """Write the masks as a safetensors file, whole or not at all.

        The file has one (P,) boolean tensor for each mask and layer, named ``mask:layer``.

        Args:
            path: File to write.

        Raises:
            OSError: If it cannot be written.
        """
        tensors = {
            f"{name}:{layer}": mask
            for name, masks in self._masks.items()
            for layer, mask in masks.items()
        }
        save_file(tensors, path)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> "TokenMasks":
        """Read masks that :meth:`save` wrote.

        Args:
            path: File to read.
            model: Model of the masks; it may have grown since they were saved.

        Raises:
            InputError: If the file is missing or damaged, or belongs to another model.
        """
        path, masks = Path(path), cls(model)
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        tensors = load_file(path)
        for key, mask in sorted(tensors.items()):  # a file has no order
            name, _, layer_name = key.rpartition(":")
            layer = masks._layers.get(layer_name)
            if layer is None or mask.dtype != torch.bool or mask.dim() != 1:
                raise InputError(
                    f"{path}: {key!r} is not a mask of this model; give the model of the masks"
                )
            _check_size(mask, layer, name, layer_name)
            masks._masks.setdefault(name, {})[layer_name] = mask
        for name, own in masks._masks.items():
            if missing := masks._layers.keys() - own.keys():
                raise InputError(
                    f"{path}: mask {name!r} has no entry for {min(missing)}; the file belongs to "
                    "another model: give that model"
                )
        return masks


def _all(name: str, layer: Pattention) -> Pairs:
    return slice(None)


def _mask(index: Pairs, num: int) -> Tensor:
    """Turn an index of P pairs into a (P,) boolean tensor."""
    mask = torch.zeros(num, dtype=torch.bool, device="cpu")
    if not isinstance(index, slice):
        index = torch.as_tensor(index, device="cpu")
        if not index.numel():  # an empty list becomes a float tensor, which cannot index
            return mask
    mask[index] = True
    return mask


def _check_size(mask: Tensor, layer: Pattention, name: str, layer_name: str) -> None:
    if len(mask) > layer.num_param_tokens:
        raise InputError(
            f"mask {name!r} has {len(mask)} pairs for {layer_name}, which has only "
            f"{layer.num_param_tokens}: give the model of the mask, before any pruning"
        )
