"""The block of a causal language model: rotation, cache and causal attention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor

from tokenformer_vit.layers import Attention, TokenFormerBlock


class KVCache:
    """Keys and values of the tokens so far, for each layer, as in a cache of transformers."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Append (B, heads, N, D) keys and values of a layer; return all its keys and values.

        Only the paged caches of transformers read ``kwargs``, and change them.
        """
        if layer == len(self._layers):
            self._layers.append((keys.clone(), values))  # a view of queries and keys
        else:
            before = self._layers[layer]
            both = torch.cat((before[0], keys), dim=2), torch.cat((before[1], values), dim=2)
            self._layers[layer] = both
        return self._layers[layer]

    def get_seq_length(self) -> int:
        """Return the number of tokens that the first layer has read."""
        return self._layers[0][0].shape[2] if self._layers else 0


def rotate(queries: Tensor, keys: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as GPT-NeoX does, by (B or 1, 1, N, 2 R) sines and cosines."""
    both = torch.cat((queries, keys), dim=1)  # half of the operations, which decide in decoding
    rotated, rest = both.tensor_split((turns.shape[-1] // 2,), dim=-1)
    both = torch.cat((apply_rot_embed_cat(rotated, turns, half=True), rest), dim=-1)
    queries, keys = both.chunk(2, dim=1)
    return queries, keys


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float
) -> tuple[Tensor, None]:
    """Attend by PyTorch's own function, in the form of an attention function of transformers.

    The mask is true where attention is allowed; None for a causal mask over an empty cache, or one
    token that sees all others.
    """
    is_causal = attention_mask is None and query.shape[2] > 1
    x = F.scaled_dot_product_attention(query, key, value, attention_mask, 0.0, is_causal)
    return x.transpose(1, 2), None  # (B, N, heads, D), no weights


class CausalAttention(Attention):
    """The attention of the vision models with a causal mask, rotation and a cache."""

    is_causal = True  # attention functions of transformers look for this name, and the next
    layer_idx: int  # number of the block in the cache

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Any,
        turns: Tensor | None,
        cache: Any = None,
        attend: Callable[..., tuple[Tensor, Tensor | None]] = attend,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) tokens to (B, N, C), and return the weights that ``attend`` returns."""
        q, k, v = self.project(x)  # (B, heads, N, D)
        if turns is not None:
            q, k = rotate(q, k, turns)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs)  # a paged cache changes kwargs
        mixed, weights = attend(self, q, k, v, mask, scaling=self.scale, **kwargs)
        return self.proj(mixed.reshape(x.shape)), weights


class CausalBlock(TokenFormerBlock):
    """The block of the vision models, with :class:`CausalAttention` as its attention."""

    attention = CausalAttention

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map (B, N, C) tokens to (B, N, C); other arguments as in :class:`CausalAttention`."""
        x = x + self.attn(self.norm1(x), *args, **kwargs)[0]
        return x + self.mlp(self.norm2(x))
