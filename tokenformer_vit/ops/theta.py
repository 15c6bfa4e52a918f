"""Θ, the normalised activation of Pattention: all published variants, and facts about them.

:data:`THETAS` is the only place that lists variants. A new one is a function here and an entry
there. With hand-written gradients (see ``kernels.py``) it trains faster and takes less memory.

A variant maps the scores A (..., P) of input tokens against P parameter tokens to weights of the
same shape, and normalises each row over its P entries. Each function has the signature
``(scores, tau, eps) -> weights``, and TorchScript must be able to compile it:

Args:
    scores: (..., P) floating-point scores, one row for each input token.
    tau: 0-dim tensor, the stored scale of the layer (see :func:`default_tau`).
    eps: Number added to the divisor of a row, relative to ``tau``. It keeps the weights and
        gradients of a row of zeros finite. 0 gives the authors' released formulas, which divide
        zero by zero there.

Returns:
    (..., P) weights in the dtype of ``scores``.

Note:
    Everything between reading the scores and rounding the result once is float32 (float64 for
    float64 scores), also under autocast: summed in bfloat16, a row of squares is off by 5 to 20 %.
    Under the L2 variants the norm of a row must be below 1.8e19, and below 1e12 τ for autograd's
    gradient. In float16 the gradient of a row of zeros is infinite if that of a weight is above
    1.3e5 eps under ``gelu_l1`` (0.13 by default) or 1.3e5 √eps under the L2 variants (130).
    README.md in this folder lists the ranges.

Source:
    TokenFormer, arXiv:2410.23168: Eq. 5 and 6 for the definition, Table 4 for the variants. The
    factor of ``softmax`` and the post-normalised form come from the authors' language code.
    ``gelu_tanh_l2`` is not in the paper: it measures the benefit of the exact GELU.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer_vit.errors import InputError

from . import kernels
from .kernels import Kernels
from .precision import accumulation_dtype


def softmax(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · exp(A) / ‖exp(A)‖₁; the divisor is never 0, so eps is not used."""
    return (tau * torch.softmax(scores.to(accumulation_dtype(scores)), dim=-1)).to(scores.dtype)


def gated_softmax(scores: Tensor, tau: Tensor, gate: Tensor) -> Tensor:
    """τ · g exp(A) / ‖g exp(A)‖₁ with a gate g for each parameter token.

    A gate of 0 removes a token, whatever its score, but the gate still has a gradient. With gates
    of 1 this is :func:`softmax`.

    Args:
        scores: (..., P) scores.
        tau: 0-dim tensor, the stored scale of the layer.
        gate: (P,) gates of either sign, not all of them 0.

    Returns:
        (..., P) weights in the dtype of ``scores``.

    Source:
        This project. arXiv:2410.23168v2, Appendix B, removes exp for exact growth, because a
        score of zero still has the weight exp(0).
    """
    a = scores.to(accumulation_dtype(scores))
    gate = gate.to(a.dtype)
    peak = a.masked_fill(gate == 0, -torch.inf).amax(dim=-1, keepdim=True).detach()
    # A closed token may score far above the open ones; its exponential must stay finite.
    opened = gate * (a - peak).clamp(max=60.0).exp()
    return (tau * opened / opened.abs().sum(dim=-1, keepdim=True)).to(scores.dtype)


def no_gate(scores: Tensor, tau: Tensor, gate: Tensor) -> Tensor:
    """Refuse a gate.

    Raises:
        ValueError: Always.
    """
    raise ValueError("this Θ has no gate, because a zero key closes a pair: leave out gate")


def gelu_l1(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · gelu(A) / ‖gelu(A)‖₁."""
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    mean = activation.abs().sum(dim=-1, keepdim=True) / tau
    return (activation / (mean + eps)).to(scores.dtype)


def _gelu_l2(scores: Tensor, tau: Tensor, eps: float, approximate: str) -> Tensor:
    scores32 = scores.to(accumulation_dtype(scores))
    mean_square = scores32.square().sum(dim=-1, keepdim=True) / tau.to(scores32.dtype).square()
    z = scores32 * torch.rsqrt(mean_square + eps)
    return F.gelu(z, approximate=approximate).to(scores.dtype)


def gelu_l2(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """gelu(τ · A / ‖A‖₂): GELU of an RMSNorm over the parameter axis, the paper's default."""
    return _gelu_l2(scores, tau, eps, "none")


def gelu_tanh_l2(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """``gelu_l2`` with the tanh approximation of GELU, which is within 5e-4 of it."""
    return _gelu_l2(scores, tau, eps, "tanh")


def gelu_l2_post(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · gelu(A) / ‖gelu(A)‖₂."""
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    mean_square = activation.square().sum(dim=-1, keepdim=True) / tau.to(activation.dtype).square()
    return (activation * torch.rsqrt(mean_square + eps)).to(scores.dtype)


class Theta(NamedTuple):
    """Facts about one Θ variant.

    Args:
        weights: Function from scores to weights.
        norm_order: 1 or 2, the p of the Lₚ norm that a row is divided by. The p-th power of the
            norm is a sum over pairs. To keep the weights of the other pairs when pairs are added or
            removed, τᵖ must change in proportion to this sum.
        normalizes_scores: True if this norm is of the scores A, before the activation; False if it
            is of the activation. If True, the scale of the keys does not change the weights.
        second_moment: E[Θ(A)²] of a weight for standard normal scores and the default τ. The
            variance of an output is P · E[Θ²] · Var[V].
        kernels: Hand-written gradients. Without them every backend uses plain autograd.
        gated: Function from scores, τ and a gate to weights. Only a variant that gives a zero key
            a weight needs one; in the others a zero key closes a pair.
    """

    weights: Callable[[Tensor, Tensor, float], Tensor]
    norm_order: int
    normalizes_scores: bool
    second_moment: float
    kernels: Kernels | None = None
    gated: Callable[[Tensor, Tensor, Tensor], Tensor] = no_gate

    @property
    def has_gate(self) -> bool:
        """Whether a pair can have a gate."""
        return self.gated is not no_gate


THETAS = {
    "softmax": Theta(softmax, 1, False, math.e, kernels.SOFTMAX, gated_softmax),
    "gelu_l1": Theta(gelu_l1, 1, False, 2.67175, kernels.GELU_L1),
    "gelu_l2": Theta(gelu_l2, 2, True, 0.42522, kernels.GELU_L2),
    "gelu_l2_post": Theta(gelu_l2_post, 2, False, 1.0, kernels.GELU_L2_POST),
    "gelu_tanh_l2": Theta(gelu_tanh_l2, 2, True, 0.42519, kernels.GELU_TANH_L2),
}
"""Every variant by name."""


def find_theta(name: str) -> Theta:
    """Return the facts about a variant.

    Args:
        name: Name of the variant, a key of :data:`THETAS`.

    Raises:
        InputError: If there is no such variant; the message lists the existing ones.
    """
    if name not in THETAS:
        raise InputError(f"theta must be one of {', '.join(THETAS)}, but got {name!r}")
    return THETAS[name]


def theta_weights(
    scores: Tensor, theta: str, tau: Tensor, eps: float, gate: Tensor | None = None
) -> Tensor:
    """Compute the weights of scores.

    Args:
        scores: (..., P) scores.
        theta: Name of the variant, a key of :data:`THETAS`.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: Number added to the divisor of a row, relative to ``tau``.
        gate: (P,) gates, only for a variant that has them; see :func:`gated_softmax`.

    Returns:
        (..., P) weights in the dtype of ``scores``.

    Raises:
        ValueError: If the variant is unknown, or ``gate`` is given and the variant has no gate.
    """
    if gate is None:
        return find_theta(theta).weights(scores, tau, eps)
    return find_theta(theta).gated(scores, tau, gate)


def norm_shares(scores: Tensor, weights: Tensor, theta: str) -> Tensor:
    """Return the share of each pair in the sum of p-th powers that Θ divides a row by.

    Args:
        scores: (..., P) scores in float32 or float64.
        weights: (..., P) weights of these scores, after the gate if there is one.
        theta: Name of the variant.

    Returns:
        (..., P) shares that sum to 1 along the last axis; all 0 in a row whose sum is 0.

    Raises:
        InputError: If the variant is unknown.
    """
    variant = find_theta(theta)
    normed = scores if variant.normalizes_scores else weights
    powers = normed.abs() ** variant.norm_order
    tiny = torch.finfo(powers.dtype).tiny
    return powers / powers.sum(dim=-1, keepdim=True).clamp(min=tiny)


def default_tau(theta: str, num_param_tokens: int) -> float:
    """Return the initial τ of a layer with P parameter tokens: P under an L1 norm, √P under L2.

    A layer keeps its τ from then on. A τ that followed P while a model grows would change what
    the model computes (arXiv:2410.23168v2, Appendix B).

    Args:
        theta: Name of the variant.
        num_param_tokens: P, at least 1.

    Raises:
        InputError: If the variant is unknown.
    """
    order = find_theta(theta).norm_order
    return float(num_param_tokens) if order == 1 else math.sqrt(num_param_tokens)
