"""Attention between tokens, with gradients in float32 where that is faster.

On a CPU, PyTorch computes the gradients of attention in bfloat16 by many small products of
bfloat16, and for few tokens their calls take longer than what they compute. In float32 it does not.
The forward pass, and what is kept for the backward, stay in bfloat16.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .differentiation import is_transformed, needs_gradient
from .precision import product_dtype

# From about so many tokens on, bfloat16 is as fast, or faster.
_MOST_TOKENS = 256


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend as ``torch.nn.functional.scaled_dot_product_attention`` does.

    For up to 256 tokens in bfloat16 on a CPU, without a mask and dropout, the backward pass
    computes in float32. Its gradients have smaller errors than PyTorch's. Exports, traces and
    transforms of ``torch.func`` use PyTorch's own backward, and so does code that is not compiled
    and for which PyTorch's fused attention is switched off.

    Args:
        query: (B, heads, N, D) queries.
        key: (B, heads, M, D) keys.
        value: (B, heads, M, D) values.
        attn_mask: Mask that broadcasts to (B, heads, N, M), or ``None``.
        dropout_p: Dropout rate of the weights.
        is_causal: Attend only to the token itself and earlier ones.
        scale: Factor of the scores; default: 1/√D.

    Returns:
        (B, heads, N, D) outputs.
    """
    plain = attn_mask is None and dropout_p == 0
    if plain and isinstance(query, Tensor) and _has_precise_backward(query, key, value):
        query, key, value = (part.to(torch.bfloat16) for part in (query, key, value))
        return _PreciseBackward.apply(query, key, value, is_causal, scale)  # type: ignore[return-value]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )


def _has_precise_backward(query: Tensor, key: Tensor, value: Tensor) -> bool:
    parts = (query, key, value)
    return (
        query.device.type == "cpu"
        and all(type(part) is Tensor and part.dim() == 4 for part in parts)
        and all(product_dtype(part) == torch.bfloat16 for part in parts)
        and max(query.shape[2], key.shape[2]) <= _MOST_TOKENS
        and query.shape[:2] == key.shape[:2]  # no groups of queries that share keys
        and needs_gradient(*parts)
        and not is_transformed()
        and not torch.compiler.is_exporting()
        and (torch.compiler.is_compiling() or _is_fused_here())
    )


def _is_fused_here() -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()  # the switch for all devices
        and not torch._C._get_tracing_state()
    )


class _PreciseBackward(torch.autograd.Function):
    """PyTorch's fused attention for CPUs; the backward pass is the same function in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
    ) -> Tensor:
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, logsumexp = ctx.saved_tensors
        parts = (part.float() for part in (grad, query, key, value, out))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, logsumexp, 0.0, ctx.is_causal, scale=ctx.scale
        )
        return *(each.to(query.dtype) for each in grads), None, None
