"""Multi-head self-attention with Pattention layers as its four projections."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from timm.layers import (
    RotaryEmbeddingCat,
    apply_rot_embed_cat,
    maybe_add_mask,
    resolve_self_attn_mask,
    use_fused_attn,
)
from torch import Tensor, nn

from tokenformer_vit.errors import InputError

from .norm import BlockLayerNorm
from .pattention import Pattention


class Attention(nn.Module):
    """Token-token attention between Pattention projections for query, key, value and output.

    ``num_qkv_param_tokens`` is the number of pairs in each of query, key and value. ``norm_layer``
    builds the norm of queries and keys from its width. A model sets ``rope``, the rotary positions
    of the last tokens, and ``num_prefix_tokens``, the number of tokens before them. ``shared`` are
    further arguments of all four projections.

    Source: TokenFormer, arXiv:2410.23168, Eq. 7 to 9.
    """

    fused_attn: Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_qkv_param_tokens: int,
        num_proj_param_tokens: int,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        proj_init_gain: float = 1.0,
        norm_layer: Callable[[int], nn.Module] = BlockLayerNorm,
        **shared: Any,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise InputError(f"num_heads must divide dim {dim}, but got {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = use_fused_attn()

        projection = partial(Pattention, dim, dim, **shared)
        self.query = projection(num_param_tokens=num_qkv_param_tokens, kind="qkv")
        self.key = projection(num_param_tokens=num_qkv_param_tokens, kind="qkv")
        self.value = projection(num_param_tokens=num_qkv_param_tokens, kind="qkv")
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = projection(
            num_param_tokens=num_proj_param_tokens, init_gain=proj_init_gain, kind="proj"
        )
        self.proj_drop = nn.Dropout(proj_drop)
        self.rope: RotaryEmbeddingCat | None = None
        self.num_prefix_tokens = 0

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, N, C) tokens to (B, heads, N, head_dim) queries, keys and values."""
        B, N, _ = x.shape
        q = self.query(x).reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(x).reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        return self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k)), v

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate (B, heads, N, head_dim) queries or keys by the positions of their patches."""
        if self.rope is None:
            return x
        prefix, patches = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        patches = apply_rot_embed_cat(patches, self.rope.get_embed(), half=True)
        return torch.cat((prefix, patches), dim=2)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend over (B, N, C) tokens; masks are those of ``F.scaled_dot_product_attention``."""
        B, N, C = x.shape
        q, k, v = self.project(x)

        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)  # (B, heads, N, N)
            attn = maybe_add_mask(attn, resolve_self_attn_mask(N, attn, attn_mask, is_causal))
            x = self.attn_drop(attn.softmax(dim=-1)) @ v

        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))
