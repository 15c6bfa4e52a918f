"""Pattention layers with the same input, such as query, key and value, called together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tokenformer_vit.ops import is_few, pattention_joint

from .pattention import Pattention

# fx must not trace into it, as with pattention().
torch.fx.wrap("pattention_joint")


def call_together(
    x: Tensor, layers: Sequence[nn.Module], joint: bool | None = None
) -> tuple[Tensor, ...]:
    """Call layers with the same input; if possible, scores or Θ of all are computed together.

    The layers must be of the class :class:`Pattention`, with the same Θ, eps and backend, and the
    same number of pairs. If one has a hook, a gate, a mask, or old and new pairs, each
    layer is called by itself.

    Args:
        x: (..., C_in) input tokens.
        layers: Layers to call.
        joint: Whether to do so if possible. ``None`` for the default. On a GPU, one product gives
            all scores if ``x`` is at least as large as all keys together: reading ``x`` once
            instead of once for each layer saves at least as much as the copy of the keys takes.
            Elsewhere, one Θ gives all weights if there are only a few tokens and no gradient is
            needed, as in decoding. On a CPU the results are the same to the last digit, except for
            ``gelu_tanh_l2`` and layers of a single pair.

    Returns:
        Output tokens of each layer, (..., C_out).
    """
    if not _is_joint(x, layers, joint):
        return tuple([layer(x) for layer in layers])
    first: Any = layers[0]
    keys, values, taus = [], [], []
    for layer in layers:
        own_keys, own_values, _, tau = layer.used_tokens()  # type: ignore[operator]
        keys.append(own_keys)
        values.append(own_values)
        taus.append(tau)
    few = joint is None and not x.is_cuda  # there, only a few tokens are called together
    return pattention_joint(x, keys, values, first.theta, taus, first.eps, first.backend, few)


def _is_joint(x: Tensor, layers: Sequence[Any], joint: bool | None) -> bool:
    """Return whether the layers are called together."""
    if joint is False or not isinstance(x, Tensor):  # fx traces with other objects
        return False
    if joint is None and not x.is_cuda and (torch.is_grad_enabled() or not is_few(x)):
        return False
    # An export may have any batch size, so it cannot depend on the size of x; nor can a trace.
    if joint is None and x.is_cuda and (torch.compiler.is_exporting() or torch.jit.is_tracing()):
        return False
    if _has_any_global_hook():
        return False
    first = layers[0]
    for layer in layers:
        own = layer.__dict__  # attributes of a module take long
        if (
            type(layer) is not Pattention
            # A call of the layer is then a call of pattention() with its tokens, and no more.
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or layer._compiled_call_impl is not None
            or "forward" in own
            or own["_buffers"]["active"] is not None
            or own["_buffers"].get("gate", layer) is not None  # learned gates are no buffers
            or own["theta"] != first.theta
            or own["eps"] != first.eps
            or own["backend"] != first.backend
        ):
            return False
    if joint or not x.is_cuda:
        return True
    return x.numel() >= len(layers) * first.num_used * first.in_features
