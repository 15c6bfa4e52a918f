"""Pattention as a function on tensors; needs torch alone."""

from torch import Tensor

from .reference import pattention_reference
from .theta import THETAS, check_theta, default_tau

__all__ = ["THETAS", "check_theta", "default_tau", "pattention", "pattention_reference"]


def pattention(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float = 1e-6,
) -> Tensor:
    """Compute Θ(X K_Pᵀ) V_P; arguments and result as in :func:`pattention_reference`."""
    return pattention_reference(x, key_param_tokens, value_param_tokens, theta, tau, eps)
