"""Pattention in plain PyTorch: the ground truth that every other path is tested against."""

import torch.nn.functional as F
from torch import Tensor

from .theta import theta_weights


def pattention_reference(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Let input tokens attend to parameter tokens: Θ(X K_Pᵀ) V_P.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: Number added to the divisor of a row, relative to ``tau``.
        gate: (P,) factors on exp(A), only for a variant with gates.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        ValueError: If the variant is unknown, or ``gate`` is given and the variant has no gate.

    Note:
        The two products run in the precision of their operands (of autocast, if it is on), and Θ
        in float32. float64 inputs stay float64.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    scores = F.linear(x, key_param_tokens)  # (..., P)
    weights = theta_weights(scores, theta, tau, eps, gate)  # (..., P)
    return F.linear(weights, value_param_tokens.t())  # (..., C_out)
