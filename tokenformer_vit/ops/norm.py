"""LayerNorm without learnable parameters, for the blocks of a TokenFormer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .modes import plain_only, product_dtype, stored_once


class _LayerNorm(torch.autograd.Function):
    """A norm that computes its gradient from its outputs y and 1/σ, and does not keep its input.

    A saved output keeps its graph: that is how second and higher derivatives reach x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, dtype: torch.dtype, once: bool) -> tuple:
        # Without the cast, a CPU returns 1/σ in the precision of x.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y, mean, rstd = torch.native_layer_norm(wide, [x.shape[-1]], None, None, eps)
        if torch.compiler.is_compiling() and x.device.type == "cpu":  # in fewer operations
            y = (wide - mean) * stored_once(rstd)
        y = y.to(dtype)
        if ctx is not None:
            ctx.dtype = x.dtype
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(y, rstd)
        return (y,) if once and torch.compiler.is_compiling() else (y, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None = None) -> tuple:  # type: ignore[override]
        y, rstd = ctx.saved_tensors
        y = y.to(rstd.dtype)
        grad = torch.zeros_like(y) if grad is None else grad.to(rstd.dtype)
        centred = grad - grad.mean(dim=-1, keepdim=True)
        grad_x = (centred - y * (grad * y).mean(dim=-1, keepdim=True)) * rstd
        if grad_rstd is not None:  # within a second derivative
            grad_x = grad_x - grad_rstd * rstd.square() * y / y.shape[-1]
        return grad_x.to(ctx.dtype), None, None, None


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise tokens over their last axis, without learnable parameters.

    Args:
        x: (..., C) tokens.
        eps: Number added to the variance.

    Returns:
        (..., C) tokens. Under autocast they are in the precision of autocast, which the products
        after the norm use.

    Note:
        Mean and variance are accumulated in float32; float64 inputs stay float64. The backward
        keeps only the output, which the next layers keep in any case: do not change it in place.
    """
    if torch.jit.is_scripting() or torch.jit.is_tracing():
        return F.layer_norm(x, x.shape[-1:], None, None, eps)
    else:  # TorchScript must not compile this branch
        dtype = product_dtype(x)
        if plain_only():
            return F.layer_norm(x, x.shape[-1:], None, None, eps).to(dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            # Compiled code has no second derivative, and would add zeros for the gradient of 1/σ.
            # Not asked within forward(): the compiler may see that alone, called by eager code.
            return _LayerNorm.apply(x, eps, dtype, torch.compiler.is_compiling())[0]
        return _LayerNorm.forward(None, x, eps, dtype, True)[0]
