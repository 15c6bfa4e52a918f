"""The precision of sums and products."""

import torch
from torch import Tensor


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
