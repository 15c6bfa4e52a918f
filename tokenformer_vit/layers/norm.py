"""The norms inside TokenFormer blocks."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import check_backend, layer_norm, rms_norm

from .arguments import check_argument

# fx must not trace into it, as with pattention().
torch.fx.wrap("layer_norm")
torch.fx.wrap("rms_norm")


class BlockLayerNorm(nn.LayerNorm):
    """LayerNorm with or without learnable parameters, as in Table 5 of the paper.

    Args:
        num_channels: Size of the normalised last axis.
        affine: ``none`` (the TokenFormer default), ``bias``, or ``weight+bias``.
        eps: Number added to the variance.
        backend: Implementation of the norm without parameters, as for
            :func:`tokenformer_vit.ops.layer_norm`; with parameters it is always PyTorch's.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        InputError: If ``affine`` or the backend is unknown, or ``eps`` is negative or not finite.

    Note:
        Mean and variance are accumulated in float32 for every input dtype but float64.

    Source:
        TokenFormer, arXiv:2410.23168, Section 3.3 and Table 5.
    """

    AFFINE = ("none", "bias", "weight+bias")

    def __init__(
        self,
        num_channels: int,
        affine: str = "none",
        eps: float = 1e-6,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if affine not in self.AFFINE:
            raise InputError(f"norm must be one of {', '.join(self.AFFINE)}, but got {affine!r}")
        check_argument("eps", eps)
        super().__init__(
            num_channels, eps=eps, elementwise_affine=affine != "none", device=device, dtype=dtype
        )
        self.affine = affine
        self.backend = check_backend(backend)
        if affine == "bias":
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, if they exist."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (..., C) tokens."""
        if self.affine == "none":
            return layer_norm(input, self.normalized_shape[0], self.eps, self.backend)
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return f"{self.normalized_shape[0]}, affine={self.affine!r}, eps={self.eps}"


class BlockRMSNorm(nn.RMSNorm):
    """RMSNorm without learnable parameters.

    Args:
        num_channels: Size of the normalised last axis.
        eps: Number added to the mean square.
        backend: Implementation, as for :func:`tokenformer_vit.ops.rms_norm`.

    Raises:
        InputError: If the backend is unknown, or ``eps`` is negative or not finite.

    Note:
        The mean square is accumulated in float32 for every input dtype but float64.

    Source:
        Root Mean Square Layer Normalization, arXiv:1910.07467.
    """

    def __init__(self, num_channels: int, eps: float = 1e-6, backend: str = "auto") -> None:
        check_argument("eps", eps)
        super().__init__(num_channels, eps=eps, elementwise_affine=False)
        self.backend = check_backend(backend)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) tokens."""
        return rms_norm(x, self.normalized_shape[0], self.eps, self.backend)  # type: ignore[arg-type]


register_notrace_module(BlockLayerNorm)
register_notrace_module(BlockRMSNorm)

BlockNorm = BlockLayerNorm | BlockRMSNorm
# What the argument ``norm`` of a model may be.
NORMS = (*BlockLayerNorm.AFFINE, "rms")


def block_norm(norm: str, num_channels: int, eps: float = 1e-6, **place: Any) -> BlockNorm:
    """Build the norm of a block.

    Args:
        norm: ``rms`` for an RMSNorm, or the parameters of a LayerNorm: ``none``, ``bias`` or
            ``weight+bias``.
        num_channels: Size of the normalised last axis.
        eps: Number added to the variance, or to the mean square.
        **place: ``device`` and ``dtype`` of the parameters.

    Raises:
        InputError: If ``norm`` is unknown, or ``eps`` is negative or not finite.
    """
    if norm not in NORMS:
        raise InputError(f"norm must be one of {', '.join(NORMS)}, but got {norm!r}")
    if norm == "rms":
        return BlockRMSNorm(num_channels, eps)
    return BlockLayerNorm(num_channels, norm, eps, **place)
