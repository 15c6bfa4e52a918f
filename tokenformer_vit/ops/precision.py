"""The precision of sums and products."""

import time

import torch
from torch import Tensor

SLOW = 0.8  # ratio of bfloat16_speed(), which varies by a few percent, from which on it is slow


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over ``tensor``: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which ``tensor`` is multiplied: autocast's, if autocast is on."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor.dtype
    # PyTorch raises for devices without autocast; of these only meta runs models.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def to_product_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the operands of a product, which are on one device; see :func:`product_dtype`."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(product_dtype(tensor)) for tensor in tensors)


def bfloat16_speed() -> float:
    """Time products on this CPU: by how much bfloat16 is faster than float32, in about 10 ms.

    Returns:
        The ratio of the times. On a CPU without instructions for bfloat16 (AMX, AVX512_BF16), where
        PyTorch converts each number, it is far below :data:`SLOW`.
    """
    shortest = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(256, 256, dtype=dtype, device="cpu")
        times = []
        for _ in range(6):  # the first ones prepare the product
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - begin)
        shortest[dtype] = min(times)
    return shortest[torch.float32] / shortest[torch.bfloat16]
