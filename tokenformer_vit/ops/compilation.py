"""What torch.compile makes of an operation."""

import torch
from torch import Tensor


def compiled_for_cpu(tensor: Tensor) -> bool:
    """Return whether torch.compile is making code for the CPU that holds ``tensor``.

    An export is not meant: other programs will run it.
    """
    return (
        torch.compiler.is_compiling()
        and tensor.device.type == "cpu"
        and not torch.compiler.is_exporting()
    )


def once_a_row(numbers: Tensor) -> Tensor:
    """Let code compiled for a CPU compute (..., 1) numbers once for each row.

    Otherwise the compiler repeats their square roots and divisions for every 16 or 32 elements of
    the row. It stores what ``as_strided`` reads. A GPU's kernel computes them once in any case.
    """
    return numbers.as_strided(numbers.shape, numbers.stride())
