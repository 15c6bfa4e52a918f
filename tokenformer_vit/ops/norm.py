"""LayerNorm without learnable parameters, as in the blocks of a TokenFormer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .differentiation import is_transformed, needs_gradient
from .precision import accumulation_dtype, product_dtype


def layer_norm_reference(x: Tensor, num_channels: int, eps: float) -> Tensor:
    """Normalise (..., C) tokens over their last axis with PyTorch's LayerNorm."""
    return F.layer_norm(x, [num_channels], None, None, eps)


class _LayerNorm(torch.autograd.Function):
    """LayerNorm that computes its gradient from its output and 1/σ, and does not keep its input."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, num_channels: int, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.dtype = x.dtype
        # Without the cast, a CPU returns 1/σ in the precision of x.
        x = x.to(accumulation_dtype(x))
        y, _, rstd = torch.native_layer_norm(x, [num_channels], None, None, eps)
        y = y.to(dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, rstd)
        return y, rstd

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        if grad is None and grad_rstd is None:
            return None, None, None, None
        y, rstd = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(y)
        y, grad = y.to(accumulation_dtype(y)), grad.to(accumulation_dtype(y))
        grad_x = grad - grad.mean(-1, keepdim=True) - y * (grad * y).mean(-1, keepdim=True)
        grad_x = grad_x * rstd
        if grad_rstd is not None:
            # Only for gradients of gradients: the first gradient depends on 1/σ.
            grad_x = grad_x - grad_rstd * rstd.square() * y / y.shape[-1]
        return grad_x.to(ctx.dtype), None, None, None


def layer_norm_fused(x: Tensor, num_channels: int, eps: float) -> Tensor:
    """Normalise (..., C) tokens over their last axis, keeping only the output for the backward.

    Args:
        x: (..., C) tokens.
        num_channels: C.
        eps: Number added to the variance.

    Returns:
        (..., C) tokens of mean 0 and variance 1, in the dtype of autocast if it is on, otherwise
        of ``x``. The next Pattention layers keep the same tensor as their input, so the norm itself
        keeps one float32 number for each row.

    Raises:
        TypeError: If ``x`` is not of a floating-point dtype.

    Note:
        Mean and variance are accumulated in float32 (float64 for float64). The gradient can be
        differentiated again.
    """
    if not x.is_floating_point():
        raise TypeError(f"LayerNorm needs floating-point tokens, but got {x.dtype}")
    dtype = product_dtype(x)
    if needs_gradient(x) and not is_transformed():
        return _LayerNorm.apply(x, num_channels, eps, dtype)[0]
    return layer_norm_reference(x.to(accumulation_dtype(x)), num_channels, eps).to(dtype)
