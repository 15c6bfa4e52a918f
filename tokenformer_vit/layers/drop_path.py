"""Stochastic depth that torch.compile compiles once for all blocks."""

import timm.layers
import torch
from torch import Tensor


class DropPath(timm.layers.DropPath):
    """timm's DropPath for (B, N, C) tokens; its rate is an input of compiled code.

    timm calls ``bernoulli_(rate)``, and compiled code holds this rate as a constant. Each block has
    another rate, so each would be compiled again, and PyTorch silently leaves the blocks after its
    limit of eight versions uncompiled. Source: Deep Networks with Stochastic Depth,
    arXiv:1603.09382.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples of (B, N, C) tokens."""
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        kept = torch.rand_like(x[:, :1, :1], dtype=torch.float32) < keep_prob  # (B, 1, 1)
        return x * (kept / max(keep_prob, 1e-6)).to(x.dtype)
