"""The TokenFormer block, with the arguments that timm's VisionTransformer passes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import timm.layers
import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from .arguments import arguments_of
from .attention import Attention
from .norm import block_norm
from .pattention import Pattention

# timm passes these to every block; they have no effect here.
_NORMS_AND_BIASES = {"norm_layer", "proj_bias", "qkv_bias", "scale_attn_norm", "scale_mlp_norm"}
IGNORED_TIMM_ARGUMENTS = {"act_layer", "attn_layer", "mlp_layer"} | _NORMS_AND_BIASES


class TokenFormerBlock(nn.Module):
    """Pre-norm block: attention over tokens, then one Pattention layer as the feed-forward part.

    Numbers of pairs, ``theta``, ``norm``, ``norm_eps`` and ``pattention_args`` are as in
    :class:`~tokenformer_vit.models.TokenFormerViT`, but without ``init``; others as in timm's
    ``Block``.

    Args:
        dim: Width C of the tokens.
        num_heads: Number of attention heads; must divide ``dim``.
        residual_init_gain: Initial standard deviation of what is added to the residual stream;
            1/√(2·depth) keeps the stream at unit scale.
        mlp_ratio: Number of feed-forward pairs for each channel, if no count is given.
        qk_norm: Normalise queries and keys, by norms of the same kind.
        **ignored: ``IGNORED_TIMM_ARGUMENTS`` and the index of the block, which have no effect.

    Raises:
        TypeError: If an argument is neither listed here nor passed by timm.

    Shape:
        (B, N, C) -> (B, N, C).

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 7 to 11; the feed-forward part is a single Pattention.
    """

    attention_class: type[Attention] = Attention

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_qkv_param_tokens: int | None = None,
        num_proj_param_tokens: int | None = None,
        num_ffn_param_tokens: int | None = None,
        theta: str | Mapping[str, str] = "gelu_l2",
        norm: str = "none",
        norm_eps: float = 1e-6,
        residual_init_gain: float = 1.0,
        pattention_args: Mapping[str, Any] | None = None,
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **ignored: object,
    ) -> None:
        super().__init__()
        if unknown := ignored.keys() - IGNORED_TIMM_ARGUMENTS - {"depth"}:
            raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")

        place: Any = {"device": device, "dtype": dtype}
        shared: Any = dict(theta=theta, **place, **(pattention_args or {}))

        def layer_scale() -> nn.Module:
            return LayerScale(dim, init_values, **place) if init_values else nn.Identity()

        self.norm1 = block_norm(norm, dim, norm_eps, **place)
        self.attn = self.attention_class(
            dim,
            num_heads,
            dim if num_qkv_param_tokens is None else num_qkv_param_tokens,
            dim if num_proj_param_tokens is None else num_proj_param_tokens,
            qk_norm=qk_norm,
            norm_layer=partial(block_norm, norm, eps=norm_eps, **place),
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            proj_init_gain=residual_init_gain,
            **shared,
        )
        self.ls1 = layer_scale()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

        self.norm2 = block_norm(norm, dim, norm_eps, **place)
        pairs = int(dim * mlp_ratio) if num_ffn_param_tokens is None else num_ffn_param_tokens
        own = arguments_of("ffn", shared)
        self.mlp = Pattention(dim, dim, pairs, kind="ffn", init_gain=residual_init_gain, **own)
        self.mlp_drop = nn.Dropout(proj_drop)
        self.ls2 = layer_scale()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
    ) -> Tensor:
        """Map (B, N, C) tokens to (B, N, C); arguments as for :meth:`Attention.forward`."""
        attended = self.attn(self.norm1(x), attn_mask, is_causal, rope)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp_drop(self.mlp(self.norm2(x)))))


class DropPath(timm.layers.DropPath):
    """timm's DropPath for (B, N, C) tokens; its rate is an input of compiled code.

    timm calls ``bernoulli_(rate)``, and compiled code holds this rate as a constant: each block,
    which has another rate, would be compiled again. Source: arXiv:1603.09382.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples of (B, N, C) tokens."""
        if not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        kept = torch.rand_like(x[:, :1, :1], dtype=torch.float32) < keep_prob  # (B, 1, 1)
        return x * (kept / max(keep_prob, 1e-6)).to(x.dtype)
