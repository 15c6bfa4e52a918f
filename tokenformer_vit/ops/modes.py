"""Modes of PyTorch in which an operation is called: transforms, autocast, a compiler."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def plain_only() -> bool:
    """Return whether to use plain formulas, because an autograd function would be wrong or fail.

    An autograd function has neither a forward-mode derivative nor a rule for vmap here, and traces
    and exports cannot store it.
    """
    # torch.compiler.is_exporting() is public, but also true in compiled code under PyTorch 2.11.
    # For the last two, PyTorch has no public question.
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
    """Let code compiled for a CPU store the (..., 1) numbers of rows, for ``as_strided`` to read.

    Otherwise it repeats their roots and divisions for every 16 or 32 elements of the row.
    """
    return numbers.as_strided(numbers.shape, numbers.stride())
