"""Θ, the normalised activation of Pattention: all published variants, and facts about them.

A variant is a function ``(scores, tau, eps) -> weights`` that TorchScript can compile. It maps the
scores A (..., P) of input tokens against P parameter tokens to weights of the same shape and dtype,
and normalises each row over its P entries. ``tau`` is 0-dim, the stored scale of the layer. ``eps``
is added to the divisor of a row, relative to ``tau``; with 0, as released, the normed GELUs of a
row of zeros are NaN.

Note:
    All is float32 (float64 for float64 scores) and rounded once, also under autocast: in bfloat16 a
    sum of squares is off by 5 to 20 %. L2 norms of rows must be below 1.8e19, for gradients 1e12 τ.

Source:
    TokenFormer, arXiv:2410.23168: Eq. 5 and 6 for the definition, Table 4 for the variants. The
    factor of ``softmax`` and the post-normalised form come from the authors' language code.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer_vit.errors import InputError

from . import triton_theta
from .modes import plain_only, stored_once


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def softmax(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · exp(A) / ‖exp(A)‖₁; the divisor is never 0, so eps is not used."""
    return (tau * torch.softmax(_wide(scores), dim=-1)).to(scores.dtype)


def gelu_l1(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · gelu(A) / ‖gelu(A)‖₁."""
    activation = _gelu(_wide(scores))
    mean = activation.abs().sum(dim=-1, keepdim=True) / tau
    return (activation / (mean + eps)).to(scores.dtype)


def gelu_l2(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """gelu(τ · A / ‖A‖₂): GELU of an RMSNorm over the parameter axis, the paper's default."""
    return F.gelu(_l2_normalize(_wide(scores), tau, eps)).to(scores.dtype)


def gelu_l2_post(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · gelu(A) / ‖gelu(A)‖₂."""
    return _l2_normalize(_gelu(_wide(scores)), tau, eps).to(scores.dtype)


def _l2_normalize(a: Tensor, tau: Tensor, eps: float) -> Tensor:
    mean_square = a.square().sum(dim=-1, keepdim=True) / tau.to(a.dtype).square()
    return a * torch.rsqrt(mean_square + eps)


def _gelu(a: Tensor) -> Tensor:
    # A row of scores below -5 is divided by its own small norm: the digits that F.gelu loses there,
    # by 1 + erf, would be lost in the weights.
    return 0.5 * a * torch.erfc(-math.sqrt(0.5) * a)


def gelu(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """GELU without a norm, τ or eps; ours, as with it a Transformer's layers are Pattention."""
    return F.gelu(scores)  # PyTorch computes it in float32 and rounds once


def gelu_tanh(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """``gelu`` with the tanh approximation."""
    return F.gelu(scores, approximate="tanh")


def linear(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """A itself: with it, a linear layer of weight Vᵀ K is Pattention."""
    return scores


class Theta(NamedTuple):
    """Facts about one Θ variant; ``THETAS`` alone lists the variants by name."""

    weights: Callable[[Tensor, Tensor, float], Tensor]  # from scores, τ and eps
    # p of the Lₚ norm that a row is divided by, 1 or 2; 0 for no norm, where τ has no effect,
    # Θ(0) = 0, and biases are possible.
    norm_order: int
    # Whether this norm is of the scores, before the activation; then the keys' scale has no effect.
    normalizes_scores: bool
    # E[Θ(A)²] of a weight for standard normal scores and the default τ; see Pattention.
    second_moment: float


THETAS = {
    "softmax": Theta(softmax, 1, False, math.e),
    "gelu_l1": Theta(gelu_l1, 1, False, 2.67175),
    "gelu_l2": Theta(gelu_l2, 2, True, 0.42522),
    "gelu_l2_post": Theta(gelu_l2_post, 2, False, 1.0),
    "gelu": Theta(gelu, 0, False, 0.42522),
    "gelu_tanh": Theta(gelu_tanh, 0, False, 0.42519),
    "linear": Theta(linear, 0, False, 1.0),
}


def find_theta(name: str) -> Theta:
    """Return the facts about a variant; raise InputError if there is none of this name."""
    if name not in THETAS:
        raise InputError(f"theta must be one of {', '.join(THETAS)}, but got {name!r}")
    return THETAS[name]


def norm_shares(scores: Tensor, weights: Tensor, theta: str) -> Tensor:
    """Return the (..., P) shares of pairs in the p-th power of a row's norm; 0 without a norm."""
    variant = find_theta(theta)
    if not variant.norm_order:
        return torch.zeros_like(weights)
    normed = scores if variant.normalizes_scores else weights
    powers = normed.abs() ** variant.norm_order
    return powers / powers.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def default_tau(theta: str, num_param_tokens: int) -> float:
    """Return the initial τ of a layer with P pairs: P under an L1 norm, √P under L2, else 1.

    A layer keeps it. One that followed P would change a growing model (2410.23168v2, Appendix B).
    """
    order = find_theta(theta).norm_order
    return float(num_param_tokens) ** (1 / order) if order else 1.0


class GeluL2(torch.autograd.Function):
    """Scores (..., P), τ and eps -> weights (..., P): :func:`gelu_l2` with a gradient by hand.

    Plain autograd keeps two float32 numbers for each score. This keeps the scores as they are, and
    the factor r of each row:

        z = r s,  r = 1 / √(‖s‖² / τ² + eps),  w = gelu(z)
        ds = r (g - z (g · z) / τ²),  g = gelu'(z) dw
        dτ = Σ (g · z) (1 - eps r²) / τ
    """

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
        if triton_theta.serves(scores) and not torch.is_grad_enabled() and not plain_only():
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
