"""Pattention and the LayerNorm before it, as functions on tensors; needs torch alone.

Both choose one of several implementations that compute the same: ``backend`` forces one, and where
it is left at ``auto`` the environment variable ``PATTENTION_BACKEND`` does, read when this module
is imported.

========= ==============================================================================
reference plain PyTorch, the ground truth; TorchScript and ``torch.jit.trace`` always get it
fused     hand-written gradients that keep less; ``auto`` means this one
triton    as fused, with ``gelu_l2`` in Triton kernels where τ is not learned; NVIDIA GPUs
          only, never by itself
========= ==============================================================================
"""

import os

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

from .fused import pattention_fused
from .norm import layer_norm_fused, layer_norm_reference
from .reference import pattention_reference
from .theta import (
    THETAS,
    check_theta,
    default_tau,
    norm_order,
    norm_shares,
    second_moment,
    theta_weights,
)
from .top_k import pattention_top_k

__all__ = [
    "BACKENDS",
    "THETAS",
    "check_backend",
    "check_theta",
    "default_tau",
    "layer_norm",
    "norm_order",
    "norm_shares",
    "pattention",
    "pattention_reference",
    "pattention_top_k",
    "second_moment",
    "theta_weights",
]

BACKENDS = ("auto", "reference", "fused", "triton")
_ENVIRONMENT = "PATTENTION_BACKEND"
_DEFAULT = os.environ.get(_ENVIRONMENT) or "auto"


def check_backend(backend: str) -> str:
    """Return the name of a backend if there is such a backend; check the environment's, too.

    Args:
        backend: One of ``BACKENDS``.

    Returns:
        ``backend``.

    Raises:
        InputError: If it, or the value of ``PATTENTION_BACKEND``, is none of those.
    """
    for name, where in ((backend, "backend"), (_DEFAULT, _ENVIRONMENT)):
        if name not in BACKENDS:
            raise InputError(f"unknown {where} {name!r}; choose one of {', '.join(BACKENDS)}")
    return backend


def _choose(backend: str) -> str:
    check_backend(backend)
    if torch.jit.is_tracing():
        return "reference"  # a trace keeps an autograd function as a call that it cannot save
    if backend == "auto":
        backend = _DEFAULT
    return "fused" if backend == "auto" else backend


def _pattention(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
    backend: str,
    gate: Tensor | None,
) -> Tensor:
    check_theta(theta)
    backend = _choose(backend)
    # A gate is there for a while, or for softmax alone: plain autograd is good enough for it.
    if backend == "reference" or gate is not None:
        return pattention_reference(x, keys, values, theta, tau, eps, gate)
    if backend == "fused":
        return pattention_fused(x, keys, values, theta, tau, eps)
    from .triton_theta import KERNELS

    return pattention_fused(x, keys, values, theta, tau, eps, KERNELS)


def _layer_norm(x: Tensor, num_channels: int, eps: float, backend: str) -> Tensor:
    if _choose(backend) == "reference":
        return layer_norm_reference(x, num_channels, eps)
    return layer_norm_fused(x, num_channels, eps)


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
        key_param_tokens: (P, C_in).
        value_param_tokens: (P, C_out).
        theta: Name of the Θ variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer; see :func:`default_tau`.
        eps: Added where Θ divides, relative to ``tau``.
        backend: ``auto``, ``reference``, ``fused`` or ``triton``; see the module's description.
        gate: (P,), for ``softmax`` alone: how far each pair is opened, 0 being not at all. It is
            computed by the reference whatever the backend.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        ValueError: If the variant or the backend is unknown, or the backend cannot serve here.

    Note:
        Θ is computed in float32, the two products in the precision of their operands or of
        autocast; float64 inputs stay float64.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    if torch.jit.is_scripting():
        return pattention_reference(x, key_param_tokens, value_param_tokens, theta, tau, eps, gate)
    else:  # what TorchScript does not read has to stand in a branch
        return _pattention(x, key_param_tokens, value_param_tokens, theta, tau, eps, backend, gate)


def layer_norm(x: Tensor, num_channels: int, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """Normalise tokens over their last axis, without learnable parameters.

    Args:
        x: (..., C) tokens.
        num_channels: C.
        eps: Added to the variance.
        backend: As for :func:`pattention`; ``triton`` is ``fused`` here.

    Returns:
        (..., C) tokens. Under autocast ``fused`` gives them in the precision of autocast, which is
        that of the products behind the norm, and ``reference`` in float32, as PyTorch does.

    Raises:
        ValueError: If the backend is unknown.
        RuntimeError: If the last axis is not of size C.

    Note:
        Mean and variance are accumulated in float32; float64 inputs stay float64. ``fused`` keeps
        its output for the backward, so that it must not be changed in place.
    """
    if torch.jit.is_scripting():
        return layer_norm_reference(x, num_channels, eps)
    else:
        return _layer_norm(x, num_channels, eps, backend)
