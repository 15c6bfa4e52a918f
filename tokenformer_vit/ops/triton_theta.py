"""Θ by the kernels of ``triton_kernels.py``, in two operations that PyTorch knows.

torch.compile looks into the operations: Inductor allocates the results and launches the kernels by
itself. Exported programs keep the operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from tokenformer_vit.errors import InputError

from .fused import flat
from .kernels import Kernels
from .theta import THETAS
from .triton_kernels import backward_kernel, forward_kernel, triton

MAX_PARAM_TOKENS = 16384
"""The longest row: its backward uses all registers of a block of threads, and spills a few."""

VARIANTS = ("softmax", "gelu_l1", "gelu_l2", "gelu_l2_post", "gelu_tanh_l2")
"""The variants that the kernels compute."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# With TRITON_INTERPRET=1 a kernel has another type, which PyTorch cannot trace.
_INTERPRETED = triton is not None and not isinstance(forward_kernel, triton.JITFunction)
_PTX = not _INTERPRETED and torch.version.cuda is not None
_operation: Any = custom_op if _INTERPRETED else triton_op


def _layout(num_param_tokens: int, kept: int) -> dict[str, int]:
    """Choose the two blocks of a row, the rows of a program, and its warps.

    Args:
        num_param_tokens: P, 1 to ``MAX_PARAM_TOKENS``.
        kept: Number of values that a kernel keeps for each element of its rows.

    Returns:
        Arguments of the launch: LEFT and RIGHT (powers of two or 0 with a sum of at least P), ROWS
        and num_warps.
    """
    left = 1 << (num_param_tokens.bit_length() - 1)
    rest = num_param_tokens - left
    right = 1 << (rest - 1).bit_length() if rest else 0
    if right == left:  # one block of both needs fewer registers
        left, right = 2 * left, 0
    # A thread keeps up to 32 numbers, or 48 with the second block. A program of one warp needs no
    # barrier for its sums, so it processes several of the rows that are too short for a warp.
    elements = 1024 // kept
    rows = min(64, elements // left) if left < 256 else 1
    warps = max(1, rows * (left + right) // elements)
    num_warps = 1 << (warps.bit_length() - 1)
    return {"LEFT": left, "RIGHT": right, "ROWS": rows, "num_warps": num_warps}


def _launch(kernel: Any, kept: int, theta: str, scores: Tensor, tau: Tensor, *others: Any) -> None:
    # A program is compiled for one P, but for any number of rows, which may be symbolic here.
    num_rows, num_param_tokens = scores.shape[0], int(scores.shape[1])
    if num_rows == 0:
        return
    layout = _layout(num_param_tokens, kept)
    grid = (-(-num_rows // layout["ROWS"]),)
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        kernel[grid](
            scores,
            tau,
            *others,
            num_rows,
            THETA=theta,
            P=num_param_tokens,
            SEGMENTS=tau.numel(),
            PTX=_PTX,
            enable_fp_fusion=True,  # the default depends on the version of Triton
            **layout,
        )


def _row_numbers(scores: Tensor, numbers: int) -> Tensor:
    return torch.empty(scores.shape[0], numbers, dtype=torch.float32, device=scores.device)


def _num_factors(theta: str) -> int:
    return 2 if theta == "softmax" else 1


# PyTorch's caches of compiled code depend on the kernels that it finds here by their names.
@_operation(
    "tokenformer_vit::theta_forward",
    mutates_args=(),
    schema="(Tensor scores, str theta, Tensor tau, float eps) -> (Tensor, Tensor)",
)
def _forward(scores: Tensor, theta: str, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    weights, factors = torch.empty_like(scores), _row_numbers(scores, _num_factors(theta))
    kernel = forward_kernel if _INTERPRETED else wrap_triton(forward_kernel)
    _launch(kernel, 1, theta, scores, tau, weights, factors, eps)
    return weights, factors


@_forward.register_fake
def _(scores: Tensor, theta: str, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return weights, _row_numbers(scores, _num_factors(theta))


# The gradient overwrites the incoming one, which is not read again. This saves one in four of the
# (R, P) tensors alive at the peak of a training step. torch.compile knows of it and adds no copy.
@_operation(
    "tokenformer_vit::theta_backward",
    mutates_args=("grad",),
    schema="(Tensor scores, Tensor factors, str theta, Tensor tau, Tensor(a!) grad)"
    " -> (Tensor, Tensor)",
)
def _backward(
    scores: Tensor, factors: Tensor, theta: str, tau: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    scores, rows = scores.contiguous(), grad.contiguous()
    weights, dots = torch.empty_like(scores), _row_numbers(scores, 1)
    kernel = backward_kernel if _INTERPRETED else wrap_triton(backward_kernel)
    _launch(kernel, 2, theta, scores, tau, factors.contiguous(), rows, weights, dots)
    if rows is not grad:
        grad.copy_(rows)
    return weights, dots


@_backward.register_fake
def _(
    scores: Tensor, factors: Tensor, theta: str, tau: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return weights, _row_numbers(scores, 1)


def _check(scores: Tensor, theta: str, tau: Tensor) -> Tensor:
    """Return τ, contiguous; raise InputError if the kernels cannot be used with these scores."""
    if triton is None:
        raise InputError("the triton backend needs Triton: pip install triton, or choose fused")
    if theta not in VARIANTS:
        raise InputError(f"theta must be one of {', '.join(VARIANTS)}, but got {theta!r}")
    if scores.device.type == "cpu" and not _INTERPRETED:
        raise InputError(
            "the triton backend needs a GPU, but the scores are on the CPU: choose fused, or set "
            "TRITON_INTERPRET=1 for Triton's slow interpreter"
        )
    if tau.device != scores.device:
        raise InputError(f"tau is on {tau.device}, but the scores on {scores.device}: move tau")
    if scores.dtype not in _DTYPES:
        names = ", ".join(str(dtype) for dtype in _DTYPES)
        raise InputError(f"the triton backend needs {names}, not {scores.dtype}: choose fused")
    if scores.ndim != 2 or not 1 <= scores.shape[1] <= MAX_PARAM_TOKENS:
        raise InputError(
            f"the triton backend needs (rows, P) scores with P from 1 to {MAX_PARAM_TOKENS}, not "
            f"{tuple(scores.shape)}: choose fused"
        )
    if tau.numel() != 1 and (tau.numel() == 0 or scores.shape[0] % tau.numel()):
        raise InputError(
            f"the number of rows must be a multiple of the {tau.numel()} segments of tau, but it "
            f"is {scores.shape[0]}: give a tau to each segment"
        )
    return tau.contiguous()


def theta_forward(scores: Tensor, theta: str, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the weights Θ of scores, and the numbers of each row that its backward needs.

    Args:
        scores: (R, P) float32, float16 or bfloat16 scores, P at most :data:`MAX_PARAM_TOKENS`;
            copied if not contiguous. R may be 0.
        theta: Name of the variant, one of :data:`VARIANTS`.
        tau: Tensor of S numbers on the device of ``scores``: row r has the τ of segment r mod S,
            where S divides R. With S = 1 all rows have the same. The kernel reads it, so the CPU
            does not wait for its value.
        eps: Number of at least 0; with 0 a row of zeros gives NaN, except under softmax.

    Returns:
        (R, P) weights of the dtype of ``scores``, and (R, 1) float32 factors of the rows; for
        softmax (R, 2): the largest score of a row, and 1 / ‖exp(A - this score)‖₁.

    Raises:
        InputError: If Triton is missing, or does not support this variant, device, dtype or size.

    Note:
        Everything between reading the scores and rounding the weights once is float32. erf is an
        approximation with a smaller error than float32 GELUs. Reruns are bit-equal. No gradient is
        registered: :func:`theta_backward` computes it.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 5 and 6.
    """
    return _forward(scores, theta, _check(scores, theta, tau), eps)


def theta_backward(
    scores: Tensor, factors: Tensor, theta: str, tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of Θ, and Θ again, which costs less than keeping it.

    Args:
        scores: (R, P) scores, as in :func:`theta_forward`.
        factors: (R, 1) or (R, 2) float32 numbers of the rows, the second result of the forward.
        theta: Name of the variant.
        tau: Tensor of S numbers, as in the forward.
        grad_weights: (R, P) gradient of the weights, in the dtype of ``scores``. If contiguous, it
            is overwritten by the gradient of the scores, otherwise copied.

    Returns:
        (R, P) weights and (R, P) gradient of the scores, both of the dtype of ``scores``, and the
        (R, 1) float32 dot products in this gradient, which the gradient of τ needs.

    Raises:
        InputError: As in the forward, or if ``grad_weights`` or ``factors`` has a wrong shape or
            dtype.

    Note:
        Precision as in the forward. Reruns are bit-equal.

    Source:
        README.md in this folder derives the gradients.
    """
    tau = _check(scores, theta, tau)
    for name, tensor, shape, dtype in (
        ("factors", factors, (scores.shape[0], _num_factors(theta)), torch.float32),
        ("grad_weights", grad_weights, scores.shape, scores.dtype),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise InputError(
                f"{name} must be {tuple(shape)} {dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )
    grad = grad_weights.contiguous()
    weights, dots = _backward(scores, factors, theta, tau, grad)
    return weights, grad, dots


def _theta_forward(
    scores: Tensor, tau: Tensor, eps: float, theta: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    weights, factors = theta_forward(flat(scores), theta, tau, eps)
    return weights.view(scores.shape), (scores, factors.view(*scores.shape[:-1], factors.shape[-1]))


def _theta_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor, theta: str
) -> tuple[Tensor, Tensor, Tensor]:
    scores, factors = kept
    # Under autocast the incoming gradient has autocast's precision.
    grad = flat(grad_weights).to(scores.dtype)
    weights, grad, dots = theta_backward(flat(scores), flat(factors), theta, tau, grad)
    shape = scores.shape
    return weights.view(shape), grad.view(shape), dots.view(*shape[:-1], 1)


def _kernels(theta: str) -> Kernels:
    plain = THETAS[theta].kernels
    assert plain is not None
    forward = partial(_theta_forward, theta=theta)
    return plain._replace(forward=forward, backward=partial(_theta_backward, theta=theta))


KERNELS = {theta: _kernels(theta) for theta in VARIANTS}
"""The kernels of each variant, for P up to :data:`MAX_PARAM_TOKENS`.

They take scores (..., P) with a 0-dim τ, or scores (..., S, P) with a τ (S, 1) for S segments.
"""
