"""The TokenFormer block, with the arguments that timm's VisionTransformer passes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from .arguments import COUNTS
from .attention import Attention
from .drop_path import DropPath
from .norm import BlockLayerNorm, BlockRMSNorm, block_norm
from .pattention import Pattention

# timm passes these to every block; they have no effect here.
_NORMS_AND_BIASES = {"norm_layer", "proj_bias", "qkv_bias", "scale_attn_norm", "scale_mlp_norm"}
IGNORED_TIMM_ARGUMENTS = {"act_layer", "attn_layer", "mlp_layer"} | _NORMS_AND_BIASES


class TokenFormerBlock(nn.Module):
    """Pre-norm block: attention over tokens, then one Pattention layer as the feed-forward part.

    Args:
        dim: Width C of the tokens.
        num_heads: Number of attention heads; must divide ``dim``.
        num_qkv_param_tokens: Number of pairs in each of query, key and value; default ``dim``.
        num_proj_param_tokens: Number of pairs in the output projection; default ``dim``.
        num_ffn_param_tokens: Number of pairs in the feed-forward layer; default
            ``mlp_ratio * dim``.
        theta: Name of the Θ variant.
        norm: Parameters of both LayerNorms, ``none``, ``bias`` or ``weight+bias``; or ``rms``.
        norm_eps: Number that the norms add to the variance or mean square.
        residual_init_gain: Initial standard deviation of what is added to the residual stream;
            1/√(2·depth) keeps the stream at unit scale.
        pattention_args: Further arguments of all five :class:`Pattention` layers.
        mlp_ratio: Number of feed-forward pairs for each channel, if no count is given.
        qk_norm: Normalise queries and keys, without parameters.
        proj_drop: Dropout rate after the output projection and the feed-forward layer.
        attn_drop: Dropout rate of the attention weights.
        init_values: Initial value of LayerScale; ``None`` for no LayerScale.
        drop_path: Stochastic depth rate.
        device: Device of the parameters.
        dtype: Type of the parameters.
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
        theta: str = "gelu_l2",
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
            norm_layer=partial(BlockRMSNorm if norm == "rms" else BlockLayerNorm, eps=norm_eps),
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            proj_init_gain=residual_init_gain,
            **shared,
        )
        self.ls1 = layer_scale()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

        self.norm2 = block_norm(norm, dim, norm_eps, **place)
        pairs = int(dim * mlp_ratio) if num_ffn_param_tokens is None else num_ffn_param_tokens
        self.mlp = Pattention(dim, dim, pairs, kind="ffn", init_gain=residual_init_gain, **shared)
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


def token_arguments(blocks: Sequence[Any]) -> dict[str, Any]:
    """Return the three numbers of pairs of blocks: each an int, or a list with one for each."""
    layers = [(block.attn.query, block.attn.proj, block.mlp) for block in blocks]
    counts = [[layer.num_param_tokens for layer in kind] for kind in zip(*layers, strict=True)]
    return {
        name: numbers[0] if len(set(numbers)) == 1 else numbers
        for name, numbers in zip(COUNTS.values(), counts, strict=True)
    }
