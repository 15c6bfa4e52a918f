"""The hand-written forward and backward of each Θ, in plain PyTorch, which torch.compile fuses.

Plain autograd keeps the scores in float32 several times, once for each step of Θ. Here each
gradient is derived for Θ as a whole and needs only the scores, in the precision they were computed
in, and one or two float32 numbers for each row. README.md in this folder has the derivation.

Each forward and its backward form one constant; ``theta.THETAS`` assigns it to a variant.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compilation import compiled_for_cpu, once_a_row
from .precision import accumulation_dtype


def _one(kept: tuple[Tensor, ...], eps: float) -> float:
    return 1.0


class Kernels(NamedTuple):
    """Forward and backward of a Θ variant, for scores and gradients of any floating dtype.

    Both compute in float32 (float64 for float64) and round their results once. Autograd
    differentiates them only for gradients of gradients.

    Args:
        forward: (scores, τ, eps) -> (..., P) weights, tensors to keep (the scores first).
        backward: (kept tensors, τ, gradient of the weights) -> weights, gradient of the scores, and
            the (..., 1) dot products in the latter, which the gradient of τ needs.
        elasticity: (kept tensors, eps) -> percentage by which a row's factor grows if τ grows by
            1 %; for the gradient of τ.
    """

    forward: Callable[[Tensor, Tensor, float], tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[[tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    elasticity: Callable[[tuple[Tensor, ...], float], Tensor | float] = _one


def _gelu_backward(grad: Tensor, z: Tensor, approximate: str = "none") -> Tensor:
    """Multiply a gradient by gelu'(z), in one kernel."""
    return torch.ops.aten.gelu_backward(grad.to(z.dtype), z, approximate=approximate)


def _softmax_forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    a = scores.to(accumulation_dtype(scores))
    peak = a.amax(dim=-1, keepdim=True)
    exponential = (a - peak).exp()
    share = exponential.sum(dim=-1, keepdim=True).reciprocal()
    # Two numbers, not ln ‖exp(a)‖₁ alone: for large scores float32 would round away its last
    # digits, and with them the share of every pair.
    return (exponential * (tau * share)).to(scores.dtype), (
        scores,
        torch.cat((peak, share), dim=-1),
    )


def _softmax_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scores, row = kept
    peak, share = row.split(1, dim=-1)
    # The factors are in the other order than in the forward, for the reason given in gelu_l2.
    p = share * (scores - peak).exp()
    dot = (grad_weights * p).sum(dim=-1, keepdim=True)
    grad_scores = tau * p * (grad_weights - dot)
    return (tau * p).to(scores.dtype), grad_scores.to(scores.dtype), tau * dot


def _gelu_l1_forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    factor = (activation.abs().sum(dim=-1, keepdim=True) / tau + eps).reciprocal()
    return (activation * factor).to(scores.dtype), (scores, factor)


def _gelu_l1_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scores, factor = kept
    a = scores.to(factor.dtype)
    activation = F.gelu(a)
    weights = factor * activation
    dot = (grad_weights * weights).sum(dim=-1, keepdim=True)
    grad_activation = factor * (grad_weights - activation.sign() * (dot / tau))
    return weights.to(scores.dtype), _gelu_backward(grad_activation, a).to(scores.dtype), dot


def _l1_elasticity(kept: tuple[Tensor, ...], eps: float) -> Tensor:
    _, factor = kept
    return 1 - eps * factor


def _gelu_l2_forward(
    scores: Tensor, tau: Tensor, eps: float, approximate: str = "none"
) -> tuple[Tensor, tuple[Tensor, ...]]:
    # Written for the small layers of a decoding step, where each call in Python counts.
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True, dtype=dtype)
    root = norm / tau
    factor = torch.rsqrt(root * root + eps)
    if compiled_for_cpu(factor):
        factor = once_a_row(factor)
    weights = F.gelu(scores * factor, approximate=approximate)
    return (weights if weights.dtype == scores.dtype else weights.to(scores.dtype)), (
        scores,
        factor,
    )


def _gelu_l2_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor, approximate: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    scores, factor = kept
    # The forward has scores * factor. If both products were written the same, torch.compile would
    # merge them and keep the weights for the backward instead of computing them again.
    z = factor * scores
    weights = F.gelu(z, approximate=approximate).to(scores.dtype)
    g = _gelu_backward(grad_weights, z, approximate)
    dot = (g * z).sum(dim=-1, keepdim=True)
    grad_scores = factor * torch.addcmul(g, z, dot / tau.to(dot.dtype).square(), value=-1)
    return weights, grad_scores.to(scores.dtype), dot


def _l2_elasticity(kept: tuple[Tensor, ...], eps: float) -> Tensor:
    _, factor = kept
    return 1 - eps * factor.square()


def _gelu_l2_post_forward(
    scores: Tensor, tau: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    mean_square = activation.square().sum(dim=-1, keepdim=True) / tau.to(activation.dtype).square()
    factor = torch.rsqrt(mean_square + eps)
    return (activation * factor).to(scores.dtype), (scores, factor)


def _gelu_l2_post_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scores, factor = kept
    a = scores.to(factor.dtype)
    weights = factor * F.gelu(a)
    dot = (grad_weights * weights).sum(dim=-1, keepdim=True)
    grad_activation = factor * (grad_weights - weights * (dot / tau.to(dot.dtype).square()))
    return weights.to(scores.dtype), _gelu_backward(grad_activation, a).to(scores.dtype), dot


SOFTMAX = Kernels(_softmax_forward, _softmax_backward)
GELU_L1 = Kernels(_gelu_l1_forward, _gelu_l1_backward, _l1_elasticity)
GELU_L2 = Kernels(_gelu_l2_forward, _gelu_l2_backward, _l2_elasticity)
GELU_L2_POST = Kernels(_gelu_l2_post_forward, _gelu_l2_post_backward, _l2_elasticity)
GELU_TANH_L2 = Kernels(
    partial(_gelu_l2_forward, approximate="tanh"),
    partial(_gelu_l2_backward, approximate="tanh"),
    _l2_elasticity,
)
