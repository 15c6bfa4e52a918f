"""What is computed in another way for a few tokens, as in decoding."""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .differentiation import is_transformed, needs_gradient
from .precision import product_dtype

# Up to so many tokens, calls take longer than what they compute.
_FEW = 8
# From this width on, a layer's matrices take longer to read than a call of oneDNN takes.
_WIDE = 512
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def is_few(x: Tensor) -> bool:
    """Return whether (..., C) tokens are so few that calls take longer than what they compute.

    A decoding step is an example. False in traces, exports and compiled code, which must fit any
    number, and in float64, where the digits count.
    """
    return (
        isinstance(x, Tensor)  # fx traces with other objects
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and x.dtype != torch.float64
        and x.numel() <= _FEW * x.shape[-1]
    )


def _is_for_onednn(x: Tensor, matrix: Tensor, width: int) -> bool:
    """Return whether oneDNN is faster than PyTorch's product: on x86, for one token, if wide.

    PyTorch calls MKL there, which reads the matrix with one thread, and slower than oneDNN does.
    The rounding errors are of the same size. The choice does not depend on the number of pairs,
    because a grown layer has to compute the same digits.
    """
    return (
        _IS_X86
        and width >= _WIDE
        and is_few(x)
        and x.numel() == x.shape[-1]
        and not needs_gradient(x, matrix)
        and not is_transformed()
        and forward_ad._current_level < 0  # the operator would drop a tangent without a word
        and type(x) is Tensor
        and type(matrix) in (Tensor, torch.nn.Parameter)  # not quantised or sharded
        and x.device.type == "cpu"
        and product_dtype(x) == x.dtype == matrix.dtype == torch.float32
        and not torch._C._len_torch_dispatch_stack()  # the mode that counts FLOPs does not know it
        and torch.backends.mkldnn.is_available()
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., C) tokens by a (N, C) weight: F.linear, but faster for one token."""
    if _is_for_onednn(x, weight, weight.shape[-1]):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def matmul(weights: Tensor, values: Tensor) -> Tensor:
    """Multiply (..., P) weights by (P, C) values: @, but faster for one token."""
    if _is_for_onednn(weights, values, values.shape[-1]):
        return torch.ops.mkldnn._linear_pointwise(weights, values.t(), None, "none", [], "")
    return weights @ values  # autocast keeps its casts of a parameter, but not of a view
