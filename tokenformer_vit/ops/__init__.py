"""Pattention, the norm before it, and attention, as functions on tensors; needs only torch.

Pattention and norm have several implementations that compute the same. ``backend`` chooses one. If
it is ``auto``, the environment variable ``PATTENTION_BACKEND`` chooses; it is read at import.

========= ==============================================================================
reference plain PyTorch, the ground truth; ``torch.jit.trace`` and TorchScript always use it
fused     hand-written gradients that keep less memory; what ``auto`` means
triton    ``fused`` with Triton kernels for Θ; NVIDIA GPUs only
========= ==============================================================================
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

from .compilation import compiled_for_cpu
from .fused import pattention_fused, pattention_fused_joint
from .kernels import Kernels
from .norm import layer_norm_reference, norm_fused, rms_norm_reference
from .products import is_few, linear
from .reference import pattention_reference
from .theta import THETAS, default_tau, find_theta, norm_shares, theta_weights
from .token_attention import attention

__all__ = [
    "BACKENDS",
    "THETAS",
    "attention",
    "check_backend",
    "default_tau",
    "find_theta",
    "is_few",
    "layer_norm",
    "linear",
    "norm_shares",
    "pattention",
    "pattention_joint",
    "pattention_reference",
    "rms_norm",
    "theta_weights",
]

BACKENDS = ("auto", "reference", "fused", "triton")
_ENVIRONMENT = "PATTENTION_BACKEND"
_DEFAULT = os.environ.get(_ENVIRONMENT) or "auto"


def check_backend(backend: str) -> str:
    """Return the name of a backend if it exists; check ``PATTENTION_BACKEND`` as well.

    Args:
        backend: One of ``BACKENDS``.

    Returns:
        ``backend``.

    Raises:
        InputError: If it, or the value of ``PATTENTION_BACKEND``, is not one of ``BACKENDS``.
    """
    for name, where in ((backend, "backend"), (_DEFAULT, _ENVIRONMENT)):
        if name not in BACKENDS:
            raise InputError(f"{where} must be one of {', '.join(BACKENDS)}, but got {name!r}")
    return backend


def _choose(backend: str) -> str:
    if backend not in BACKENDS or _DEFAULT not in BACKENDS:
        check_backend(backend)
    if torch._C._get_tracing_state():  # torch.jit.is_tracing(), in one call instead of three
        return "reference"  # a trace with a Python autograd function cannot be saved
    return _DEFAULT if backend == "auto" else backend


def _kernels(backend: str, x: Tensor, theta: str, num_param_tokens: int) -> Kernels | None:
    """Return the kernels of a backend for P pairs; None stands for those of the variant."""
    if backend != "triton":
        return None
    from .triton_theta import KERNELS, MAX_PARAM_TOKENS  # the import of Triton takes a while

    return KERNELS.get(theta) if num_param_tokens <= MAX_PARAM_TOKENS else None


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
        backend: One of ``BACKENDS``; see the module's description.
        gate: (P,) factors on exp(A), only for a variant with gates; 0 closes a pair. With a gate
            every backend computes the reference.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        ValueError: If the variant or the backend is unknown, the backend does not support these
            inputs, or ``gate`` is given and the variant has no gate.

    Note:
        Θ is computed in float32, the two products in the precision of their operands or of
        autocast; float64 inputs stay float64.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4.
    """
    backend = _choose(backend)
    # Few layers have a gate, most of them for a short time: plain autograd is good enough.
    if backend == "reference" or gate is not None:
        return pattention_reference(x, key_param_tokens, value_param_tokens, theta, tau, eps, gate)
    if x.is_cuda or backend == "triton":
        kernels = _kernels(backend, x, theta, len(key_param_tokens))
    else:
        kernels = None
    return pattention_fused(x, key_param_tokens, value_param_tokens, theta, tau, eps, kernels)


def _are_alike(key_param_tokens: Sequence[Tensor]) -> bool:
    first = key_param_tokens[0]
    pairs, trained = first.size(0), first.requires_grad  # len() would be a call in Python
    for keys in key_param_tokens:
        if keys.size(0) != pairs or keys.requires_grad != trained:
            return False
    return True


def pattention_joint(
    x: Tensor,
    key_param_tokens: Sequence[Tensor],
    value_param_tokens: Sequence[Tensor],
    theta: str,
    tau: Sequence[Tensor],
    eps: float = 1e-6,
    backend: str = "auto",
    few: bool = False,
) -> tuple[Tensor, ...]:
    """Compute Pattention layers that have the same input, such as query, key and value.

    With ``fused`` and ``triton``, one product gives the scores of all layers, and one gives the
    gradient of ``x``. This needs as many pairs in each layer, and keys that all need a gradient or
    all need none. Otherwise each layer is computed alone.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys of each layer.
        value_param_tokens: (P, C_out) values of each layer.
        theta: Name of the Θ variant of all layers, a key of ``THETAS``.
        tau: 0-dim tensor of each layer, its stored scale.
        eps: Number added to the divisor of a row, relative to ``tau``.
        backend: Implementation, as for :func:`pattention`.
        few: If no gradient is needed, let each layer have its own product, and all share one Θ:
            faster if :func:`is_few`.

    Returns:
        (..., C_out) output tokens of each layer, as :func:`pattention` returns them up to rounding.

    Raises:
        ValueError: If the variant or the backend is unknown, or the backend does not support these
            inputs.

    Note:
        The precision is that of :func:`pattention`. Without ``few``, the keys are copied into one
        tensor at each call and in the backward.

    Source:
        README.md in this folder.
    """
    chosen = _choose(backend)
    several = len(key_param_tokens) > 1
    if several and chosen != "reference" and _are_alike(key_param_tokens):
        kernels = None
        if x.is_cuda or chosen == "triton":
            kernels = _kernels(chosen, x, theta, key_param_tokens[0].size(0))
        return pattention_fused_joint(
            x, key_param_tokens, value_param_tokens, theta, tau, eps, kernels, few
        )
    return tuple(
        pattention(x, keys, values, theta, own_tau, eps, backend)
        for keys, values, own_tau in zip(key_param_tokens, value_param_tokens, tau, strict=True)
    )


def layer_norm(x: Tensor, num_channels: int, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """Normalise tokens over their last axis, without learnable parameters.

    Args:
        x: (..., C) tokens.
        num_channels: C.
        eps: Number added to the variance.
        backend: Name of a backend, as for :func:`pattention`; ``triton`` means ``fused``
            here.

    Returns:
        (..., C) tokens. Under autocast ``fused`` returns them in the precision of autocast, which
        the products after the norm use; ``reference`` returns float32, as PyTorch does.

    Raises:
        ValueError: If the backend is unknown.
        RuntimeError: If the last axis is not of size C.

    Note:
        Mean and variance are accumulated in float32; float64 inputs stay float64. ``fused`` keeps
        its output for the backward, so do not change the output in place.
    """
    if torch.jit.is_scripting():
        return layer_norm_reference(x, num_channels, eps)
    else:  # TorchScript must not compile this branch
        if _choose(backend) == "reference" or (
            # norm_fused() does the same after more calls, which take time in decoding.
            x.dtype == torch.float32
            and not (x.requires_grad and torch.is_grad_enabled())
            and not torch._C._is_any_autocast_enabled()
            and not compiled_for_cpu(x)
        ):
            return layer_norm_reference(x, num_channels, eps)
        return norm_fused(x, num_channels, eps, centred=True)


def rms_norm(x: Tensor, num_channels: int, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """Divide tokens by the root of their mean square, without learnable parameters.

    Args:
        x: (..., C) tokens.
        num_channels: C.
        eps: Number added to the mean square.
        backend: Name of a backend, as for :func:`layer_norm`.

    Returns:
        (..., C) tokens, of the dtype that :func:`layer_norm` returns.

    Raises:
        ValueError: If the backend is unknown.
        RuntimeError: If the last axis is not of size C.

    Source:
        Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    if torch.jit.is_scripting():
        return rms_norm_reference(x, num_channels, eps)
    else:  # TorchScript must not compile this branch
        if _choose(backend) == "reference":
            return rms_norm_reference(x, num_channels, eps)
        return norm_fused(x, num_channels, eps, centred=False)
