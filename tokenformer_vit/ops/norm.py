"""LayerNorm and RMSNorm without learnable parameters, for the blocks of a TokenFormer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .compilation import compiled_for_cpu, once_a_row
from .differentiation import is_transformed
from .precision import accumulation_dtype, product_dtype


def layer_norm_reference(x: Tensor, num_channels: int, eps: float) -> Tensor:
    """Normalise (..., C) tokens over their last axis with PyTorch's LayerNorm."""
    # F.layer_norm asks for cuDNN's settings first, which takes longer than a small norm.
    return torch.layer_norm(x, [num_channels], None, None, eps)


def rms_norm_reference(x: Tensor, num_channels: int, eps: float) -> Tensor:
    """Divide (..., C) tokens by the root of their mean square with PyTorch's RMSNorm."""
    return F.rms_norm(x, [num_channels], None, eps)


def _normalize(x: Tensor, num_channels: int, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Return LayerNorm or RMSNorm of (..., C) tokens, and 1/σ of each token, (..., 1)."""
    if centred:
        y, mean, rstd = torch.native_layer_norm(x, [num_channels], None, None, eps)
        if compiled_for_cpu(x):  # the same numbers, for fewer operations
            y = (x - mean) * once_a_row(rstd)
        return y, rstd
    if x.shape[-1] != num_channels:
        raise RuntimeError(f"normalized_shape is {num_channels}, but tokens are {x.shape[-1]} wide")
    # One pass over x. On a CPU the mean of x.square() takes 1.7 times as long.
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    rstd = (square / num_channels + eps).rsqrt()
    return x * (once_a_row(rstd) if compiled_for_cpu(x) else rstd), rstd


class _Norm(torch.autograd.Function):
    """A norm that computes its gradient from its output and 1/σ, and does not keep its input."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, num_channels: int, eps: float, dtype: torch.dtype, centred: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.dtype, ctx.centred = x.dtype, centred
        # Without the cast, a CPU returns 1/σ in the precision of x.
        y, rstd = _normalize(x.to(accumulation_dtype(x)), num_channels, eps, centred)
        y = y.to(dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, rstd)
        return y, rstd

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None and grad_rstd is None:
            return None, None, None, None, None
        y, rstd = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(y)
        y, grad = y.to(accumulation_dtype(y)), grad.to(accumulation_dtype(y))
        own = grad - grad.mean(-1, keepdim=True) if ctx.centred else grad
        grad_x = (own - y * (grad * y).mean(-1, keepdim=True)) * rstd
        if grad_rstd is not None:
            # Only for gradients of gradients: the first gradient depends on 1/σ.
            grad_x = grad_x - grad_rstd * rstd.square() * y / y.shape[-1]
        return grad_x.to(ctx.dtype), None, None, None, None


def norm_fused(x: Tensor, num_channels: int, eps: float, centred: bool) -> Tensor:
    """Normalise (..., C) tokens over their last axis, keeping only the output for the backward.

    Args:
        x: (..., C) tokens.
        num_channels: C.
        eps: Number added to the variance, or to the mean square.
        centred: Whether to subtract the mean: LayerNorm, otherwise RMSNorm.

    Returns:
        (..., C) tokens of variance 1 and mean 0, or of mean square 1, in the dtype of autocast if
        it is on, otherwise of ``x``. The next Pattention layers keep the same tensor as their
        input, so the norm itself keeps one float32 number for each row.

    Raises:
        TypeError: If ``x`` is not of a floating-point dtype.
        RuntimeError: If the last axis is not of size C.

    Note:
        Means are accumulated in float32 (float64 for float64). The gradient can be differentiated
        again.
    """
    if not x.is_floating_point():
        raise TypeError(f"a norm needs floating-point tokens, but got {x.dtype}")
    dtype = product_dtype(x)
    if torch.is_grad_enabled() and x.requires_grad and not is_transformed():
        return _Norm.apply(x, num_channels, eps, dtype, centred)[0]
    if centred and compiled_for_cpu(x):
        return _normalize(x.to(accumulation_dtype(x)), num_channels, eps, centred)[0].to(dtype)
    reference = layer_norm_reference if centred else rms_norm_reference
    if x.dtype == dtype == torch.float32:
        return reference(x, num_channels, eps)
    return reference(x.to(accumulation_dtype(x)), num_channels, eps).to(dtype)
