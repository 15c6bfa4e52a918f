"""The block of a causal language model: rotation, cache and causal attention."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.layers import Attention, TokenFormerBlock
from tokenformer_vit.ops import attention


class KVCache:
    """Keys and values of the tokens so far, for each layer.

    A cache of transformers has the same methods and can be used instead.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append (B, heads, N, D) keys and values of a layer; return all its keys and values."""
        if layer == len(self._layers):
            # Rotated keys are a view of a tensor that also holds the queries.
            self._layers.append((keys.clone(), values))
        else:
            before = self._layers[layer]
            self._layers[layer] = (
                torch.cat((before[0], keys), dim=2),
                torch.cat((before[1], values), dim=2),
            )
        return self._layers[layer]

    def get_seq_length(self) -> int:
        """Return the number of tokens that the first layer has read."""
        return self._layers[0][0].shape[2] if self._layers else 0


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, swap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of each head by the angle of its position.

    Dimensions r and r + R / 2 form a pair.

    Args:
        queries: (B, heads, N, D) queries.
        keys: (B, heads, N, D) keys.
        cos: (B or 1, 1, N, R) with R ≤ D; both halves along R hold the same angles.
        sin: (B or 1, 1, N, R), of −1 times these angles in the first half.
        swap: (D,) numbers of dimensions: the other one of a pair, or the dimension itself after R.
            ``cos`` and ``sin`` are then (B or 1, 1, N, D), with ones and zeros after R. This takes
            fewer operations, which decide how long a decoding step takes, and computes more.

    Returns:
        (B, heads, N, D) queries and keys in their own dtype, rotated in the dtype of ``cos``.

    Source:
        RoFormer, arXiv:2104.09864, in the form of GPT-NeoX, which the authors' code uses.
    """
    both = torch.cat((queries, keys), dim=1)
    if swap is None:
        part, rest = both.split((cos.shape[-1], both.shape[-1] - cos.shape[-1]), dim=-1)
        precise = part.to(cos.dtype)
        first, second = precise.chunk(2, dim=-1)
        rotated = precise * cos + torch.cat((second, first), dim=-1) * sin
        both = torch.cat((rotated.to(both.dtype), rest), dim=-1)
    else:
        rotated = both * cos + both.index_select(-1, swap) * sin
        both = rotated if rotated.dtype == both.dtype else rotated.to(both.dtype)
    queries, keys = both.chunk(2, dim=1)
    return queries, keys


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, None]:
    """Attend as PyTorch's own function does; an attention function of transformers has this form.

    Args:
        module: The attention layer.
        query: (B, heads, N, D) queries.
        key: (B, heads, all tokens, D) keys.
        value: (B, heads, all tokens, D) values.
        attention_mask: (B or 1, 1, N, all tokens) boolean, true where attention is allowed; None
            for a causal mask over an empty cache, or one token that sees all others.
        scaling: Factor of the scores.

    Returns:
        (B, N, heads, D) outputs, and None: this function returns no attention weights.
    """
    is_causal = attention_mask is None and query.shape[2] > 1
    x = attention(query, key, value, attention_mask, is_causal=is_causal, scale=scaling)
    return x.transpose(1, 2), None


class CausalAttention(Attention):
    """The attention of the vision models with a causal mask, rotation and a cache.

    Attributes:
        layer_idx: Number of the block in the cache. It and ``is_causal`` have the names under which
            attention functions of transformers look for them.
    """

    is_causal = True
    layer_idx: int

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, N, C) tokens to (B, heads, N, D) queries, keys and values, not rotated."""
        B, N, C = x.shape
        # The same with half of the operations, for which the layers get (B, C). A trace fits any N.
        if type(N) is int and N == 1:
            q, k, v = self.query_key_value(x.reshape(B, C))
            shape = B, self.num_heads, 1, self.head_dim
            q, k, v = q.reshape(shape), k.reshape(shape), v.reshape(shape)
        else:
            q, k, v = self.query_key_value(x)
            shape = B, N, self.num_heads, self.head_dim
            q, k, v = (each.reshape(shape).transpose(1, 2) for each in (q, k, v))
        if type(self.q_norm) is not nn.Identity:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Any,
        rotation: tuple[Tensor, ...] | None,
        past_key_values: Any = None,
        attend: Callable[..., tuple[Tensor, Tensor | None]] = attend,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each token to the tokens before it and in the cache.

        Args:
            x: (B, N, C) tokens.
            mask: Mask that ``attend`` takes.
            rotation: What :func:`rotate` takes besides queries and keys.
            past_key_values: Cache that gets the keys and values of these tokens.
            attend: Attention function; see :func:`attend`.

        Returns:
            (B, N, C) tokens, and the attention weights if the function returns them.
        """
        B, N, C = x.shape
        q, k, v = self.project(x)
        if rotation is not None:
            q, k = rotate(q, k, *rotation)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        x, weights = attend(self, q, k, v, mask, scaling=1 / math.sqrt(self.head_dim))
        return self.proj(x.reshape(B, N, C)), weights


class CausalBlock(TokenFormerBlock):
    """The block of the vision models, with :class:`CausalAttention` as its attention."""

    attention = CausalAttention

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map (B, N, C) tokens to (B, N, C); other arguments as in :class:`CausalAttention`."""
        x = x + self.attn(self.norm1(x), *args, **kwargs)[0]
        return x + self.mlp(self.norm2(x))
