"""Pattention, Θ(X Kᵀ) V, as a function on tensors: two ordinary products with Θ between them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .modes import plain_only
from .theta import theta_weights
from .theta_grad import GeluL2


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
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the Θ variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer; see :func:`default_tau`.
        eps: Number added to the divisor of a row, relative to ``tau``.

    Returns:
        (..., C_out) output tokens, in the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        InputError: If ``theta`` is unknown.

    Note:
        Θ is computed in float32 and rounded once, the products in the precision of their operands
        or of autocast. float64 inputs stay float64. All derivatives are exact.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    scores = F.linear(x, key_param_tokens)  # (..., P)
    if theta != "gelu_l2" or plain_only():
        weights = theta_weights(scores, theta, tau, eps)
    elif torch.is_grad_enabled() and (scores.requires_grad or tau.requires_grad):
        weights = GeluL2.apply(scores, tau, eps)
    else:
        weights = GeluL2.forward(None, scores, tau, eps)
    return weights @ value_param_tokens  # (..., C_out)
