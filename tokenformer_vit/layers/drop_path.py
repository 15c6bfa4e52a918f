"""Stochastic depth that can be compiled once for all blocks."""

import timm.layers
import torch
from torch import Tensor

from tokenformer_vit.errors import InputError


class DropPath(timm.layers.DropPath):
    """timm's DropPath, for (B, N, C) tokens, with a rate that torch.compile takes as an input.

    Args:
        drop_prob: Probability with which a sample's path is dropped, in [0, 1).

    Raises:
        InputError: If it is not in that range.

    Shape:
        (B, N, C) -> (B, N, C); while training, each sample is either zero or divided by
        1 - ``drop_prob``.

    Note:
        timm draws from ``bernoulli_(rate)``, which compiled code holds as a constant: each block,
        having a rate of its own, would be compiled anew, and those beyond PyTorch's limit of eight
        versions not at all, without a word.

    Source:
        Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """

    def __init__(self, drop_prob: float) -> None:
        if not 0 <= drop_prob < 1:
            raise InputError(f"the drop path rate must be in [0, 1), but it is {drop_prob}")
        super().__init__(drop_prob)

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples of (B, N, C) tokens."""
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        kept = torch.rand_like(x[:, :1, :1], dtype=torch.float32) < keep_prob  # (B, 1, 1)
        return x * (kept / keep_prob).to(x.dtype)
