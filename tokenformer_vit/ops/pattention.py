"""Pattention, Θ(X Kᵀ) V, as a function on tensors: two ordinary products with Θ between them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer_vit.errors import InputError

from .norm import is_exporting
from .theta import theta_weights
from .theta_grad import fast_gelu_l2

BACKENDS = ("auto", "reference")
# Variants with a gradient of their own, and the GELU of each.
_FAST = {"gelu_l2": "none", "gelu_tanh_l2": "tanh"}


def check_backend(backend: str) -> str:
    """Return the name of a backend, or raise InputError."""
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {', '.join(BACKENDS)}, but got {backend!r}")
    return backend


def pattention(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float = 1e-6,
    backend: str = "auto",
    gate: Tensor | None = None,
) -> Tensor:
    """Let input tokens attend to parameter tokens: Θ(X K_Pᵀ) V_P.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the Θ variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer; see :func:`default_tau`.
        eps: Number added to the divisor of a row, relative to ``tau``.
        backend: ``auto``, or ``reference`` for plain formulas: slower and with more memory, but
            with second derivatives and forward mode. Exports and traces always use them.
        gate: (P,) factors on exp(A), only for a variant with gates; 0 closes a pair.

    Returns:
        (..., C_out) output tokens, in the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        InputError: If ``theta`` is unknown, or has no gate and one is given.

    Note:
        Θ is computed in float32 and rounded once, the products in the precision of their operands
        or of autocast. float64 inputs stay float64.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    scores = F.linear(x, key_param_tokens)  # (..., P)
    plain = torch.jit.is_tracing() or is_exporting()
    if theta in _FAST and backend == "auto" and gate is None and not plain:
        weights = fast_gelu_l2(scores, tau, eps, _FAST[theta])
    else:
        weights = theta_weights(scores, theta, tau, eps, gate)
    return weights @ value_param_tokens  # (..., C_out)
