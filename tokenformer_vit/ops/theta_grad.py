"""Θ ``gelu_l2`` with a gradient of its own.

Plain autograd keeps two float32 numbers for each score. This keeps the scores as they are, and the
factor r of each row:

    z = r s,  r = 1 / √(‖s‖² / τ² + eps),  w = gelu(z)
    ds = r (g - z (g · z) / τ²),  g = gelu'(z) dw
    dτ = Σ (g · z) (1 - eps r²) / τ
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import triton_theta
from .modes import plain_only, stored_once


class GeluL2(torch.autograd.Function):
    """Scores (..., P), τ and eps -> weights (..., P), as ``theta.gelu_l2`` but in less memory."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, tau: Tensor, eps: float) -> Tensor:
        """Compute the weights; without ``ctx``, for no backward."""
        if scores.device.type == triton_theta.DEVICE and triton_theta.serves(scores):
            weights, factor = triton_theta.gelu_l2(scores, tau, eps)
        else:
            dtype = torch.promote_types(scores.dtype, torch.float32)
            norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True, dtype=dtype) / tau
            # In place: a decoding step waits longer for memory than for these operations.
            factor = norm.square_().add_(eps).rsqrt_()
            if torch.compiler.is_compiling() and scores.device.type == "cpu":
                factor = stored_once(factor)
            weights = F.gelu(scores * factor).to(scores.dtype)
        if ctx is not None:
            ctx.eps = eps
            ctx.save_for_backward(scores, tau, factor)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Compute the gradients of scores and τ, by operations that have derivatives again."""
        scores, tau, factor = ctx.saved_tensors
        on_gpu = scores.device.type == triton_theta.DEVICE and triton_theta.serves(scores)
        if on_gpu and not torch.is_grad_enabled() and not plain_only():
            grad_scores, dot = triton_theta.gelu_l2_backward(scores, tau, factor, grad)
        else:
            square = tau.to(factor.dtype).square()
            if torch.is_grad_enabled():  # the kept factor is a constant, which has no derivative
                sums = scores.to(factor.dtype).square().sum(dim=-1, keepdim=True)
                factor = (sums / square + ctx.eps).rsqrt()
            z = scores * factor
            g = torch.ops.aten.gelu_backward(grad.to(z.dtype), z)
            dot = (g * z).sum(dim=-1, keepdim=True)
            grad_scores = factor * torch.addcmul(g, z, dot / square, value=-1)
        grad_tau = None
        if ctx.needs_input_grad[1]:
            grad_tau = (dot * (1 - ctx.eps * factor.square())).sum().div(tau).to(tau.dtype)
        return grad_scores.to(scores.dtype), grad_tau, None
