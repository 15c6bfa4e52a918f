"""Attention between tokens, with gradients in float32 where that is faster.

On a CPU, PyTorch computes the gradients of attention in bfloat16 by many small products of
bfloat16, and for few tokens their calls take longer than what they compute. The same gradients in
float32 take less time. The forward pass, and what is kept for the backward, stay in bfloat16.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .differentiation import is_transformed, needs_gradient
from .precision import product_dtype

# For a ViT's 197 tokens float32 takes as long on a CPU with instructions for bfloat16, and less
# time on others. For more tokens it takes longer on the former.
_MOST_TOKENS = 200
_FUSED = 1  # in PyTorch's enum of implementations


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

    For up to 200 tokens in bfloat16 on a CPU, without a mask and dropout, the backward pass
    computes in float32. Its gradients have smaller errors than PyTorch's. PyTorch's own backward is
    used in exports, in traces, under ``torch.func``, in compiled code for any number of tokens,
    and, without compilation, where its fused attention is switched off.

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
    if plain and isinstance(query, Tensor) and _may_be_precise(query, key, value):
        query, key, value = (part.to(torch.bfloat16) for part in (query, key, value))
        if _is_fused(query, key, value, is_causal, scale):
            return _PreciseBackward.apply(query, key, value, is_causal, scale)  # type: ignore[return-value]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )


def _may_be_precise(*parts: Tensor) -> bool:
    # Sizes come last: reading one would leave a guard in an export, or a warning in a trace.
    return (
        parts[0].device.type == "cpu"
        and needs_gradient(*parts)
        and all(type(part) is Tensor for part in parts)
        and all(product_dtype(part) == torch.bfloat16 for part in parts)
        and not is_transformed()
        and not torch.compiler.is_exporting()
        and (torch.compiler.is_compiling() or not torch._C._get_tracing_state())
        and all(part.dim() == 4 and _is_short(part.shape[2]) for part in parts)
    )


def _is_short(tokens: int) -> bool:
    if torch.compiler.is_compiling():
        return statically_known_true(tokens <= _MOST_TOKENS)
    return tokens <= _MOST_TOKENS


def _is_fused(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> bool:
    """Return whether PyTorch's fused attention for CPUs takes these tensors."""
    if not torch.compiler.is_compiling():
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale)
        return choice == _FUSED
    return (
        key.shape == value.shape
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3]
        and min(query.shape[2], key.shape[2]) > 0
        and all(part.stride(3) == 1 for part in (query, key, value))
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
