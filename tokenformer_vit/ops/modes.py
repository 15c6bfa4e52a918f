"""Modes of PyTorch in which an operation is called: transforms, autocast, a compiler."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def plain_only() -> bool:
    """Return whether to use plain formulas, because an autograd function would be wrong or fail."""
    # It has neither a forward-mode derivative nor a rule for vmap here, and traces and exports
    # cannot store it. For the last two, PyTorch has no public question; its is_exporting() is also
    # true in compiled code under PyTorch 2.11.
    return (
        torch.jit.is_tracing()
        or torch.compiler._is_exporting_flag  # type: ignore[attr-defined]
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``x`` is multiplied: autocast's, if autocast is on."""
    device = x.device.type
    # PyTorch raises for devices without autocast; of these only meta runs models.
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def stored_once(numbers: Tensor) -> Tensor:
    """Let code for a CPU store (..., 1) numbers, not compute them for every 16 or 32 elements."""
    return numbers.as_strided(numbers.shape, numbers.stride())
