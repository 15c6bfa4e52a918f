"""The Pattention layers of a model: their sizes, and the arguments that build them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import COUNTS, EPS


def kind_of(name: str, layer: Pattention) -> str:
    """Return the kind of a layer: its own, or else the last part of its name."""
    return layer.kind or name.rpartition(".")[2]


def find_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of a model by name, in its order."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Pattention)}


def check_not_fused(model: nn.Module) -> None:
    """Refuse a model with linear layers in place of linear tokens, which no argument describes."""
    ours = (m for m in model.modules() if isinstance(m, Attention | TokenFormerBlock))
    if any(isinstance(part, nn.Linear) for module in ours for part in module.children()):
        raise InputError(
            "the model is fused, and linear layers have no pairs: change or save it before "
            "reparameterize_model(), or save models.to_vit(model)"
        )


def set_size(model: nn.Module, size: float | None) -> None:
    """Use only the first pairs of every sized layer; it is not saved with the model.

    With gradient checkpointing, the backward pass needs the same size. The layers hold the size,
    so it is not thread-safe: give each thread a model of its own, by ``extract``.

    Args:
        model: Model with sizes; it has this function as a method, and ``sizes``.
        size: Share of the pairs of a layer, above 0 and at most 1; ``None`` for all pairs. It need
            not be one of ``sizes``.
    """
    check_not_fused(model)  # it keeps the size with which it was fused
    layers = find_layers(model).values()
    if size not in (None, 1) and any(layer.active is not None for layer in layers):
        raise InputError("a mask is in use: set a size outside of use_pairs()")
    for layer in layers:
        if layer.sized:
            layer.size = 1.0 if size is None else size


def check_not_recomputed(model: nn.Module) -> None:
    """Refuse a model whose backward pass would compute its blocks again, with other pairs."""
    # timm's, transformers' and our own.
    flags = ("grad_checkpointing", "gradient_checkpointing", "checkpoint_blocks")
    on = any(getattr(each, flag, False) for each in model.modules() for flag in flags)
    if on and model.training and torch.is_grad_enabled():
        raise InputError(
            "gradient checkpointing is on, and the backward pass needs the same size or mask: "
            "switch it off, or call set_size and change nothing until that has ended"
        )


@contextmanager
def at_size(model: nn.Module, size: float | None) -> Iterator[None]:
    """Use a model at a size within a ``with`` block, and at the former size after it."""
    check_not_recomputed(model)
    before = {layer: layer.size for layer in find_layers(model).values()}
    set_size(model, size)
    try:
        yield
    finally:
        for layer, own in before.items():
            layer.size = own


def nest_layers(
    model: nn.Module,
    nested: Sequence[float],
    kinds: Sequence[str] | None = None,
) -> None:
    """Replace the sizes of layers, by default of all kinds and with the τ () that they have now."""
    if not isinstance(nested, list | tuple) or not all(0 < size <= 1 for size in nested):
        raise InputError(f"nested must be a list of shares, such as (0.25, 0.5), not {nested!r}")
    layers = find_layers(model)
    found = {kind_of(name, layer) for name, layer in layers.items()}
    if unknown := {*(kinds or ())} - found:
        raise InputError(f"nested_kinds must be some of {sorted(found)}, but got {min(unknown)!r}")
    smaller = sorted({float(size) for size in nested} - {1.0})
    for name, layer in layers.items():
        layer.sized = kinds is None or kind_of(name, layer) in kinds
        layer.set_nested(smaller if layer.sized else [])


def model_sizes(model: nn.Module) -> tuple[float, ...]:
    """Return the trained sizes of a model, smallest first, then 1.0 for the whole model."""
    nested = next((each.nested for each in find_layers(model).values() if each.sized), ())
    return (*nested, 1.0)


def common(facts: Iterable[Any]) -> Any:
    """Return the fact that all layers share, or the list of their facts."""
    found = list(facts)
    return found[0] if all(each == found[0] for each in found) else found


def layer_arguments(model: Any, pattention_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a model that its layers know, as they are now.

    One value, a list by block where blocks differ, or a dict by kind where kinds differ. Of
    ``pattention_args``, the others are as given. A fused layer has no number of pairs: None.
    """
    by_block = {
        "qkv": [(block.attn.query, block.attn.key, block.attn.value) for block in model.blocks],
        "proj": [(block.attn.proj,) for block in model.blocks],
        "ffn": [(block.mlp,) for block in model.blocks],
    }

    def by_kind(read: Callable[[Any], Any]) -> dict[str, Any]:
        return {k: common(common(map(read, block)) for block in by_block[k]) for k in by_block}

    def one(read: Callable[[Any], Any]) -> Any:
        found = by_kind(read)
        return found["ffn"] if all(each == found["ffn"] for each in found.values()) else found

    now = {"eps": one(lambda layer: getattr(layer, "eps", EPS))}
    now |= {"bias": one(lambda layer: layer.bias is not None)}
    given = {"eps": EPS, "bias": False, **(pattention_args or {})}
    changed = {name: value for name, value in now.items() if value != given[name]}
    counts = by_kind(lambda layer: getattr(layer, "num_param_tokens", None))
    layers = find_layers(model)
    kinds = dict.fromkeys(kind_of(name, each) for name, each in layers.items() if each.sized)
    return {
        "theta": one(lambda layer: getattr(layer, "theta", "linear")),
        **{COUNTS[kind]: count for kind, count in counts.items()},
        "pattention_args": {**(pattention_args or {}), **changed} or None,
        "nested": model_sizes(model)[:-1],
        "nested_kinds": None if all(layer.sized for layer in layers.values()) else (*kinds,),
    }
