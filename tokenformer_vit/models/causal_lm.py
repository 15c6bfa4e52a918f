"""Causal language models of TokenFormer blocks.

They add an embedding, a causal mask, rotary or learned positions, a cache of keys and values, and a
head to the blocks of the vision models. Read from top to bottom.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import (
    COUNTS,
    counts_by_block,
    model_pattention_args,
)
from tokenformer_vit.layers.block import token_arguments

from .lm_config import LMConfig
from .sizes import Size, nest_layers, nested_sizes, set_size


class KVCache:
    """Keys and values of the tokens so far, for each layer.

    A cache of transformers has the same two methods and can be used instead.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append (B, heads, N, D) keys and values of a layer; return all its keys and values."""
        if layer == len(self._layers):
            self._layers.append((keys, values))
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


def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of each head by the angle of its position.

    Dimensions r and r + R / 2 form a pair.

    Args:
        queries: (B, heads, N, D) queries.
        keys: (B, heads, N, D) keys.
        cos: (B or 1, 1, N, R) with R ≤ D; both halves along R hold the same angles.
        sin: (B or 1, 1, N, R).

    Returns:
        (B, heads, N, D) queries and keys in their own dtype, rotated in the dtype of ``cos``.

    Source:
        RoFormer, arXiv:2104.09864, in the form of GPT-NeoX, which the authors' code uses.
    """
    dims = cos.shape[-1]
    # Both at once: when decoding, the number of operations counts, not their size.
    part = torch.cat((queries[..., :dims], keys[..., :dims]), dim=1).to(cos.dtype)
    first, second = part.chunk(2, dim=-1)
    rotated = part * cos + torch.cat((-second, first), dim=-1) * sin
    q, k = rotated.to(queries.dtype).chunk(2, dim=1)
    return (
        torch.cat((q, queries[..., dims:]), dim=-1),
        torch.cat((k, keys[..., dims:]), dim=-1),
    )


class CausalAttention(Attention):
    """The attention of the vision models with a causal mask, rotation and a cache."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
    ) -> Tensor:
        """Attend from each token to the tokens before it and in the cache.

        Args:
            x: (B, N, C) tokens.
            mask: (B or 1, 1, N, all tokens) boolean, true where attention is allowed; None for a
                causal mask over an empty cache, or one token that sees all others.
            rotation: Cosines and sines of the positions.
            cache: Cache that gets the keys and values of these tokens.
            layer: Number of the block in the cache.

        Returns:
            (B, N, C) tokens.
        """
        B, N, C = x.shape
        q, k, v = self.project(x)  # (B, heads, N, D)
        if rotation is not None:
            q, k = rotate(q, k, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, layer)
            if mask is None and k.shape[2] != cache.get_seq_length():
                raise InputError(
                    f"the cache has room for {k.shape[2]} tokens and holds "
                    f"{cache.get_seq_length()}; use a cache that grows (cache_implementation "
                    "'dynamic')"
                )
        is_causal = mask is None and N > 1
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class CausalBlock(TokenFormerBlock):
    """The block of the vision models, with :class:`CausalAttention` as its attention."""

    attention = CausalAttention

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
    ) -> Tensor:
        """Map (B, N, C) tokens to (B, N, C); see :class:`CausalAttention`."""
        x = x + self.attn(self.norm1(x), mask, rotation, cache, layer)
        return x + self.mlp(self.norm2(x))


class TokenFormerLM(nn.Module):
    """A causal language model without linear layers in its blocks.

    Args:
        config: Shape of the model.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        gradient_checkpointing: Whether training computes each block again in the backward pass, to
            save memory.
        sizes: The nested sizes, smallest first, then 1.0 for the whole model.

    Shape:
        (B, N) token numbers -> (B, N, V) logits.

    Note:
        Initialisation: embeddings N(0, 0.02²), parameter tokens as
        :class:`~tokenformer_vit.layers.Pattention` says, with a ``residual_init_gain`` of
        1/√(2·depth).
        ``pattention_args={"init": "released"}`` draws them as the released code does.

    Source:
        TokenFormer, arXiv:2410.23168, Sections 3 and 4.2.
    """

    def __init__(
        self,
        config: LMConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        # transformers looks for these two names and sets both.
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        width, place = config.embed_dim, {"device": device, "dtype": dtype}
        shared = model_pattention_args(config.pattention_args, width, config.depth)
        counts = {name: getattr(config, name) for name in COUNTS.values()}
        self.embedding = nn.Embedding(config.vocab_size, width, **place)  # type: ignore[arg-type]
        self.positions = (
            nn.Embedding(config.context_length, width, **place)  # type: ignore[arg-type]
            if config.positions == "learned"
            else None
        )
        self.blocks = nn.ModuleList(
            CausalBlock(
                width,
                config.num_heads,
                **numbers,
                theta=config.theta,
                norm=config.norm,
                norm_eps=config.norm_eps,
                residual_init_gain=(2 * config.depth) ** -0.5,
                pattention_args=shared,
                device=device,
                dtype=dtype,
            )
            for numbers in counts_by_block(config.depth, **counts)
        )
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, **place)  # type: ignore[arg-type]
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(width, config.vocab_size, bias=False, **place)  # type: ignore[arg-type]
        )
        for layer in self.blocks.modules():
            if isinstance(layer, Pattention):
                layer.of_model = True
        self.sizes = nest_layers(self, config.nested)
        for module in (self.embedding, self.positions, self.head):
            if module is not None:
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at each position: :meth:`logits` of :meth:`features`."""
        return self.logits(self.features(tokens, attention_mask, cache, positions))

    def features(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the features that the head reads.

        Args:
            tokens: (B, N) integers below V: the whole sequence, or the tokens that follow those in
                ``cache``.
            attention_mask: (B, all tokens) true or 1 for tokens, false or 0 for padding; tokens of
                the cache come first. None if there is no padding.
            cache: Keys and values of earlier tokens; the keys and values of ``tokens`` are added.
            positions: (B, N) position of each token in its sequence; default: counted from the
                first token that is not padding.

        Returns:
            (B, N, C) normalised features.

        Raises:
            InputError: If sequence and cache together are longer than the context.
        """
        past = 0 if cache is None else cache.get_seq_length()
        total = past + tokens.shape[1]
        if total > self.config.context_length:
            raise InputError(
                f"the sequence has {total} tokens, but the model's context_length is "
                f"{self.config.context_length}: shorten the prompt, or ask for fewer new tokens"
            )
        if positions is None:
            if attention_mask is None:
                positions = torch.arange(past, total, device=tokens.device)[None]
            else:
                positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, past:]
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        mask = _causal_mask(tokens, past, attention_mask)
        rotation = None if self.positions is not None else self._rotation(positions)
        # A block that is computed twice would append to the cache twice.
        again = self.gradient_checkpointing and self.training and cache is None
        for layer, block in enumerate(self.blocks):
            run = partial(self._gradient_checkpointing_func, block) if again else block
            x = run(x, mask, rotation, cache, layer)
        return self.norm(x)

    def logits(self, features: Tensor) -> Tensor:
        """Map (..., C) features to (..., V) logits."""
        return F.linear(features, (self.embedding if self.head is None else self.head).weight)

    def set_size(self, size: Size | None) -> None:
        """Use only the first pairs of every layer; it is not saved with the model.

        Args:
            size: Size, as for :meth:`TokenFormerViT.set_size
                <tokenformer_vit.models.TokenFormerViT.set_size>`.

        Raises:
            InputError: If the size is out of range, a mask is active, or a ``top_k`` is larger than
                the size. Then nothing is changed.
        """
        set_size(self, size)

    def record_param_tokens(self) -> None:
        """Update the numbers of pairs and the sizes in ``config`` after growth or pruning."""
        own = token_arguments(self.blocks, self.config.pattention_args)  # type: ignore[arg-type]
        self.sizes = nested_sizes(self, self.sizes)
        self.config = replace(self.config, **own, nested=self.sizes[:-1])

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B or 1, 1, N, R) cosines and sines in float32."""
        dims = self.config.rotary_dims
        powers = torch.arange(0, dims, 2, device=positions.device, dtype=torch.float32) / dims
        angles = positions[:, None, :, None] * self.config.rotary_base**-powers
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _causal_mask(tokens: Tensor, past: int, attention_mask: Tensor | None) -> Tensor | None:
    """Return a (B or 1, 1, N, all tokens) boolean mask, or None for the plain causal mask.

    A single token without padding attends to all tokens; it needs no mask either.
    """
    N = tokens.shape[1]
    if attention_mask is None and (past == 0 or N == 1):
        return None
    causal = torch.ones(N, past + N, dtype=torch.bool, device=tokens.device).tril(past)
    if attention_mask is None:
        return causal[None, None]
    mask = causal & attention_mask.bool()[:, None, None, :]
    # Padding may attend to itself: a row without any token would give NaN.
    own = torch.eye(past + N, dtype=torch.bool, device=tokens.device)[past:]
    return mask | own
