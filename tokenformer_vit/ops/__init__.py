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
    """Let input tokens attend to parameter tokens: Θ(X K_Pᵀ) V_P.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in).
        value_param_tokens: (P, C_out).
        theta: Name of the Θ variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer; see :func:`default_tau`.
        eps: Added where Θ divides, relative to ``tau``.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        ValueError: If the variant is unknown.

    Note:
        Θ is computed in float32, the two products in the precision of their operands or of
        autocast; float64 inputs stay float64.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    return pattention_reference(x, key_param_tokens, value_param_tokens, theta, tau, eps)
