"""What causal language models are made of: their shape, rotary positions, attention and blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, TokenFormerBlock
from tokenformer_vit.layers.arguments import COUNTS, Counts


@dataclass
class LMConfig:
    """The shape of a causal language model; the defaults are those of the released 150M model.

    Fields without a description are arguments of :class:`.TokenFormerViT`.

    Args:
        vocab_size: V, number of entries of the embedding.
        context_length: Largest number of tokens in a sequence.
        positions: ``rotary``, or ``learned``, which are added to the embedding.
        rotary_share: Share of the dimensions of each head that are rotated, the first ones.
        rotary_base: Base of the wavelengths.
        tie_embeddings: Whether the embedding is also the head. The head has no bias.
        norm: Norms in blocks; the final one is a LayerNorm with its parameters.
    """

    vocab_size: int = 50_304
    context_length: int = 2048
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    num_qkv_param_tokens: Counts = None
    num_proj_param_tokens: Counts = None
    num_ffn_param_tokens: Counts = None
    positions: str = "rotary"
    rotary_share: float = 0.25
    rotary_base: float = 10_000.0
    tie_embeddings: bool = True
    theta: str | dict[str, str] = "gelu_l2"
    norm: str = "none"
    norm_eps: float = 1e-5
    pattention_args: dict[str, Any] | None = None
    nested: tuple[float, ...] = ()
    nested_kinds: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the values that no layer checks."""
        for name in ("nested", "nested_kinds"):
            if isinstance(value := getattr(self, name), list):  # as JSON and configs have it
                setattr(self, name, tuple(value))
        if self.positions not in ("rotary", "learned"):
            raise InputError(f"positions must be rotary or learned, but got {self.positions!r}")
        dims = self.rotary_dims
        if self.positions == "rotary" and (dims < 2 or dims % 2):
            raise InputError(
                f"rotary_share {self.rotary_share} rotates {dims} dimensions of a head: give a "
                "share that rotates an even number, at least 2"
            )

    @property
    def rotary_dims(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.embed_dim // self.num_heads * self.rotary_share)


def _pairs(pairs: int, **shape: int) -> dict[str, int]:
    return {**shape, **dict.fromkeys(COUNTS.values(), pairs), "num_ffn_param_tokens": 4 * pairs}


_RELEASED = {"embed_dim": 1024, "depth": 24, "num_heads": 16, "context_length": 1024}
LM_PRESETS: dict[str, dict[str, Any]] = {
    # Released: 151,881,216, 454,166,528, 903,252,480 and 1,587,219,456 parameters.
    "150m": {},
    "450m": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "900m": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "1.5b": {"embed_dim": 1536, "depth": 40, "num_heads": 16},
    # The growth series of the paper, Figure 3: each model is the one before with more pairs.
    "grown_124m": _pairs(576),
    "grown_354m": _pairs(2140),
    "grown_757m": _pairs(4850),
    "grown_1.4b": _pairs(8620),
    # The growth series that is released, for OpenWebText2 (incremental_scaling_openwebtext2 of the
    # authors' configuration files): 353,503,232 and 756,156,416 parameters.
    "released_354m": _pairs(768, **_RELEASED),
    "released_757m": _pairs(1792, **_RELEASED),
    "tiny": {"embed_dim": 128, "depth": 4, "num_heads": 4, "context_length": 256},
}


def lm_config(preset: str, **changes: Any) -> LMConfig:
    """Return the configuration of a preset of ``LM_PRESETS``, with changes of its fields.

    ``TokenFormerConfig(**vars(lm_config("150m")))`` is that of a model of transformers.
    """
    if preset not in LM_PRESETS:
        raise InputError(f"preset must be one of {', '.join(LM_PRESETS)}, but got {preset!r}")
    return LMConfig(**{**LM_PRESETS[preset], **changes})


def find_positions(tokens: Tensor, past: Any, padding: Tensor | None, context: int) -> Tensor:
    """Return the (B or 1, N) positions of N tokens after ``past`` others; padding has none."""
    N = tokens.shape[1]
    # A static cache has a tensor; reading it waits for the device.
    if not isinstance(past, Tensor) and past + N > context:
        raise InputError(
            f"the sequence has {past + N} tokens, but context_length is {context}: shorten it"
        )
    places = torch.arange(N, device=tokens.device) + past
    if padding is None:
        return places[None]
    return (padding.long().cumsum(dim=1) - 1).clamp(min=0)[:, places]


def find_turns(positions: Tensor, dims: int, base: float) -> Tensor:
    """Return the (B or 1, 1, N, 2 R) sines and cosines of (B or 1, N) positions, in float32."""
    numbers = torch.arange(0, dims, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None] * (base ** (-numbers / dims)).repeat(2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def rotate(queries: Tensor, keys: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
    """Rotate queries and keys as GPT-NeoX does, by (B or 1, 1, N, 2 R) sines and cosines."""
    both = torch.cat((queries, keys), dim=1)  # half of the operations, which decide in decoding
    rotated, rest = both.tensor_split((turns.shape[-1] // 2,), dim=-1)
    return torch.cat((apply_rot_embed_cat(rotated, turns, half=True), rest), -1).chunk(2, dim=1)


class CausalAttention(Attention):
    """The attention of the vision models, which takes a mask, rotations and a cache."""

    is_causal = True  # attention functions of transformers look for this name, and the next
    layer_idx: int  # number of the block in the cache

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Any, turns: Any, cache: Any, attend: Any, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) tokens to (B, N, C), and return the weights that ``attend`` returns.

        ``turns`` are those of :func:`find_turns`, or None; ``cache``, ``attend`` and its ``mask``
        are those of transformers.
        """
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (
            layer(x).reshape(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (B, heads, N, D)
        if turns is not None:
            q, k = rotate(q, k, turns)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, how)  # a paged cache changes it
        mixed, weights = attend(self, q, k, v, mask, scaling=self.scale, **how)
        return self.proj(mixed.reshape(x.shape)), weights


class CausalBlock(TokenFormerBlock):
    """The block of the vision models, with :class:`CausalAttention` as its attention."""

    attention_class = CausalAttention

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map (B, N, C) tokens to (B, N, C); other arguments as in :class:`CausalAttention`."""
        x = x + self.attn(self.norm1(x), *args, **kwargs)[0]
        return x + self.mlp(self.norm2(x))
