"""Sizes of a model: how many of its first pairs each Pattention layer uses.

A size is a share of the pairs of every layer, or a dict by kind of layer or by layer name. In a
dict an int is a number of pairs, a float is a share, and other layers use all pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention

# The kind of a layer, which has its own count of pairs, by the last part of the layer's name.
KINDS = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "mlp": "ffn"}

Size = float | Mapping[str, float]


def kind_of(name: str) -> str:
    """Return the kind of a layer: ``qkv``, ``proj`` or ``ffn``.

    Args:
        name: Full name of a Pattention layer in a model.

    Raises:
        InputError: If no layer of a TokenFormer block has this name.
    """
    last = name.rpartition(".")[2]
    if last not in KINDS:
        raise InputError(
            f"the Pattention layer {name!r} has no kind; the layers of a TokenFormer block are "
            f"{', '.join(KINDS)}"
        )
    return KINDS[last]


def find_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of a model by name, in its order."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Pattention)}


def size_counts(layers: Mapping[str, Pattention], size: Size | None) -> dict[str, int]:
    """Return the number of pairs that each layer uses in a size.

    Args:
        layers: Layers of a model by name.
        size: Size of the model; ``None`` for all pairs.

    Raises:
        InputError: If a share or a number of pairs is out of range, or no layer has a given name.
    """
    by_name: Mapping[str, Any] = size if isinstance(size, Mapping) else {}
    for name in by_name:
        if name not in layers and name not in KINDS.values():
            raise InputError(
                f"size has the key {name!r}, which is neither a Pattention layer of the model nor "
                "one of qkv, proj and ffn"
            )
    every = 1.0 if size is None or isinstance(size, Mapping) else size
    if isinstance(every, int):
        every = float(every)
    return {
        name: _count(name, layer, by_name.get(name, by_name.get(kind_of(name), every)))
        for name, layer in layers.items()
    }


def _count(name: str, layer: Pattention, wanted: Any) -> int:
    pairs = layer.num_param_tokens
    if isinstance(wanted, int) and 1 <= wanted <= pairs:
        return wanted
    if isinstance(wanted, float) and 0 < wanted <= 1:
        return max(1, round(wanted * pairs))
    raise InputError(
        f"{name} cannot use {wanted!r} of its {pairs} pairs; give a share above 0 and at most 1, "
        f"or in a dict a whole number from 1 to {pairs}"
    )


def set_size(model: nn.Module, size: Size | None) -> None:
    """Let every Pattention layer of a model use only its first pairs, as views of all pairs.

    Args:
        model: Module with TokenFormer blocks. The size is not saved with it.
        size: Size of the model, of those that were trained or any other; ``None`` for all pairs.

    Raises:
        InputError: If the size is out of range, or a mask is active. Then nothing is changed.
    """
    layers = find_layers(model)
    counts = size_counts(layers, size)
    for name, layer in layers.items():
        layer.check_size(counts[name])
    for name, layer in layers.items():
        layer.size = counts[name]


def check_not_recomputed(model: nn.Module) -> None:
    """Check that no backward pass will compute the blocks again, perhaps with other pairs.

    Raises:
        InputError: If the model trains with gradient checkpointing.
    """
    if not (model.training and torch.is_grad_enabled()):
        return
    # timm's, transformers' and our own.
    flags = ("grad_checkpointing", "gradient_checkpointing", "checkpoint_blocks")
    if any(getattr(each, flag, False) for each in model.modules() for flag in flags):
        raise InputError(
            "gradient checkpointing is on, and the backward pass would compute the blocks again "
            "with the size or mask of that moment: switch it off, or call set_size or activate "
            "before the forward pass and change nothing until the backward pass has ended"
        )


@contextmanager
def at_size(model: nn.Module, size: Size | None) -> Iterator[None]:
    """Use a model at a size within a ``with`` block, and with all pairs after it.

    Args:
        model: Module with TokenFormer blocks.
        size: Size, as for :func:`set_size`.

    Raises:
        InputError: In the cases of :func:`set_size`, and of :func:`check_not_recomputed`.
    """
    check_not_recomputed(model)
    set_size(model, size)
    try:
        yield
    finally:
        set_size(model, None)


def nest_layers(
    model: nn.Module,
    nested: Sequence[Size],
    tau_of: Callable[[Pattention, int], Tensor] | None = None,
) -> tuple[Size, ...]:
    """Give the layers of a model its nested sizes.

    Args:
        model: Model whose layers may have other nested sizes, which are replaced.
        nested: Sizes smaller than the model, in any order; the whole model may be among them.
        tau_of: Function that returns τ of a layer for a number of pairs; ``None`` for a new model.

    Returns:
        The sizes, smallest first; the last one is 1.0, the whole model.

    Raises:
        InputError: If a size is out of range, or a layer has more pairs in a smaller size. Then
            nothing is changed.
    """
    layers = find_layers(model)
    if isinstance(nested, str | Mapping) or not isinstance(nested, Sequence) or None in nested:
        raise InputError(f"nested must be a list of sizes, such as (0.25, 0.5), but got {nested!r}")
    counted = [(size_counts(layers, size), size) for size in nested if size != 1]
    counted.sort(key=lambda each: sum(each[0].values()))
    numbers = {name: [counts[name] for counts, _ in counted] for name in layers}
    for name, layer in layers.items():
        layer.check_order(numbers[name])
    for name, layer in layers.items():
        tau = None
        if tau_of is not None and counted:
            tau = torch.stack([tau_of(layer, number) for number in numbers[name]])
        layer.set_nested(numbers[name], tau)
    return (*(size for _, size in counted), 1.0)


def nested_sizes(model: nn.Module, known: Sequence[Size] = ()) -> tuple[Size, ...]:
    """Read the trained sizes of a model from its layers.

    Args:
        model: Model whose layers may have other nested sizes than when it was built.
        known: Sizes to prefer.

    Returns:
        The sizes, smallest first, each in its shortest form; the last one is 1.0.
    """
    layers = find_layers(model)
    number = min((len(layer.nested) for layer in layers.values()), default=0)
    counted = [{name: layers[name].nested[i] for name in layers} for i in range(number)]
    return (*(_shortest(layers, counts, known) for counts in counted), 1.0)


def _shortest(
    layers: Mapping[str, Pattention], counts: Mapping[str, int], known: Sequence[Size]
) -> Size:
    shares = {counts[name] / layers[name].num_param_tokens: None for name in layers}
    kinds = {kind_of(name): counts[name] for name in layers}
    for size in (*known, *shares, kinds):
        try:
            if size_counts(layers, size) == counts:
                return size
        except InputError:  # a known size may be of more pairs than a layer has now
            continue
    return dict(counts)
