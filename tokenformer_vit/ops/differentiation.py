"""What autograd and ``torch.func`` do with an operation."""

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

# Returns whether a transform of ``torch.func`` is active.
is_transformed = torch._C._are_functorch_transforms_active


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def is_batched(tensor: Tensor) -> bool:
    """Return whether a gradient is one of many that ``is_grads_batched`` computes together."""
    return not torch.compiler.is_compiling() and is_legacy_batchedtensor(tensor)
