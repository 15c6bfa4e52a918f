"""The norms inside TokenFormer blocks."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import layer_norm
from tokenformer_vit.ops.modes import product_dtype

# fx must not trace into them, as with pattention().
torch.fx.wrap("layer_norm")
torch.fx.wrap("product_dtype")


class BlockLayerNorm(nn.LayerNorm):
    """LayerNorm with or without learnable parameters, as in Table 5 of the paper.

    ``affine`` is ``none`` (the TokenFormer default), ``bias``, or ``weight+bias``. Without
    parameters it is :func:`tokenformer_vit.ops.layer_norm`, otherwise PyTorch's.
    Sums are float32. Under autocast the output has autocast's precision, in which the next layers
    multiply it. ``place`` has device and dtype.
    """

    def __init__(
        self, num_channels: int, affine: str = "none", eps: float = 1e-6, **place: Any
    ) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine != "none", **place)
        self.affine = affine
        if affine == "bias":
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, if they exist."""
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (..., C) tokens."""
        if self.affine == "none":
            return layer_norm(input, eps=self.eps)
        y = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return _as_products(y, input)


class BlockRMSNorm(nn.RMSNorm):
    """RMSNorm, arXiv:1910.07467; its precision is as in BlockLayerNorm.

    ``affine`` is ``rms`` (without parameters) or ``rms+weight``.
    """

    def __init__(
        self, num_channels: int, affine: str = "rms", eps: float = 1e-6, **place: Any
    ) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine == "rms+weight", **place)
        self.affine = affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) tokens."""
        return _as_products(F.rms_norm(x, self.normalized_shape, self.weight, self.eps), x)


def _as_products(y: Tensor, x: Tensor) -> Tensor:
    """Cast outputs to the dtype in which inputs such as ``x`` are multiplied."""
    if torch.jit.is_scripting():
        return y
    else:  # TorchScript must not compile this branch
        return y.to(product_dtype(x))


register_notrace_module(BlockLayerNorm)
register_notrace_module(BlockRMSNorm)

# What the argument ``norm`` of a model may be; a norm has it as its ``affine``.
NORMS: Any = dict.fromkeys(("none", "bias", "weight+bias"), BlockLayerNorm)
NORMS |= dict.fromkeys(("rms", "rms+weight"), BlockRMSNorm)


def block_norm(norm: str, num_channels: int, eps: float = 1e-6, **place: Any) -> Any:
    """Build the norm of a block: one of ``NORMS``; ``place`` has device and dtype."""
    if norm not in NORMS:
        raise InputError(f"norm must be one of {', '.join(NORMS)}, but got {norm!r}")
    return NORMS[norm](num_channels, norm, eps, **place)
