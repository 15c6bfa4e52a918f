"""Θ = ``gelu_l2`` on a CPU without torch.compile: a few rows at a time, which stay in the cache.

PyTorch runs an operation over all scores before it starts the next one. Θ and its gradient are
about ten such operations, and most of them wait for memory. Here all of them run on a block of
rows before the next block is read, and in place where a tensor is not needed again. They are the
operations of ``kernels.py`` in the same order. Results differ by the last bit at most: where a
block ends, PyTorch's vector instructions end elsewhere.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from . import kernels
from .differentiation import is_batched, is_transformed
from .kernels import Kernels
from .precision import accumulation_dtype

aten = torch.ops.aten

BLOCK_ELEMENTS = 2**18
"""Scores in a block for each thread: 1 MB in float32. Half or twice as many take as long."""


def _block_elements() -> int:
    return BLOCK_ELEMENTS * torch.get_num_threads()


def _needs_blocks(tensor: Tensor) -> bool:
    """Return whether a tensor is larger than a block, on the CPU, and may be written in place."""
    return (
        not torch.compiler.is_compiling()
        and tensor.device.type == "cpu"
        and type(tensor) is Tensor
        and tensor.numel() > _block_elements()
        and not is_transformed()
        and not is_batched(tensor)
    )


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of all (..., C) tensors as views, a block at a time."""
    rows = max(1, _block_elements() // tensors[0].shape[-1])
    views = (tensor.view(-1, tensor.shape[-1]).split(rows) for tensor in tensors)
    return zip(*views, strict=True)


def _forward(
    scores: Tensor, tau: Tensor, eps: float, plain: Kernels, approximate: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if not _needs_blocks(scores):
        return plain.forward(scores, tau, eps)
    scores, dtype = scores.contiguous(), accumulation_dtype(scores)
    weights = torch.empty_like(scores)
    factor = scores.new_empty((*scores.shape[:-1], 1), dtype=dtype)
    for a, w, f in _blocks(scores, weights, factor):
        z = w if w.dtype == dtype else torch.empty_like(a, dtype=dtype)
        a = a.to(dtype)
        torch.linalg.vector_norm(a, dim=-1, keepdim=True, out=f)
        f.div_(tau).square_().add_(eps).rsqrt_()
        torch.mul(a, f, out=z)
        aten.gelu.out(z, approximate=approximate, out=z)
        if z is not w:
            w.copy_(z)
    return weights, (scores, factor)


def _backward(
    kept: tuple[Tensor, ...],
    tau: Tensor,
    grad_weights: Tensor,
    plain: Kernels,
    approximate: str,
) -> tuple[Tensor, ...]:
    scores, factor = kept
    if not _needs_blocks(grad_weights):
        return plain.backward(kept, tau, grad_weights)
    weights, dot, dtype = torch.empty_like(scores), torch.empty_like(factor), factor.dtype
    # The gradient of the scores takes the memory of the other, which is not read again.
    grad_scores = grad_weights.to(scores.dtype).contiguous()
    for a, f, u, w, d in _blocks(scores, factor, grad_scores, weights, dot):
        z, g = f * a.to(dtype), u.to(dtype)
        product = w if w.dtype == dtype else torch.empty_like(z)
        aten.gelu_backward.grad_input(g, z, approximate=approximate, grad_input=g)
        torch.mul(g, z, out=product)
        torch.sum(product, dim=-1, keepdim=True, out=d)
        aten.gelu.out(z, approximate=approximate, out=product)
        if product is not w:
            w.copy_(product)
        g.addcmul_(z, d / tau.square(), value=-1).mul_(f)
        if g is not u:
            u.copy_(g)
    return weights, grad_scores, dot


def _in_blocks(plain: Kernels, approximate: str) -> Kernels:
    same = {"plain": plain, "approximate": approximate}
    return Kernels(partial(_forward, **same), partial(_backward, **same), plain.elasticity)


KERNELS = {
    "gelu_l2": _in_blocks(kernels.GELU_L2, "none"),
    "gelu_tanh_l2": _in_blocks(kernels.GELU_TANH_L2, "tanh"),
}
"""The variants that run in blocks on a CPU. Elsewhere these are the kernels of ``kernels.py``."""
