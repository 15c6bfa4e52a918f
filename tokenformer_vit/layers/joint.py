"""Pattention layers with the same input, such as query, key and value, called together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tokenformer_vit.ops import pattention_joint

from .pattention import Pattention

# fx must not trace into it, as with pattention().
torch.fx.wrap("pattention_joint")


def call_together(
    x: Tensor, layers: Sequence[nn.Module], joint: bool | None = None
) -> tuple[Tensor, ...]:
    """Call layers with the same input; if possible, one product computes the scores of all.

    The layers must be of the class :class:`Pattention`, with the same Θ, eps and backend, and the
    same number of pairs. If one has a hook, a gate, a mask, ``top_k``, or old and new pairs, each
    layer is called by itself.

    Args:
        x: (..., C_in) input tokens.
        layers: Layers to call.
        joint: Whether to use one product if possible. ``None`` for the default: on a GPU, if ``x``
            is at least as large as all keys together. Then reading ``x`` once instead of once for
            each layer saves at least as much as the copy of the keys takes.

    Returns:
        Output tokens of each layer, (..., C_out).
    """
    if not _is_joint(x, layers, joint):
        return tuple([layer(x) for layer in layers])
    first: Any = layers[0]
    plain: Sequence[Any] = layers
    keys, values, _, tau = zip(*(layer.used_tokens() for layer in plain), strict=True)
    return pattention_joint(x, keys, values, first.theta, tau, first.eps, first.backend)


def _is_joint(x: Tensor, layers: Sequence[Any], joint: bool | None) -> bool:
    if joint is False or not isinstance(x, Tensor):  # fx traces with other objects
        return False
    # An export may have any batch size, so it cannot depend on the size of x; nor can a trace.
    if joint is None and (not x.is_cuda or torch.compiler.is_exporting() or torch.jit.is_tracing()):
        return False
    if _has_any_global_hook() or not all(_is_plain(layer) for layer in layers):
        return False
    first = layers[0]
    settings = (first.theta, first.eps, first.backend)
    if any((layer.theta, layer.eps, layer.backend) != settings for layer in layers):
        return False
    return joint or x.numel() >= len(layers) * first.num_used * first.in_features


def _is_plain(layer: Any) -> bool:
    """Return whether a call of a layer is a call of ``pattention`` with its tokens, and no more."""
    return (
        type(layer) is Pattention
        and layer.active is None
        and layer.top_k is None
        and layer.gate is None
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
        and layer._compiled_call_impl is None
        and "forward" not in layer.__dict__
    )
