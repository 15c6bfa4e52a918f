"""Named subsets of a model's pairs, one for each task, switched on batch by batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.weights import read_checkpoint, write_tensors

from .tokens import kind_of, pattention_layers

__all__ = ["TokenMasks", "count_pairs"]

# What says which pairs of a layer are in a mask: anything that indexes a tensor of P entries.
Pairs = Any


def count_pairs(model: nn.Module) -> dict[str, int]:
    """Count the pairs of each Pattention layer of a model, by the layer's name.

    Args:
        model: Any module with TokenFormer blocks.

    Raises:
        InputError: If it has none.
    """
    return {name: layer.num_param_tokens for name, layer in pattention_layers(model).items()}


class TokenMasks:
    """Subsets of a model's pairs under names, such as one for each language or task.

    ::

        masks = TokenMasks(model)
        masks.add("english")                       # all pairs that the model has by now
        before = count_pairs(model)
        grow(model, 1024, 1024, 4096)
        masks.add_appended("french", before)
        with masks.use("english"):
            model(x)                               # as before growth
        with masks.use("english", "french"):
            model(x).sum().backward()              # gradients are those of both

    A mask leaves pairs out of their layers, rather than multiply them by zero, and keeps the
    layers' τ. With the pairs that a model had before growth, which keeps τ, it computes exactly
    what it did then, for every Θ, ``softmax`` without a gate included. (A factor of zero would be
    exact for the GELU variants alone: under ``softmax`` a pair of score 0 still takes its share.)

    Args:
        model: Any module with TokenFormer blocks. Masks hold neither the model's parameters nor
            its mode; they act on its layers' ``active``.

    Note:
        Other pairs than the active ones get gradients of zero. An optimiser's momentum and weight
        decay move them even so; pairs that must stay as they are have to be frozen.

    Source:
        This project's; masks of parts of a network, one a task, are those of PackNet,
        arXiv:1711.05769.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = pattention_layers(model)
        self._masks: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        """The names of the masks, in the order in which they were added."""
        return list(self._masks)

    def add(
        self,
        name: str,
        pairs: Mapping[str, Pairs] | Callable[[str, Pattention], Pairs] | None = None,
    ) -> None:
        """Add a mask, or replace it. Pairs that are appended later are not in it.

        Args:
            name: How it is called from now on.
            pairs: Which pairs are in it: for each layer something that indexes P entries (a slice,
                a list or tensor of indices, a boolean tensor), by the layer's full name or by its
                kind, ``qkv``, ``proj`` or ``ffn``, a layer without an entry having none; or a
                function of a layer's name and the layer that returns such a thing. None takes all
                pairs that there are.

        Raises:
            InputError: If there is no such layer, or an entry does not index its pairs.
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
                    f"mask {name!r} has no indices of the {layer.num_param_tokens} pairs of "
                    f"{layer_name} ({' '.join(str(error).split())})"
                ) from error
        self._masks[name] = masks

    def _lookup(self, name: str, chosen: Mapping[str, Pairs]) -> Callable[[str, Pattention], Pairs]:
        known = {*self._layers, *map(kind_of, self._layers)}
        if unknown := [key for key in chosen if key not in known]:
            raise InputError(
                f"mask {name!r}: {unknown[0]!r} is neither a kind (qkv, proj, ffn) nor a "
                "Pattention layer of the model"
            )
        return lambda layer, _: chosen.get(layer, chosen.get(kind_of(layer), []))

    def add_appended(self, name: str, before: Mapping[str, int]) -> None:
        """Add a mask of the pairs that growth appended.

        Args:
            name: How it is called from now on.
            before: What :func:`count_pairs` returned before growth.

        Raises:
            InputError: If a layer is not counted in ``before``, or no pair is new.
        """
        now = {layer: self._layers[layer].num_param_tokens for layer in self._layers}
        if now.keys() != before.keys() or not any(now[layer] > before[layer] for layer in now):
            raise InputError(
                f"mask {name!r}: the model has no pairs beyond those counted before; call "
                "count_pairs(model) before growth, and this behind it"
            )
        self.add(name, {layer: slice(before[layer], None) for layer in now})

    def activate(self, *names: str) -> None:
        """Let the pairs of some masks take part from now on, and no others; without a name, all.

        Args:
            names: Of masks, whose pairs are united.

        Raises:
            InputError: If there is no such mask, or a layer would be left without pairs, or with
                less than its ``top_k``. Nothing is changed then.
        """
        for name in names:
            if name not in self._masks:
                raise InputError(f"there is no mask {name!r}; there are {', '.join(self.names)}")
        chosen: dict[str, Tensor | None] = {}
        for layer_name, layer in self._layers.items():
            mask = torch.zeros(layer.num_param_tokens, dtype=torch.bool)
            for name in names:
                own = self._masks[name][layer_name]
                _check_size(own, layer, name, layer_name)
                mask[: len(own)] |= own
            count = int(mask.sum())
            if names and count < (layer.top_k or 1):
                raise InputError(
                    f"{' and '.join(names)}: {layer_name} has {count} active pairs, but needs at "
                    f"least {layer.top_k or 1}; use the mask together with another one"
                )
            everything = not names or count == len(mask)
            index = None if everything else mask.nonzero()[:, 0].to(layer.key_param_tokens.device)
            chosen[layer_name] = index
        for layer_name, index in chosen.items():
            self._layers[layer_name].active = index

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """Activate masks within a ``with`` block; behind it, what was active before is again.

        Args:
            names: As for :meth:`activate`.

        Raises:
            InputError: As :meth:`activate` does.
        """
        before = {name: layer.active for name, layer in self._layers.items()}
        self.activate(*names)
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                layer.active = before[name]

    def save(self, path: str | Path) -> None:
        """Write the masks as a safetensors file, whole or not at all.

        The file holds a (P,) boolean tensor for each mask and layer, under ``mask:layer``.

        Args:
            path: The file.

        Raises:
            OSError: If it cannot be written.
        """
        tensors = {
            f"{name}:{layer}": mask
            for name, masks in self._masks.items()
            for layer, mask in masks.items()
        }
        write_tensors(Path(path), tensors)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> "TokenMasks":
        """Read what :meth:`save` wrote.

        Args:
            path: The file.
            model: The model it is for; it may have grown since.

        Raises:
            InputError: If the file is missing or damaged, or is of another model.
        """
        path, masks = Path(path), cls(model)
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        tensors = read_checkpoint(path)["state_dict"]
        for key, mask in sorted(tensors.items()):  # a file has no order of its own
            name, _, layer_name = key.rpartition(":")
            layer = masks._layers.get(layer_name)
            if layer is None or mask.dtype != torch.bool or mask.dim() != 1:
                raise InputError(f"{path}: {key!r} is no mask of a layer of this model")
            _check_size(mask, layer, name, layer_name)
            masks._masks.setdefault(name, {})[layer_name] = mask
        for name, own in masks._masks.items():
            if missing := masks._layers.keys() - own.keys():
                raise InputError(
                    f"{path}: mask {name!r} says nothing of {min(missing)}; the file is of another "
                    "model"
                )
        return masks


def _all(name: str, layer: Pattention) -> Pairs:
    return slice(None)


def _mask(index: Pairs, num: int) -> Tensor:
    """Turn what indexes P pairs into a (P,) boolean tensor."""
    mask = torch.zeros(num, dtype=torch.bool)
    if not isinstance(index, slice):
        index = torch.as_tensor(index).cpu()
        if not index.numel():  # an empty list becomes a tensor of floats, which indexes nothing
            return mask
    mask[index] = True
    return mask


def _check_size(mask: Tensor, layer: Pattention, name: str, layer_name: str) -> None:
    if len(mask) > layer.num_param_tokens:
        raise InputError(
            f"mask {name!r} is for {len(mask)} pairs of {layer_name}, which has "
            f"{layer.num_param_tokens}: it is of another model, or of before pairs were taken away"
        )
