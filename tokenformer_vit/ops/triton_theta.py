"""Θ ``gelu_l2`` and its gradient in two Triton kernels, for NVIDIA GPUs.

Each kernel reads a row once, holds it in registers, and writes its result once. A row of P entries
is split into two power-of-two blocks where that pads less: 576 = 512 + 64, not one block of 1024.
"""

# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations  # without Triton there is no tl for annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op, triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs and for Windows comes without it
    triton = None

MAX_PARAM_TOKENS = 16384  # the backward of a longer row would spill many registers
_PLAIN = (Tensor, nn.Parameter)

# A kernel works for any number of rows and need not be compiled for each.
_kernel: Any = triton.jit(do_not_specialize=["num_rows"]) if triton else lambda function: function


@_kernel
def _fast(name: tl.constexpr, x, PTX: tl.constexpr):
    """Compute 2ˣ (ex2), or 1 / x for x ≥ 1 (rcp), on NVIDIA by one instruction without checks."""
    if PTX:
        code: tl.constexpr = name + ".approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x) if name == "ex2" else 1.0 / x


@_kernel
def _gelu(z, PTX: tl.constexpr):
    """Return gelu(z) and its slope; the compiler leaves out the one that is not used.

    Both need the density φ(z) of the normal distribution and its tail 1 - Φ(|z|), in the form of
    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17 (7.1.26 for erf). Their five
    terms have an error of 7.5e-8 in Φ, visible in float32; these six minimise the maximum of
    max(1, |z|) times the error: 1.2e-8.
    """
    # exp(-z²/2) / √(2π); the constants are log2(e) / 2 and log2(√(2π)).
    density = _fast("ex2", tl.fma(z * -0.7213475204444817, z, -1.3257480647361592), PTX)
    t = _fast("rcp", tl.fma(tl.abs(z), 0.275, 1.0), PTX)
    ratio = tl.fma(t, -0.286170136, 1.12588669)
    ratio = tl.fma(t, ratio, -0.818132021)
    ratio = tl.fma(t, ratio, 0.827735057)
    ratio = tl.fma(t, ratio, 0.109281564)
    ratio = tl.fma(t, ratio, 0.294713013) * t
    tail = ratio * density
    slope = tl.fma(z, density, tl.where(z < 0, tail, 1.0 - tail))  # Φ(z) + zφ(z)
    # zΦ(z) is max(z, 0) - |z| (1 - Φ(|z|)) for either sign of z.
    return tl.fma(-tl.abs(z), tail, tl.maximum(z, 0.0)), slope


@_kernel
def _read(scores, start: tl.constexpr, size: tl.constexpr, rows, there, P: tl.constexpr):
    """Return the offsets of some columns, which of them are no padding, and their scores."""
    columns = start + tl.arange(0, size)[None, :]
    offsets = rows * P + columns
    inside = there if start + size <= P else there & (columns < P)
    return offsets, inside, tl.load(scores + offsets, mask=inside, other=0.0).to(tl.float32)


@_kernel
def forward_kernel(
    scores, tau, eps, weights, factors, num_rows,
    P: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Write weights (R, P) and factors (R, 1), ROWS rows in each program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # R · P may be > 2³¹
    there = rows < num_rows
    left, in_left, a_left = _read(scores, 0, LEFT, rows, there, P)
    total = tl.sum(a_left * a_left, axis=1, keep_dims=True)
    if RIGHT > 0:
        right, in_right, a_right = _read(scores, LEFT, RIGHT, rows, there, P)
        total += tl.sum(a_right * a_right, axis=1, keep_dims=True)
    t = tl.load(tau).to(tl.float32)
    # Before 2.15, PyTorch's compiled code passes numbers in 64 bits.
    factor = tl.rsqrt(total / (t * t) + tl.cast(eps, tl.float32))
    tl.store(factors + rows, factor, mask=there)
    dtype = weights.dtype.element_ty
    tl.store(weights + left, _gelu(a_left * factor, PTX)[0].to(dtype), mask=in_left)
    if RIGHT > 0:
        tl.store(weights + right, _gelu(a_right * factor, PTX)[0].to(dtype), mask=in_right)


@_kernel
def backward_kernel(
    scores, tau, factors, grad, grad_scores, dots, num_rows,
    P: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Write the gradient of the scores (R, P), and for that of τ the dot products g · z (R, 1)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # R · P may be > 2³¹
    there = rows < num_rows
    factor = tl.load(factors + rows, mask=there, other=0.0)
    left, in_left, a_left = _read(scores, 0, LEFT, rows, there, P)
    z_left = a_left * factor
    g_left = tl.load(grad + left, mask=in_left, other=0.0) * _gelu(z_left, PTX)[1]
    dot = tl.sum(g_left * z_left, axis=1, keep_dims=True)
    if RIGHT > 0:
        right, in_right, a_right = _read(scores, LEFT, RIGHT, rows, there, P)
        z_right = a_right * factor
        g_right = tl.load(grad + right, mask=in_right, other=0.0) * _gelu(z_right, PTX)[1]
        dot += tl.sum(g_right * z_right, axis=1, keep_dims=True)
    t = tl.load(tau).to(tl.float32)
    tl.store(dots + rows, dot, mask=there)
    dtype = grad_scores.dtype.element_ty
    of_z = factor * dot / (t * t)
    tl.store(grad_scores + left, (factor * g_left - of_z * z_left).to(dtype), mask=in_left)
    if RIGHT > 0:
        tl.store(grad_scores + right, (factor * g_right - of_z * z_right).to(dtype), mask=in_right)


# With TRITON_INTERPRET=1 a kernel has another type, which PyTorch cannot trace, and runs on a CPU.
_INTERPRETED = triton is not None and not isinstance(forward_kernel, triton.JITFunction)
DEVICE = "cpu" if _INTERPRETED else "cuda"  # asked first: a call of serves() costs the host
_ENABLED = triton is not None and os.environ.get("TOKENFORMER_TRITON") != "0"


def serves(scores: Tensor) -> bool:
    """Return whether the kernels take these scores."""
    return (
        scores.device.type == DEVICE
        and _ENABLED
        and scores.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and scores.shape[-1] <= MAX_PARAM_TOKENS
        and type(scores) in _PLAIN  # a fake or sharded tensor has not the memory that it shows
    )


@functools.cache
def _options(num_param_tokens: int, kept: int) -> dict[str, int]:
    """Choose blocks of a row, rows of a program, and warps; ``kept`` are values an element."""
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
    options = {"P": num_param_tokens, "LEFT": left, "RIGHT": right, "ROWS": rows}
    options["PTX"] = not _INTERPRETED and torch.version.cuda is not None
    options["enable_fp_fusion"] = True  # the default depends on the version of Triton
    return options | {"num_warps": 1 << (warps.bit_length() - 1)}


def _empty(scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return memory for a number for each score, and for a float32 number for each row."""
    rows = scores.new_empty((*scores.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(scores, memory_format=torch.contiguous_format), rows


def _launch(kernel: Any, kept: int, scores: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    outputs = _empty(scores)
    # A program is compiled for one P, but any number of rows, which may be symbolic here.
    options = _options(int(scores.shape[-1]), kept)
    if num_rows := scores.numel() // options["P"]:
        programs = -(-num_rows // options["ROWS"])
        run = kernel if _INTERPRETED or type(scores) in _PLAIN else wrap_triton(kernel)
        with torch.cuda.device_of(scores):  # Triton launches on the current device
            run[(programs,)](scores.contiguous(), *inputs, *outputs, num_rows, **options)
    return outputs


def _operation(function: Any) -> Any:
    """Let code that is compiled call an operation, which costs the host 7 times a function."""
    register: Any = custom_op if _INTERPRETED else triton_op
    traced = register(f"tokenformer_vit::{function.__name__}", mutates_args=())(function)
    traced.register_fake(_empty)
    return lambda *inputs: (traced if torch.compiler.is_compiling() else function)(*inputs)


@_operation
def gelu_l2(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the weights (..., P) of scores (..., P), and the factors (..., 1) of their rows."""
    return _launch(forward_kernel, 1, scores, tau, eps)


@_operation
def gelu_l2_backward(
    scores: Tensor, tau: Tensor, factors: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradient (..., P) of scores, and the dot products g · z (..., 1)."""
    return _launch(backward_kernel, 2, scores, tau, factors.contiguous(), grad.contiguous())
