"""The LayerNorm inside TokenFormer blocks."""

import torch
from torch import nn

from tokenformer_vit.errors import InputError


class BlockLayerNorm(nn.LayerNorm):
    """LayerNorm whose learnable parameters can be left out, as in Table 5 of the paper.

    Args:
        num_channels: Size of the last axis, which is normalised.
        affine: ``none`` (the TokenFormer default), ``bias``, or ``weight+bias``.
        eps: Added to the variance.
        device: Where the parameters are made.
        dtype: Type of the parameters.

    Raises:
        InputError: If ``affine`` is none of the three.

    Note:
        Mean and variance are accumulated in float32 whatever the input's dtype is.

    Source:
        TokenFormer, arXiv:2410.23168, Section 3.3 and Table 5.
    """

    AFFINE = ("none", "bias", "weight+bias")

    def __init__(
        self,
        num_channels: int,
        affine: str = "none",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if affine not in self.AFFINE:
            raise InputError(f"unknown norm {affine!r}; choose one of {', '.join(self.AFFINE)}")
        super().__init__(
            num_channels, eps=eps, elementwise_affine=affine != "none", device=device, dtype=dtype
        )
        self.affine = affine
        if affine == "bias":
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, where there are any."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return f"{self.normalized_shape[0]}, affine={self.affine!r}, eps={self.eps}"
