"""Let each input token read only the values of its strongest pairs."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import kind_of

from .tokens import pattention_layers


def set_top_k(
    model: nn.Module,
    qkv: int | float | None = None,
    proj: int | float | None = None,
    ffn: int | float | None = None,
) -> None:
    """Let each input token read only the values of the pairs with its largest weights.

    Θ still normalises over all pairs, and weights do not change; see
    :func:`tokenformer_vit.ops.pattention_top_k`. The setting is not saved with the model. It saves
    FLOPs (see :func:`tokenformer_vit.benchmarking.costs.model_costs`) but no time: gathering rows
    of values for each token takes longer than a dense product with as many FLOPs.

    Args:
        model: Any module with TokenFormer blocks, changed in place.
        qkv: Pairs to read in each query, key and value projection. An int is a number of pairs; a
            float in (0, 1] is a share of the pairs in use, rounded, at least one pair. None reads
            all pairs densely.
        proj: Pairs to read in each output projection.
        ffn: Pairs to read in each feed-forward layer.

    Raises:
        InputError: If a number is not whole, or it or a share is out of range. Then nothing is
            changed.
    """
    wanted = {"qkv": qkv, "proj": proj, "ffn": ffn}
    layers = pattention_layers(model)
    chosen = {name: _number(wanted[kind_of(name)], name, each) for name, each in layers.items()}
    for name, number in chosen.items():
        layers[name].top_k = number


def _number(wanted: int | float | None, name: str, layer: Pattention) -> int | None:
    if wanted is None:
        return None
    pairs = layer.num_used
    if isinstance(wanted, float):
        if not 0 < wanted <= 1:
            raise InputError(f"{name}: a share must be above 0 and at most 1, but it is {wanted}")
        return max(1, round(wanted * pairs))
    if isinstance(wanted, bool) or not isinstance(wanted, Integral) or not 1 <= wanted <= pairs:
        raise InputError(f"{name} cannot read {wanted!r} of {pairs} pairs; give 1 to {pairs}")
    return int(wanted)


@contextmanager
def top_k(
    model: nn.Module,
    qkv: int | float | None = None,
    proj: int | float | None = None,
    ffn: int | float | None = None,
) -> Iterator[None]:
    """Apply :func:`set_top_k` within a ``with`` block, then restore the former setting.

    Args:
        model: Any module with TokenFormer blocks.
        qkv: Pairs to read in each query, key and value projection.
        proj: Pairs to read in each output projection.
        ffn: Pairs to read in each feed-forward layer.

    Raises:
        InputError: In the cases of :func:`set_top_k`.
    """
    layers = pattention_layers(model).values()
    before = [layer.top_k for layer in layers]
    set_top_k(model, qkv, proj, ffn)
    try:
        yield
    finally:
        for layer, number in zip(layers, before, strict=True):
            layer.top_k = number
