"""Θ, the normalised activation of Pattention, in every variant that has been published.

A variant maps the scores A (..., P) of the input tokens against P parameter tokens to weights of
the same shape, normalising each row over its P entries. Every function here has the signature
``(scores, tau, eps) -> weights``:

Args:
    scores: (..., P) floating-point scores, one row for each input token.
    tau: 0-dim tensor, the stored scale of the layer (see :func:`default_tau`).
    eps: Added where the row is divided, relative to ``tau``, so that a zero row gives finite
        weights and gradients. 0 reproduces the authors' released formulas, where it does not.

Returns:
    (..., P) weights of the dtype of ``scores``.

Note:
    Everything between reading the scores and the one rounding of the result is float32 (float64
    for float64 scores), under autocast too: summed in bfloat16, a row of squares is off by 5 to
    20 %. Under the L2 variants a row of scores must have a norm below 1.8e19, and for autograd's
    gradient one below 1e12 τ; README.md beside this file has the ranges.

Source:
    TokenFormer, arXiv:2410.23168: Eq. 5 and 6 for the definition, Table 4 for the variants. The
    factor of ``softmax`` and the post-normalised form are those of the authors' language code.
    ``gelu_tanh_l2`` is not among the paper's: it asks what the exact GELU is worth.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer_vit.errors import InputError

from .precision import accumulation_dtype


def softmax(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · exp(A) / ‖exp(A)‖₁; its denominator cannot vanish, so eps plays no part."""
    return (tau * torch.softmax(scores.to(accumulation_dtype(scores)), dim=-1)).to(scores.dtype)


def gated_softmax(scores: Tensor, tau: Tensor, gate: Tensor) -> Tensor:
    """τ · g exp(A) / ‖g exp(A)‖₁ with a gate g for each parameter token.

    A token whose gate is 0 takes no part, whatever its score, and its gate still has a gradient;
    with gates of 1 this is :func:`softmax`.

    Args:
        scores: (..., P) scores.
        tau: 0-dim tensor, the stored scale of the layer.
        gate: (P,), of either sign, not all of them 0.

    Returns:
        (..., P) weights of the dtype of ``scores``.

    Source:
        This project's. arXiv:2410.23168v2, Appendix B, leaves exp out of exact growth, since a
        score of zero still has the weight exp(0).
    """
    a = scores.to(accumulation_dtype(scores))
    gate = gate.to(a.dtype)
    peak = a.masked_fill(gate == 0, -torch.inf).amax(dim=-1, keepdim=True).detach()
    # A closed token may score far above the open ones; what it would weigh must stay finite.
    opened = gate * (a - peak).clamp(max=60.0).exp()
    return (tau * opened / opened.abs().sum(dim=-1, keepdim=True)).to(scores.dtype)


def gelu_l1(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · gelu(A) / ‖gelu(A)‖₁."""
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    mean = activation.abs().sum(dim=-1, keepdim=True) / tau
    return (activation / (mean + eps)).to(scores.dtype)


def _gelu_l2(scores: Tensor, tau: Tensor, eps: float, approximate: str) -> Tensor:
    scores32 = scores.to(accumulation_dtype(scores))
    mean_square = scores32.square().sum(dim=-1, keepdim=True) / tau.square()
    z = scores32 * torch.rsqrt(mean_square + eps)
    return F.gelu(z, approximate=approximate).to(scores.dtype)


def gelu_l2(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """gelu(τ · A / ‖A‖₂): GELU of an RMSNorm over the parameter axis, the paper's default."""
    return _gelu_l2(scores, tau, eps, "none")


def gelu_tanh_l2(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """As ``gelu_l2``, with the tanh approximation of GELU, which is within 5e-4 of it."""
    return _gelu_l2(scores, tau, eps, "tanh")


def gelu_l2_post(scores: Tensor, tau: Tensor, eps: float) -> Tensor:
    """τ · gelu(A) / ‖gelu(A)‖₂."""
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    mean_square = activation.square().sum(dim=-1, keepdim=True) / tau.square()
    return (activation * torch.rsqrt(mean_square + eps)).to(scores.dtype)


class Variant(NamedTuple):
    """What the rest of the package has to know of a Θ variant.

    Args:
        weights: The function from scores to weights.
        norm_order: p of the Lₚ norm over pairs that a row is divided by; see :func:`norm_order`.
        normalizes_scores: Whether that norm is of the scores A, before the activation. Else it is
            of the activation, which the weights are a multiple of.
        second_moment: E[Θ(A)²] of a weight when the scores are standard normal and τ is the
            default. The variance of an output is P · E[Θ²] · Var[V].
    """

    weights: Callable[[Tensor, Tensor, float], Tensor]
    norm_order: int
    normalizes_scores: bool
    second_moment: float


VARIANTS = {
    "softmax": Variant(softmax, 1, False, math.e),
    "gelu_l1": Variant(gelu_l1, 1, False, 2.67175),
    "gelu_l2": Variant(gelu_l2, 2, True, 0.42522),
    "gelu_l2_post": Variant(gelu_l2_post, 2, False, 1.0),
    "gelu_tanh_l2": Variant(gelu_tanh_l2, 2, True, 0.42519),
}
THETAS = {name: variant.weights for name, variant in VARIANTS.items()}


def theta_weights(
    scores: Tensor, theta: str, tau: Tensor, eps: float, gate: Tensor | None = None
) -> Tensor:
    """Apply the variant of a name.

    Args:
        scores: (..., P) scores.
        theta: Name of the variant, a key of :data:`THETAS`.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: As in the module's description.
        gate: (P,), for ``softmax`` alone; see :func:`gated_softmax`.

    Returns:
        (..., P) weights of the dtype of ``scores``.

    Raises:
        ValueError: If the variant is unknown, or has no gate and is given one.
    """
    if gate is not None:
        if theta != "softmax":
            raise ValueError("only softmax has a gate: under GELU a zero key closes a token")
        return gated_softmax(scores, tau, gate)
    # Written out because TorchScript cannot look a function up in a dict.
    if theta == "softmax":
        return softmax(scores, tau, eps)
    if theta == "gelu_l1":
        return gelu_l1(scores, tau, eps)
    if theta == "gelu_l2":
        return gelu_l2(scores, tau, eps)
    if theta == "gelu_l2_post":
        return gelu_l2_post(scores, tau, eps)
    if theta == "gelu_tanh_l2":
        return gelu_tanh_l2(scores, tau, eps)
    # The names stand here again because TorchScript reads neither THETAS nor f"{theta!r}".
    names = "softmax, gelu_l1, gelu_l2, gelu_l2_post, gelu_tanh_l2"
    raise ValueError(f"unknown Θ '{theta}'; choose one of {names}")


def check_theta(theta: str) -> str:
    """Return the name of a variant if there is such a variant.

    Args:
        theta: The name.

    Returns:
        ``theta``.

    Raises:
        InputError: If it does not; the message lists those that exist.
    """
    if theta not in THETAS:
        raise InputError(f"unknown Θ {theta!r}; choose one of {', '.join(THETAS)}")
    return theta


def norm_order(theta: str) -> int:
    """Return p of the Lₚ norm over pairs that a Θ variant divides a row by: 1 or 2.

    The p-th power of that norm is a sum over pairs. Hence τᵖ is what has to follow that sum where
    pairs come or go and the others are to keep their weight.

    Args:
        theta: Name of the variant.

    Raises:
        InputError: If the variant is unknown.
    """
    return VARIANTS[check_theta(theta)].norm_order


def norm_shares(scores: Tensor, weights: Tensor, theta: str) -> Tensor:
    """Return the share of each pair in the sum of p-th powers that Θ divides a row by.

    Args:
        scores: (..., P) scores in float32 or float64.
        weights: (..., P) weights of these scores, of a gate too if there is one.
        theta: Name of the variant.

    Returns:
        (..., P) shares that sum to 1 along the last axis, or are all 0 where the sum is 0.

    Raises:
        InputError: If the variant is unknown.
    """
    variant = VARIANTS[check_theta(theta)]
    normed = scores if variant.normalizes_scores else weights
    powers = normed.abs() ** variant.norm_order
    tiny = torch.finfo(powers.dtype).tiny
    return powers / powers.sum(dim=-1, keepdim=True).clamp(min=tiny)


def second_moment(theta: str) -> float:
    """Return E[Θ(A)²] of a weight for standard normal scores and the default τ.

    Args:
        theta: Name of the variant.

    Raises:
        InputError: If the variant is unknown.
    """
    return VARIANTS[check_theta(theta)].second_moment


def default_tau(theta: str, num_param_tokens: int) -> float:
    """Return the τ a layer of P parameter tokens starts with: P under an L1 norm, √P under L2.

    It is a constant of the layer from then on. A τ that followed P while a model grows would
    change what the model computes (arXiv:2410.23168v2, Appendix B).

    Args:
        theta: Name of the variant.
        num_param_tokens: P, at least 1.

    Raises:
        InputError: If the variant is unknown.
    """
    return float(num_param_tokens) if norm_order(theta) == 1 else math.sqrt(num_param_tokens)
