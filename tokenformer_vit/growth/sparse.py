"""A trained model reads only the values of each input token's strongest pairs."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention

from .tokens import kind_of, pattention_layers

__all__ = ["set_top_k", "top_k"]


def set_top_k(
    model: nn.Module,
    qkv: int | float | None = None,
    proj: int | float | None = None,
    ffn: int | float | None = None,
) -> None:
    """Let every input token read the values of so many pairs of a layer, those it weighs most.

    Θ still normalises over all pairs, so that weights are those of the dense layer: see
    :func:`tokenformer_vit.ops.pattention_top_k`. It is not saved with the model. The FLOPs that it
    saves are not time: rows of values are gathered for each token, which takes longer than a
    dense product of as many FLOPs. (:func:`tokenformer_vit.benchmarking.costs.model_costs` counts
    them.)

    Args:
        model: Any module with TokenFormer blocks, changed in place.
        qkv: Pairs that are read in each query, key and value projection: a number of them (int),
            or a share of those that take part (float, in (0, 1], rounded, at least one pair). None
            reads all, densely.
        proj: So in the output projections.
        ffn: So in the feed-forward layers.

    Raises:
        InputError: If a number or a share is out of its range. Nothing is changed then.
    """
    wanted = {"qkv": qkv, "proj": proj, "ffn": ffn}
    layers = pattention_layers(model)
    chosen = {name: _number(wanted[kind_of(name)], name, each) for name, each in layers.items()}
    for name, number in chosen.items():
        layers[name].top_k = number


def _number(wanted: int | float | None, name: str, layer: Pattention) -> int | None:
    if wanted is None:
        return None
    pairs = _num_active(layer)
    if isinstance(wanted, float):
        if not 0 < wanted <= 1:
            raise InputError(f"{name}: a share of pairs is above 0 and at most 1, but not {wanted}")
        return max(1, round(wanted * pairs))
    if not 1 <= wanted <= pairs:
        raise InputError(f"{name}: {wanted} of {pairs} pairs cannot be read; give 1 to {pairs}")
    return wanted


@contextmanager
def top_k(
    model: nn.Module,
    qkv: int | float | None = None,
    proj: int | float | None = None,
    ffn: int | float | None = None,
) -> Iterator[None]:
    """Do what :func:`set_top_k` does within a ``with`` block, and undo it behind it.

    Args:
        model: As for :func:`set_top_k`, and so the others.
        qkv: As said.
        proj: As said.
        ffn: As said.

    Raises:
        InputError: As :func:`set_top_k` does.
    """
    layers = pattention_layers(model).values()
    before = [layer.top_k for layer in layers]
    set_top_k(model, qkv, proj, ffn)
    try:
        yield
    finally:
        for layer, number in zip(layers, before, strict=True):
            layer.top_k = number


def _num_active(layer: Pattention) -> int:
    return layer.num_param_tokens if layer.active is None else len(layer.active)
