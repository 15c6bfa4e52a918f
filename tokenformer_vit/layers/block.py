"""The TokenFormer block, in the shape in which timm's VisionTransformer asks for one."""

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from .arguments import check_pattention_args
from .attention import Attention
from .drop_path import DropPath
from .norm import BlockLayerNorm
from .pattention import Pattention

# What timm passes to every block and a block without linear layers has no use for.
TIMM_ONLY = frozenset(
    {
        "act_layer",
        "attn_layer",
        "mlp_layer",
        "norm_layer",
        "proj_bias",
        "qkv_bias",
        "scale_attn_norm",
        "scale_mlp_norm",
    }
)


class TokenFormerBlock(nn.Module):
    """Pre-norm block: attention over tokens, then one Pattention layer as the feed-forward part.

    The first group of arguments is TokenFormer's; the second is what timm passes to every block.

    Args:
        dim: Width C of the tokens.
        num_heads: Number of attention heads; divides ``dim``.
        num_qkv_param_tokens: Pairs of each of query, key and value; ``None`` for ``dim``.
        num_proj_param_tokens: Pairs of the output projection; ``None`` for ``dim``.
        num_ffn_param_tokens: Pairs of the feed-forward layer; ``None`` for ``mlp_ratio * dim``.
        theta: Name of the Θ variant.
        norm: Parameters of the two LayerNorms: ``none``, ``bias`` or ``weight+bias``.
        norm_eps: What they add to the variance.
        residual_init_gain: Standard deviation, at initialisation, of what each of the two parts
            adds to the residual stream; 1/√(2·depth) keeps the stream at unit scale.
        pattention_args: ``tau``, ``learn_tau``, ``eps``, ``key_init_scale`` and ``gate`` of all
            five :class:`Pattention` layers, any of them.
        mlp_ratio: Feed-forward pairs for each channel where no count is given.
        qk_norm: Normalise queries and keys, without parameters.
        proj_drop: Dropout rate after the output projection and the feed-forward layer.
        attn_drop: Dropout rate of the attention weights.
        init_values: Initial value of LayerScale; ``None`` leaves LayerScale out.
        drop_path: Stochastic depth rate.
        device: Where parameters are made.
        dtype: Type of the parameters.
        **timm_only: A block's index (``depth``) and the linear, bias, activation and norm choices
            of an ordinary block: accepted, and without effect.

    Raises:
        TypeError: If an argument is neither named here nor one that timm passes.
        InputError: If ``pattention_args`` has another key.

    Shape:
        (B, N, C) -> (B, N, C).

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 7 to 11; the feed-forward part is a single Pattention.
    """

    attention: type[Attention] = Attention

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
        **timm_only: object,
    ) -> None:
        super().__init__()
        if unknown := timm_only.keys() - TIMM_ONLY - {"depth"}:
            raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")

        def layer_scale() -> nn.Module:
            if not init_values:
                return nn.Identity()
            return LayerScale(dim, init_values=init_values, device=device, dtype=dtype)

        self.norm1 = BlockLayerNorm(dim, norm, norm_eps, device=device, dtype=dtype)
        self.attn = self.attention(
            dim,
            num_heads,
            dim if num_qkv_param_tokens is None else num_qkv_param_tokens,
            dim if num_proj_param_tokens is None else num_proj_param_tokens,
            theta=theta,
            qk_norm=qk_norm,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            proj_init_gain=residual_init_gain,
            pattention_args=pattention_args,
            device=device,
            dtype=dtype,
        )
        self.ls1 = layer_scale()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

        self.norm2 = BlockLayerNorm(dim, norm, norm_eps, device=device, dtype=dtype)
        self.mlp = Pattention(
            dim,
            dim,
            int(dim * mlp_ratio) if num_ffn_param_tokens is None else num_ffn_param_tokens,
            theta=theta,
            init_gain=residual_init_gain,
            device=device,
            dtype=dtype,
            **check_pattention_args(pattention_args),
        )
        self.mlp_drop = nn.Dropout(proj_drop)
        self.ls2 = layer_scale()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def token_arguments(self, pattention_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments that a model of this block's present pairs is built by.

        Args:
            pattention_args: Those that the model was built by.

        Returns:
            The three counts of pairs; of layers with a gate ``pattention_args`` with it, too.
        """
        gate = self.mlp.gate
        kind = "learned" if isinstance(gate, nn.Parameter) else "fixed"
        return {
            "num_qkv_param_tokens": self.attn.query.num_param_tokens,
            "num_proj_param_tokens": self.attn.proj.num_param_tokens,
            "num_ffn_param_tokens": self.mlp.num_param_tokens,
        } | ({} if gate is None else {"pattention_args": {**(pattention_args or {}), "gate": kind}})

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Map (B, N, C) tokens to (B, N, C); the mask is that of :class:`Attention`."""
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp_drop(self.mlp(self.norm2(x)))))
