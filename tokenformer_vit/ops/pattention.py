"""Pattention, Θ(X Kᵀ) V, as a function on tensors: two ordinary products with Θ between them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .modes import plain_only, product_dtype
from .theta import GeluL2, find_theta

MANY = 2**30  # stands for any large number of tokens


def pattention(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float = 1e-6,
    score_bias: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Let input tokens attend to parameter tokens: Θ(X K_Pᵀ + score_bias) V_P + bias.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the Θ variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer; see :func:`default_tau`.
        eps: Number added to the divisor of a row, relative to ``tau``.
        score_bias: (P,) numbers added to the scores, or ``None``. Θ ``linear`` has none.
        bias: (C_out,) numbers added to the outputs, or ``None``.

    Returns:
        (..., C_out) output tokens, in the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        InputError: If ``theta`` is unknown.

    Note:
        Θ is computed in float32 and rounded once, the products in the precision of their operands
        or of autocast. float64 inputs stay float64. All derivatives are exact.

    Source: TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    if theta == "linear":
        tokens = MANY if plain_only() else x.numel() // x.shape[-1]  # traces serve any number
        if product_is_cheaper(key_param_tokens, value_param_tokens, tokens):
            return F.linear(x, linear_weight(key_param_tokens, value_param_tokens), bias)
    scores = F.linear(x, key_param_tokens, score_bias)  # (..., P)
    if theta != "gelu_l2" or plain_only():
        weights = find_theta(theta).weights(scores, tau, eps)
    elif torch.is_grad_enabled() and (scores.requires_grad or tau.requires_grad):
        weights = GeluL2.apply(scores, tau, eps)
    else:
        weights = GeluL2.forward(None, scores, tau, eps)
    if bias is None:  # a view, as in a linear layer, would miss autocast's cache of casts
        return weights @ value_param_tokens  # (..., C_out)
    return F.linear(weights, value_param_tokens.t(), bias)


def product_is_cheaper(keys: Tensor, values: Tensor, tokens: int = MANY) -> bool:
    """Return whether Vᵀ K and one product with it cost less than two, for a number of tokens."""
    pairs, inner, outer = len(keys), keys.shape[1], values.shape[1]
    return pairs * (inner + outer) * tokens > inner * outer * (tokens + pairs)


def linear_weight(keys: Tensor, values: Tensor) -> Tensor:
    """Return the weight (C_out, C_in) of linear tokens, rounded once under autocast."""
    if product_dtype(keys) == keys.dtype:
        return values.t() @ keys
    with torch.autocast(keys.device.type, enabled=False):
        return values.t() @ keys
