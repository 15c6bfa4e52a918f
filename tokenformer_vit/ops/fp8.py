"""Pattention with products of 8-bit floating-point numbers.

Four of the six products of a layer and its backward multiply E4M3 numbers (a sign, 4 bits of
exponent, 3 of mantissa, at most 448) and add them in float32. The two gradients of the parameter
tokens stay in 16 bits: they are as accurate as the scores and weights allow, and need no transposed
copies of activations. README.md in this folder has the measured errors and the expected gain.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenformer_vit.errors import InputError

from .differentiation import is_transformed, needs_gradient
from .fused import flat, pattention_fused
from .kernels import Kernels
from .precision import product_dtype
from .theta import find_theta

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
_MULTIPLE = 16  # cuBLAS multiplies matrices whose sizes are multiples of 16 bytes
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of results


class Scaled(NamedTuple):
    """A matrix of E4M3 numbers, and the 0-dim float32 factor by which they must be multiplied."""

    numbers: Tensor
    factor: Tensor

    def t(self) -> "Scaled":
        """Transpose the matrix in memory, because GPUs add up along rows only."""
        return Scaled(self.numbers.t().contiguous(), self.factor)


def _rounded(tensor: Tensor) -> Tensor:
    # Without the clamp, some versions of PyTorch round larger numbers to NaN. GPUs need rows that
    # are contiguous, but a gradient may be a transposed view.
    return tensor.clamp(-LARGEST, LARGEST).to(E4M3, memory_format=torch.contiguous_format)


def fixed(tensor: Tensor) -> Scaled:
    """Round numbers of about 1, such as inputs and weights; numbers above 448 become 448."""
    return Scaled(_rounded(tensor), torch.ones((), device=tensor.device))


def scaled(tensor: Tensor) -> Scaled:
    """Round numbers of any size, after multiplying them by a power of two, which is exact.

    The largest number becomes one between 224 and 448. A tensor with NaN or infinity becomes NaN.
    """
    largest = tensor.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    # An exponent of at most 127, because 2**128 is infinite.
    scale = (LARGEST / largest).log2().floor().clamp(max=127).exp2()
    # In float16, a scale above 65504 would be infinite.
    return Scaled(_rounded(tensor.float() * scale), scale.reciprocal())


def product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Return A Bᵀ of (R, K) and (N, K) numbers in ``dtype``, added in float32."""
    if a.numbers.is_cuda:
        return torch._scaled_mm(
            a.numbers, b.numbers.t(), scale_a=a.factor, scale_b=b.factor, out_dtype=dtype
        )
    # A CPU's _scaled_mm gives the same, but takes hundreds of times as long.
    with torch.autocast("cpu", enabled=False):
        sums = a.numbers.float() @ b.numbers.float().t()
    return (sums * (a.factor * b.factor)).to(dtype)


class _Pattention(torch.autograd.Function):
    """Θ(X K_Pᵀ) V_P and its gradients; inputs and results are of the dtype of ``x``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, keys: Tensor, values: Tensor, tau: Tensor, eps: float, kernels: Kernels
    ) -> Tensor:
        keys8, values8 = scaled(keys), scaled(values)
        out, kept = _forward(x, keys8, values8, tau, eps, kernels)
        ctx.eps, ctx.kernels = eps, kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *keys8, *values8, tau, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        x, keys8, key_factor, values8, value_factor, tau, *kept = ctx.saved_tensors
        x_needed, keys_needed, values_needed, tau_needed = ctx.needs_input_grad[:4]
        grad_x = grad_keys = grad_values = grad_tau = None
        rows, grad = flat(x), flat(grad)
        grad_weights = product(scaled(grad), Scaled(values8, value_factor), x.dtype)  # (R, P)
        weights, grad_scores, dot = ctx.kernels.backward(tuple(kept), tau, grad_weights)
        if x_needed:
            keys_t = Scaled(keys8, key_factor).t()
            grad_x = product(scaled(grad_scores), keys_t, x.dtype).view_as(x)  # (..., C_in)
        if keys_needed:
            grad_keys = grad_scores.t() @ rows  # (P, C_in)
        if values_needed:
            grad_values = weights.t() @ grad  # (P, C_out)
        if tau_needed:
            elasticity = ctx.kernels.elasticity(tuple(kept), ctx.eps)
            grad_tau = ((dot * elasticity).sum() / tau).to(tau.dtype)
        return grad_x, grad_keys, grad_values, grad_tau, None, None


def _forward(
    x: Tensor, keys: Scaled, values: Scaled, tau: Tensor, eps: float, kernels: Kernels
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (..., C_out) output tokens, and what the backward of Θ needs, for (R, P) scores."""
    scores = product(fixed(flat(x)), keys, x.dtype)  # (R, P)
    weights, kept = kernels.forward(scores, tau, eps)
    out = product(fixed(weights), values.t(), x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1]), kept


def pattention_fp8(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
) -> Tensor:
    """Let input tokens attend to parameter tokens with products of E4M3 numbers.

    Args:
        x: (..., C_in) input tokens, of about unit RMS, as after a LayerNorm.
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: Number added to the divisor of a row, relative to ``tau``.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        InputError: If the variant is unknown, or ``x`` is on a device that neither multiplies E4M3
            numbers nor is a CPU.

    Note:
        Inputs and weights are rounded as they are, because both are small: a LayerNorm bounds
        inputs by √C_in, and an L2 norm bounds weights by τ. Keys, values and gradients are scaled
        first, a tensor at a time. Numbers of less than 2⁻⁶ lose digits. A CPU computes the same as
        a GPU, but more slowly than ``fused``, to measure errors.

        :func:`pattention_fused` computes what does not fit: a size that is not a multiple of 16, no
        rows, a Θ with an L1 norm, float64, and transforms of ``torch.func``. Gradients cannot be
        differentiated again.

    Source:
        FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    _check_device(x.device)
    variant, dtype = find_theta(theta), product_dtype(x)
    sizes = (*key_param_tokens.shape, value_param_tokens.shape[1])
    if (
        variant.kernels is None
        or variant.norm_order != 2
        or dtype not in _DTYPES
        or math.gcd(_MULTIPLE, *sizes) != _MULTIPLE
        or is_transformed()
        or not x.numel()  # which has no largest number
    ):
        return pattention_fused(x, key_param_tokens, value_param_tokens, theta, tau, eps)
    x, tokens = x.to(dtype), (key_param_tokens, value_param_tokens)
    if needs_gradient(x, *tokens, tau):
        return _Pattention.apply(x, *tokens, tau, eps, variant.kernels)
    keys, values = (scaled(each) for each in tokens)
    return _forward(x, keys, values, tau, eps, variant.kernels)[0]


@torch.compiler.assume_constant_result
def multiplies_e4m3(device: str) -> bool:
    """Return whether a CUDA device, such as ``cuda:0``, multiplies E4M3 numbers."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _check_device(device: torch.device) -> None:
    if device.type in ("cpu", "meta") or (device.type == "cuda" and multiplies_e4m3(str(device))):
        return
    raise InputError(
        "backend fp8 needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, "
        f"Blackwell), but x is on {device}; choose backend fused"
    )
