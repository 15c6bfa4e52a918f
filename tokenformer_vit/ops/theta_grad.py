"""Θ ``gelu_l2`` with a gradient of its own; ``gelu_tanh_l2`` is the same with another GELU.

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
from torch.autograd.function import once_differentiable

from . import triton_theta
from .norm import once_a_row


class _GeluL2(torch.autograd.Function):
    """Scores (..., P), τ, eps and the kind of GELU -> weights (..., P), factors (..., 1)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, tau: Tensor, eps: float, approximate: str) -> tuple[Tensor, Tensor]:
        if triton_theta.serves(scores):
            return triton_theta.gelu_l2(scores, tau, eps, approximate == "tanh")
        dtype = torch.promote_types(scores.dtype, torch.float32)
        norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True, dtype=dtype).div_(tau)
        # In place, because a decoding step waits longer for memory than for these operations.
        factor = once_a_row(norm.mul_(norm).add_(eps).rsqrt_())
        return F.gelu(scores * factor, approximate=approximate).to(scores.dtype), factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        scores, tau, ctx.eps, ctx.approximate = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(scores, tau, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scores, tau, factor = ctx.saved_tensors
        if triton_theta.serves(scores):
            others = tau, factor, grad.to(scores.dtype), ctx.approximate == "tanh"
            grad_scores, dot = triton_theta.gelu_l2_backward(scores, *others)
        else:
            z = scores * factor
            g = torch.ops.aten.gelu_backward(grad.to(z.dtype), z, approximate=ctx.approximate)
            dot = (g * z).sum(dim=-1, keepdim=True)
            grad_scores = factor * torch.addcmul(g, z, dot / tau.to(dot.dtype).square(), value=-1)
        grad_tau = None
        if ctx.needs_input_grad[1]:
            grad_tau = (dot * (1 - ctx.eps * factor.square())).sum().div(tau).to(tau.dtype)
        return grad_scores.to(scores.dtype), grad_tau, None, None


def fast_gelu_l2(scores: Tensor, tau: Tensor, eps: float, approximate: str) -> Tensor:
    """Compute the weights of (..., P) scores as ``theta.gelu_l2`` does, in less memory."""
    if torch.is_grad_enabled() and (scores.requires_grad or tau.requires_grad):
        return _GeluL2.apply(scores, tau, eps, approximate)[0]
    return _GeluL2.forward(scores, tau, eps, approximate)[0]
