"""Matrix products of Pattention, by the library that is faster on this CPU.

PyTorch multiplies float32 on x86 by MKL. oneDNN, which PyTorch has too, is faster for one token of
a wide layer, and on CPUs of AMD with AVX-512 for all but small products. The rounding errors are of
the same size. ``torch.backends.mkldnn.set_flags(False)`` leaves all to MKL, and so does the
``reference`` backend.
"""

import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .compilation import compiled_for_cpu
from .differentiation import is_batched, is_transformed, needs_gradient
from .precision import product_dtype

# Up to so many tokens, calls take longer than what they compute.
_FEW = 8
# From this width on, the matrices of one token take longer to read than a call of oneDNN takes.
_WIDE = 512
# From so many rows · width² on, a product takes longer than a call of oneDNN.
_MANY = 2**22
# From this width on, compiled code calls oneDNN for any number of rows.
_WIDE_IF_COMPILED = 128

_HAS_BOTH = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
)


def _mkl_is_slow() -> bool:
    """Return whether this is a CPU of AMD with AVX-512."""
    if not (_HAS_BOTH and torch.backends.cpu.get_cpu_capability().startswith("AVX512")):
        return False
    try:
        description = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        description = platform.processor()  # names the maker on Windows
    return "AuthenticAMD" in description


MKL_IS_SLOW = _mkl_is_slow()


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


def _is_float32(x: Tensor, matrix: Tensor) -> bool:
    """Return whether this is a product in float32 that is not differentiated."""
    return (
        x.device.type == "cpu"
        and product_dtype(x) == x.dtype == matrix.dtype == torch.float32
        and not needs_gradient(x, matrix)
        and not is_transformed()
    )


def _is_for_onednn(x: Tensor, matrix: Tensor, width: int) -> bool:
    """Return whether oneDNN multiplies x (..., ·) by a matrix of a layer of this width.

    The choice does not depend on the number of pairs, so that a layer has the same products when it
    has grown.
    """
    if not _HAS_BOTH or not isinstance(x, Tensor):  # fx traces with other objects
        return False
    if width < _WIDE and not MKL_IS_SLOW:
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    if torch.compiler.is_compiling():
        return (
            MKL_IS_SLOW
            and compiled_for_cpu(x)
            and _is_float32(x, matrix)
            # Code for any number of rows must not depend on their number.
            and (width >= _WIDE_IF_COMPILED or statically_known_true(rows * width * width >= _MANY))
        )
    return (
        ((MKL_IS_SLOW and rows * width * width >= _MANY) or (rows == 1 and width >= _WIDE))
        and not torch._C._get_tracing_state()
        and _is_float32(x, matrix)
        and forward_ad._current_level < 0  # the operator would drop a tangent without a word
        and type(x) is Tensor
        and type(matrix) in (Tensor, torch.nn.Parameter)  # not quantised or sharded
        and not (is_batched(x) or is_batched(matrix))
        and not torch._C._len_torch_dispatch_stack()  # the mode that counts FLOPs does not know it
        and torch._C._get_mkldnn_enabled()
    )


def _by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., C) tokens by a (N, C) weight, each of any strides."""
    if not torch._C._get_mkldnn_enabled():
        return F.linear(x, weight)  # compiled code does not look whether it is switched off
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


# torch.compile takes oneDNN's own operator only for weights that are constants.
_LIBRARY = torch.library.Library("tokenformer_vit", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.impl("linear", _by_onednn, "CPU")


@torch.library.register_fake("tokenformer_vit::linear", lib=_LIBRARY)
def _shape_of_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.tokenformer_vit.linear(x, weight)
    return _by_onednn(x, weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., C) tokens by a (N, C) weight: F.linear, but faster on some CPUs."""
    if _is_for_onednn(x, weight, weight.shape[-1]):
        return _multiply(x, weight)
    return F.linear(x, weight)


def matmul(weights: Tensor, values: Tensor) -> Tensor:
    """Multiply (..., P) weights by (P, C) values: @, but faster on some CPUs."""
    if _is_for_onednn(weights, values, values.shape[-1]):
        return _multiply(weights, values.t())
    return weights @ values  # autocast keeps its casts of a parameter, but not of a view


def transposed_matmul(weights: Tensor, tokens: Tensor) -> Tensor:
    """Multiply (R, P) weights, transposed, by (R, C) tokens: for the (P, C) gradient of pairs."""
    if _is_for_onednn(weights, tokens, tokens.shape[-1]):
        return _multiply(weights.t(), tokens.t())
    return weights.t() @ tokens
