"""Multi-head self-attention with Pattention layers as its four projections."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat, maybe_add_mask, resolve_self_attn_mask, use_fused_attn
from torch import Tensor, nn

from tokenformer_vit.errors import InputError

from .arguments import arguments_of
from .norm import BlockLayerNorm
from .pattention import Pattention


class Attention(nn.Module):
    """Token-token attention between Pattention projections for query, key, value and output.

    ``num_qkv_param_tokens`` is the number of pairs in each of query, key and value. ``norm_layer``
    builds the norm of queries and keys from its width. ``shared`` are further arguments of all four
    projections; each may be a dict by kind.

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

        own = arguments_of("qkv", shared)
        projection = partial(Pattention, dim, dim, num_qkv_param_tokens, kind="qkv", **own)
        self.query, self.key, self.value = projection(), projection(), projection()
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        own = arguments_of("proj", shared)
        pairs = num_proj_param_tokens
        self.proj = Pattention(dim, dim, pairs, kind="proj", init_gain=proj_init_gain, **own)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
    ) -> Tensor:
        """Attend over (B, N, C) tokens; masks are those of ``F.scaled_dot_product_attention``.

        ``rope`` has the rotary positions of the last R tokens as timm's ``RotaryEmbeddingCat``
        gives them: (R, 2 head_dim), or (B, 1, R, 2 head_dim) where they differ by sample.
        """
        B, N, C = x.shape
        shape = (B, N, self.num_heads, self.head_dim)
        q = self.q_norm(self.query(x).reshape(shape).transpose(1, 2))  # (B, heads, N, head_dim)
        k = self.k_norm(self.key(x).reshape(shape).transpose(1, 2))
        v = self.value(x).reshape(shape).transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)

        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)  # (B, heads, N, N)
            attn = maybe_add_mask(attn, resolve_self_attn_mask(N, attn, attn_mask, is_causal))
            x = self.attn_drop(attn.softmax(dim=-1)) @ v

        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the last of (B, heads, N, head_dim) queries or keys, as many as have a position."""
    first = x.shape[2] - rope.shape[-2]
    patches = apply_rot_embed_cat(x[:, :, first:], rope, half=True)
    return torch.cat((x[:, :, :first], patches), dim=2)
