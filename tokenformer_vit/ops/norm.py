"""LayerNorm without learnable parameters, for the blocks of a TokenFormer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``x`` is multiplied: autocast's, if autocast is on."""
    device = x.device.type
    # PyTorch raises for devices without autocast; of these only meta runs models.
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def is_exporting() -> bool:
    """Return whether torch.export is at work."""
    # The public torch.compiler.is_exporting() is also true in compiled code under PyTorch 2.11.
    return torch.compiler._is_exporting_flag  # type: ignore[attr-defined]


def once_a_row(numbers: Tensor) -> Tensor:
    """Let code compiled for a CPU compute (..., 1) numbers once for each row.

    Otherwise the compiler repeats their square roots and divisions for every 16 or 32 elements of
    the row. It stores what ``as_strided`` reads.
    """
    if torch.compiler.is_compiling() and numbers.device.type == "cpu":
        return numbers.as_strided(numbers.shape, numbers.stride())
    return numbers


class _LayerNorm(torch.autograd.Function):
    """A norm that computes its gradient from its output and 1/σ, and does not keep its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Without the cast, a CPU returns 1/σ in the precision of x.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], None, None, eps)
        if torch.compiler.is_compiling() and x.device.type == "cpu":  # in fewer operations
            y = (x - mean) * once_a_row(rstd)
        return y.to(dtype), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.dtype = inputs[0].dtype
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        y, rstd = ctx.saved_tensors
        y, grad = y.to(rstd.dtype), grad.to(rstd.dtype)
        centred = grad - grad.mean(dim=-1, keepdim=True)
        grad_x = (centred - y * (grad * y).mean(dim=-1, keepdim=True)) * rstd
        return grad_x.to(ctx.dtype), None, None


def layer_norm(x: Tensor, num_channels: int, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """Normalise tokens over their last axis, without learnable parameters.

    Args:
        x: (..., C) tokens.
        num_channels: C.
        eps: Number added to the variance.
        backend: ``auto`` keeps only the output for the backward, which the next layers keep in any
            case; do not change it in place. ``reference`` is PyTorch's norm, with second
            derivatives and forward mode.

    Returns:
        (..., C) tokens. Under autocast ``auto`` returns them in the precision of autocast, which
        the products after the norm use; ``reference`` returns float32, as PyTorch does.

    Note:
        Mean and variance are accumulated in float32; float64 inputs stay float64.
    """
    if torch.jit.is_scripting() or torch.jit.is_tracing() or backend == "reference":
        return F.layer_norm(x, [num_channels], None, None, eps)
    else:  # TorchScript must not compile this branch
        if is_exporting() or x.shape[-1] != num_channels:
            return F.layer_norm(x, [num_channels], None, None, eps).to(product_dtype(x))
        if torch.is_grad_enabled() and x.requires_grad:
            return _LayerNorm.apply(x, eps, product_dtype(x))[0]
        return _LayerNorm.forward(x, eps, product_dtype(x))[0]
