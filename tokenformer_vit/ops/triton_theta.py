"""Θ = ``gelu_l2`` in two Triton kernels, one for each direction; for NVIDIA GPUs.

Both read a row once, hold it in registers, and write their results once. A row of P entries is
split into two power-of-two blocks, and only the second is masked: 576 = 512 + 64 leaves no idle
lane, but a single block would be padded to 1024. README.md in this folder counts the savings.

The functions are registered with PyTorch, so torch.compile does not trace into them.
"""

# Pyright does not know that Triton decides `if` on a constexpr, or that all of this needs Triton.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
from __future__ import annotations  # without Triton there is no tl for annotations

from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

from .fused import flat
from .kernels import Kernels

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # a call raises an error
    triton = None

MAX_PARAM_TOKENS = 16384
"""The longest row: its backward uses all registers of a block of threads."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _kernel(function):
    if triton is None:
        return function
    # A kernel works for any number of rows and need not be compiled for each.
    return triton.jit(do_not_specialize=["num_rows"])(function)


@_kernel
def _exp2(x, PTX: constexpr):
    """Return 2ˣ; with PTX by NVIDIA's instruction, which other GPUs and the interpreter lack.

    Flushing results below 1e-38 to zero saves three instructions and does no harm here.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@_kernel
def _reciprocal(x, PTX: constexpr):
    """Return 1 / x for x ≥ 1, without the range checks of a division (four instructions)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@_kernel
def _normal(z, PTX: constexpr):
    """Return the density φ(z) of the normal distribution and its tail 1 - Φ(|z|).

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17 (for erf, 7.1.26),
    has this form with five terms and an error of 7.5e-8 in Φ, which is visible in float32. These
    six terms minimise the maximum of max(1, |z|) times the error: 1.2e-8.
    """
    # exp(-z²/2) / √(2π); the constants are log2(e) / 2 and log2(√(2π)).
    density = _exp2(tl.fma(z * -0.7213475204444817, z, -1.3257480647361592), PTX)
    t = _reciprocal(tl.fma(tl.abs(z), 0.275, 1.0), PTX)
    ratio = tl.fma(t, -0.286170136, 1.12588669)
    ratio = tl.fma(t, ratio, -0.818132021)
    ratio = tl.fma(t, ratio, 0.827735057)
    ratio = tl.fma(t, ratio, 0.109281564)
    ratio = tl.fma(t, ratio, 0.294713013) * t
    return density, ratio * density


@_kernel
def _gelu(z, tail):
    """Return zΦ(z), which is max(z, 0) - |z| (1 - Φ(|z|)) for either sign of z."""
    return tl.fma(-tl.abs(z), tail, tl.maximum(z, 0.0))


@_kernel
def _gelu_slope(z, density, tail):
    """Return gelu'(z) = Φ(z) + zφ(z)."""
    return tl.fma(z, density, tl.where(z < 0, tail, 1.0 - tail))


@_kernel
def _rows(num_rows, ROWS: constexpr):
    """Return the rows of this program, a number or (ROWS, 1), and which of them exist."""
    first = tl.program_id(0).to(tl.int64) * ROWS  # 64 bits: R · P may exceed 2³¹
    if ROWS == 1:
        return first, True
    else:
        rows = first + tl.arange(0, ROWS)[:, None]
        return rows, rows < num_rows


@_kernel
def _columns(start: constexpr, size: constexpr, ROWS: constexpr):
    columns = start + tl.arange(0, size)
    if ROWS == 1:
        return columns
    else:
        return columns[None, :]


@_kernel
def _row_sum(x, ROWS: constexpr):
    if ROWS == 1:
        return tl.sum(x, axis=0)
    else:
        return tl.sum(x, axis=1, keep_dims=True)


@_kernel
def _forward_kernel(
    scores, tau, weights, factor, eps, num_rows,
    P: constexpr, LEFT: constexpr, RIGHT: constexpr, ROWS: constexpr,
    PTX: constexpr,
):  # fmt: skip
    """Write weights (R, P) and factor (R, 1), ROWS rows in each program; see _layout and _exp2."""
    rows, there = _rows(num_rows, ROWS)
    left = rows * P + _columns(0, LEFT, ROWS)
    s_left = tl.load(scores + left, mask=there, other=0.0).to(tl.float32)
    squares = _row_sum(s_left * s_left, ROWS)
    if RIGHT > 0:
        columns = _columns(LEFT, RIGHT, ROWS)
        right, inside = rows * P + columns, there & (columns < P)
        s_right = tl.load(scores + right, mask=inside, other=0.0).to(tl.float32)
        squares += _row_sum(s_right * s_right, ROWS)

    scale = tl.load(tau).to(tl.float32)
    r = tl.rsqrt(squares / (scale * scale) + eps)
    tl.store(factor + rows, r, mask=there)

    dtype = weights.dtype.element_ty
    z_left = s_left * r
    _, tail_left = _normal(z_left, PTX)
    tl.store(weights + left, _gelu(z_left, tail_left).to(dtype), mask=there)
    if RIGHT > 0:
        z_right = s_right * r
        _, tail_right = _normal(z_right, PTX)
        tl.store(weights + right, _gelu(z_right, tail_right).to(dtype), mask=inside)


@_kernel
def _backward_kernel(
    scores, factor, tau, grad, weights, num_rows,
    P: constexpr, LEFT: constexpr, RIGHT: constexpr, ROWS: constexpr,
    PTX: constexpr,
):  # fmt: skip
    """Write weights (R, P); replace the weights' gradient in grad by the scores' gradient."""
    rows, there = _rows(num_rows, ROWS)
    dtype = weights.dtype.element_ty
    r = tl.load(factor + rows, mask=there, other=0.0)

    left = rows * P + _columns(0, LEFT, ROWS)
    z_left = tl.load(scores + left, mask=there, other=0.0).to(tl.float32) * r
    g_left = tl.load(grad + left, mask=there, other=0.0).to(tl.float32)
    density_left, tail_left = _normal(z_left, PTX)
    tl.store(weights + left, _gelu(z_left, tail_left).to(dtype), mask=there)
    g_left *= _gelu_slope(z_left, density_left, tail_left)
    dot = _row_sum(g_left * z_left, ROWS)
    if RIGHT > 0:
        columns = _columns(LEFT, RIGHT, ROWS)
        right, inside = rows * P + columns, there & (columns < P)
        z_right = tl.load(scores + right, mask=inside, other=0.0).to(tl.float32) * r
        g_right = tl.load(grad + right, mask=inside, other=0.0).to(tl.float32)
        density_right, tail_right = _normal(z_right, PTX)
        tl.store(weights + right, _gelu(z_right, tail_right).to(dtype), mask=inside)
        g_right *= _gelu_slope(z_right, density_right, tail_right)
        dot += _row_sum(g_right * z_right, ROWS)

    scale = tl.load(tau).to(tl.float32)
    c = r * dot / (scale * scale)
    tl.store(grad + left, (r * g_left - c * z_left).to(dtype), mask=there)
    if RIGHT > 0:
        tl.store(grad + right, (r * g_right - c * z_right).to(dtype), mask=inside)


# With TRITON_INTERPRET=1 a kernel has another type.
_INTERPRETED = triton is not None and not isinstance(_forward_kernel, triton.JITFunction)
_PTX = not _INTERPRETED and torch.version.cuda is not None


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
    # A thread keeps 32 numbers, or up to 48 with the second block. A program of one warp needs no
    # barrier for its sums, so it processes several short rows.
    elements = 1024 // kept
    rows = max(1, min(64, elements // left))
    warps = max(1, rows * (left + right) // elements)
    num_warps = 1 << (warps.bit_length() - 1)
    return {"LEFT": left, "RIGHT": right, "ROWS": rows, "num_warps": num_warps}


def _launch(kernel: Any, kept: int, scores: Tensor, *arguments: Tensor | float) -> None:
    num_rows, num_param_tokens = scores.shape
    if num_rows == 0:
        return
    layout = _layout(num_param_tokens, kept)
    grid = (-(-num_rows // layout["ROWS"]),)
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        kernel[grid](
            scores,
            *arguments,
            num_rows,
            P=num_param_tokens,
            PTX=_PTX,
            enable_fp_fusion=True,  # the default depends on the version of Triton
            **layout,
        )


@torch.library.custom_op(
    "tokenformer_vit::gelu_l2_forward",
    mutates_args=(),
    schema="(Tensor scores, Tensor tau, float eps) -> (Tensor, Tensor)",
)
def _forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    weights = torch.empty_like(scores)
    factor = torch.empty(scores.shape[0], 1, dtype=torch.float32, device=scores.device)
    _launch(_forward_kernel, 1, scores, tau, weights, factor, eps)
    return weights, factor


@_forward.register_fake
def _(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return weights, scores.new_empty(scores.shape[0], 1, dtype=torch.float32)


# The gradient overwrites the incoming one, which is not read again. This saves one in four of the
# (R, P) tensors alive at the peak of a training step. torch.compile knows of it and adds no copy,
# unless it pads rows, as PyTorch before 2.8 may.
@torch.library.custom_op(
    "tokenformer_vit::gelu_l2_backward",
    mutates_args=("grad",),
    schema="(Tensor scores, Tensor factor, Tensor tau, Tensor(a!) grad) -> Tensor",
)
def _backward(scores: Tensor, factor: Tensor, tau: Tensor, grad: Tensor) -> Tensor:
    scores, rows = scores.contiguous(), grad.contiguous()
    weights = torch.empty_like(scores)
    _launch(_backward_kernel, 2, scores, factor.contiguous(), tau, rows, weights)
    if rows is not grad:
        grad.copy_(rows)
    return weights


@_backward.register_fake
def _(scores: Tensor, factor: Tensor, tau: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _check(scores: Tensor, tau: Tensor) -> None:
    """Raise InputError if the kernels cannot be used with these scores."""
    if triton is None:
        raise InputError("the triton backend needs Triton: pip install triton, or choose fused")
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


def gelu_l2_forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute Θ = gelu(r A), with one factor r = 1 / √(‖A‖² / τ² + eps) for each row.

    Args:
        scores: (R, P) float32, float16 or bfloat16 scores, P at most :data:`MAX_PARAM_TOKENS`;
            copied if not contiguous. R may be 0.
        tau: 0-dim tensor on the device of ``scores``. The kernel reads it, so the CPU does not
            wait for its value.
        eps: Number of at least 0; with 0 a row of zeros gives NaN.

    Returns:
        (R, P) weights of the dtype of ``scores``, and the (R, 1) float32 factors r.

    Raises:
        InputError: If Triton is missing, or does not support this device, dtype or size.

    Note:
        Everything between reading the scores and rounding the weights once is float32. erf is an
        approximation with a smaller error than float32 GELUs. Reruns are bit-equal. No
        gradient is registered: :func:`gelu_l2_backward` computes it.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 5 and 6.
    """
    _check(scores, tau)
    return _forward(scores, tau, eps)


def gelu_l2_backward(
    scores: Tensor, factor: Tensor, tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of Θ, and Θ again, which costs less than keeping it.

    With z = r A and g = gelu'(z) ∘ dΘ, dA = r (g - z (g · z) / τ²).

    Args:
        scores: (R, P) scores, as in :func:`gelu_l2_forward`.
        factor: (R, 1) float32 factors r, the second result of the forward.
        tau: 0-dim tensor, as in the forward.
        grad_weights: (R, P) gradient of the weights, in the dtype of ``scores``. If contiguous, it
            is overwritten by the gradient of the scores, otherwise copied.

    Returns:
        (R, P) weights and (R, P) gradient of the scores, both of the dtype of ``scores``.

    Raises:
        InputError: As in the forward, or if ``grad_weights`` or ``factor`` has a wrong shape or
            dtype.

    Note:
        Precision as in the forward. Reruns are bit-equal.

    Source:
        README.md in this folder derives the gradient.
    """
    _check(scores, tau)
    for name, tensor, shape, dtype in (
        ("factor", factor, (scores.shape[0], 1), torch.float32),
        ("grad_weights", grad_weights, scores.shape, scores.dtype),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise InputError(
                f"{name} must be {tuple(shape)} {dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )
    grad = grad_weights.contiguous()
    return _backward(scores, factor, tau, grad), grad


def _theta_forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    weights, factor = gelu_l2_forward(flat(scores), tau, eps)
    return weights.view(scores.shape), (scores, factor)


def _theta_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor]:
    scores, factor = kept
    # Under autocast the incoming gradient has autocast's precision.
    grad = flat(grad_weights).to(scores.dtype)
    both = gelu_l2_backward(flat(scores), factor, tau, grad)
    weights, grad_scores = (tensor.view(scores.shape) for tensor in both)
    return weights, grad_scores


KERNELS = {"gelu_l2": Kernels(_theta_forward, _theta_backward)}
"""The variants that have Triton kernels; the others use those of ``kernels.py``."""
