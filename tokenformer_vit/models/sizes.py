"""Sizes of a model: how many of its first pairs each Pattention layer uses.

A size is a share of the pairs of every layer, or a dict by kind of layer (``qkv``, ``proj``,
``ffn``). In a dict an int is a number of pairs, a float is a share, and other layers use all pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention

# The kind of a layer, which has its own count of pairs, by the last part of the layer's name.
KINDS = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "mlp": "ffn"}

Size = float | Mapping[str, float]


def kind_of(name: str) -> str:
    """Return the kind of the layer with this full name."""
    return KINDS[name.rpartition(".")[2]]


def find_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of a model by name, in its order."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Pattention)}


def size_counts(layers: Mapping[str, Pattention], size: Size | None) -> dict[str, int]:
    """Return the number of pairs that each layer uses in a size; ``None`` is the whole model."""
    chosen: Mapping[str, float] = size if isinstance(size, Mapping) else {}
    every: Any = 1.0 if size is None or size is chosen else size
    if isinstance(every, int):
        every = float(every)  # outside a dict, 1 is the share of all pairs
    for name in chosen.keys() - KINDS.values() - layers.keys():
        raise InputError(f"size has the key {name!r}, which is none of qkv, proj and ffn")
    counts: dict[str, int] = {}
    for name, layer in layers.items():
        pairs = layer.num_param_tokens
        # nested_sizes gives a number by layer name where the layers of a kind differ.
        wanted = chosen.get(name, chosen.get(kind_of(name), every))
        if isinstance(wanted, float) and 0 < wanted <= 1:
            wanted = max(1, round(wanted * pairs))
        if not isinstance(wanted, int) or not 1 <= wanted <= pairs:
            raise InputError(
                f"{name} cannot use {wanted!r} of its {pairs} pairs; give a share above 0 and at "
                f"most 1, or in a dict a whole number from 1 to {pairs}"
            )
        counts[name] = wanted
    return counts


def set_size(model: nn.Module, size: Size | None) -> None:
    """Let every layer use only its first pairs, as views of all pairs; ``None`` for all pairs."""
    layers = find_layers(model)
    for name, count in size_counts(layers, size).items():
        layers[name].size = count


def check_not_recomputed(model: nn.Module) -> None:
    """Refuse a model whose backward pass would compute its blocks again, with other pairs."""
    # timm's, transformers' and our own.
    flags = ("grad_checkpointing", "gradient_checkpointing", "checkpoint_blocks")
    on = any(getattr(each, flag, False) for each in model.modules() for flag in flags)
    if on and model.training and torch.is_grad_enabled():
        raise InputError(
            "gradient checkpointing is on, and the backward pass needs the same size or mask: "
            "switch it off, or call set_size or activate and change nothing until that has ended"
        )


@contextmanager
def at_size(model: nn.Module, size: Size | None) -> Iterator[None]:
    """Use a model at a size within a ``with`` block, and with all pairs after it."""
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
    """Replace the nested sizes, return them with 1.0 at the end; τ is ``tau_of``, or scaled."""
    layers = find_layers(model)
    if isinstance(nested, str | Mapping) or not isinstance(nested, Sequence) or None in nested:
        raise InputError(f"nested must be a list of sizes, such as (0.25, 0.5), but got {nested!r}")
    counted = [(size_counts(layers, size), size) for size in nested if size != 1]
    counted.sort(key=lambda each: sum(each[0].values()))
    numbers = {name: [counts[name] for counts, _ in counted] for name in layers}
    for name, layer in layers.items():
        layer.check_order(numbers[name])  # before anything changes
    for name, layer in layers.items():
        taus = [tau_of(layer, number) for number in numbers[name]] if tau_of else []
        layer.set_nested(numbers[name], torch.stack(taus) if taus else None)
    return (*(size for _, size in counted), 1.0)


def nested_sizes(model: nn.Module, known: Sequence[Size] = ()) -> tuple[Size, ...]:
    """Read the trained sizes of a model from its layers, in the words of ``known`` if they fit."""
    layers = find_layers(model)
    sizes: list[Size] = []
    for index in range(min((len(each.nested) for each in layers.values()), default=0)):
        counts = {name: each.nested[index] for name, each in layers.items()}
        shares = {counts[name] / layers[name].num_param_tokens for name in layers}
        by_kind = {kind_of(name): counts[name] for name in layers}
        for size in (*known, *shares, by_kind, counts):
            with suppress(InputError):  # a known size may be of more pairs than a layer has now
                if size_counts(layers, size) == counts:
                    sizes.append(size)
                    break
    return (*sizes, 1.0)
