"""Causal language models: the blocks of the vision models, positions, a cache and a head."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, TokenFormerBlock
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block, model_pattention_args
from tokenformer_vit.layers.block import layer_arguments

from .checkpoints import computation_of
from .sizes import model_sizes, nest_layers, nested_arguments, set_size

EMBEDDING_STD = 0.02  # of the initial embeddings and head


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
    """Return the configuration of a preset of ``LM_PRESETS``, with changes of its fields."""
    if preset not in LM_PRESETS:
        raise InputError(f"preset must be one of {', '.join(LM_PRESETS)}, but got {preset!r}")
    return LMConfig(**{**LM_PRESETS[preset], **changes})


class KVCache(list[tuple[Tensor, Tensor]]):
    """Keys and values of the tokens so far, for each layer, as in a cache of transformers."""

    def update(self, keys: Tensor, values: Tensor, layer: int, _: Any = None) -> Any:
        """Append (B, heads, N, D) keys and values of a layer; return all its keys and values."""
        if layer == len(self):
            self.append((keys.clone(), values))  # a view of queries and keys
        else:
            before = self[layer]
            self[layer] = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        return self[layer]

    def get_seq_length(self) -> int:
        """Return the number of tokens that the first layer has read."""
        return self[0][0].shape[2] if self else 0


def rotate(queries: Tensor, keys: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
    """Rotate queries and keys as GPT-NeoX does, by (B or 1, 1, N, 2 R) sines and cosines."""
    both = torch.cat((queries, keys), dim=1)  # half of the operations, which decide in decoding
    rotated, rest = both.tensor_split((turns.shape[-1] // 2,), dim=-1)
    return torch.cat((apply_rot_embed_cat(rotated, turns, half=True), rest), -1).chunk(2, dim=1)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float
) -> tuple[Tensor, None]:
    """Attend by PyTorch's own function, in the form of an attention function of transformers."""
    # True where attention is allowed; no mask if the cache is empty or one token sees all.
    is_causal = attention_mask is None and query.shape[2] > 1
    x = F.scaled_dot_product_attention(query, key, value, attention_mask, 0.0, is_causal)
    return x.transpose(1, 2), None  # (B, N, heads, D), no weights


class CausalAttention(Attention):
    """The attention of the vision models with a causal mask, rotation and a cache."""

    is_causal = True  # attention functions of transformers look for this name, and the next
    layer_idx: int  # number of the block in the cache

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Any, turns: Any, cache: Any = None, attend: Any = attend, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) tokens to (B, N, C), and return the weights that ``attend`` returns."""
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


class TokenFormerDecoder(nn.Module):
    """A causal language model without its head; TokenFormer, arXiv:2410.23168, Section 4.2.

    Args:
        config: Shape of the model.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Shape:
        (B, N) token numbers -> (B, N, C) normalised features.
    """

    block_class: type[CausalBlock] = CausalBlock
    sizes, set_size = property(model_sizes), set_size

    def __init__(self, config: LMConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.make_layers(replace(config), device=device, dtype=dtype)

    def make_layers(self, config: LMConfig, **place: Any) -> None:
        """Make all layers; the class for transformers has a constructor of its own."""
        LMConfig.__post_init__(config)  # transformers may have changed fields after it
        self._config, width = config, config.embed_dim
        shared = model_pattention_args(config.pattention_args, width, config.depth)
        counts = {name: getattr(config, name) for name in COUNTS.values()}
        self.embedding, self.positions = nn.Embedding(config.vocab_size, width, **place), None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, width, **place)
        self.blocks = nn.ModuleList(
            self.block_class(
                width,
                config.num_heads,
                **numbers,
                theta=config.theta,
                norm=config.norm,
                norm_eps=config.norm_eps,
                residual_init_gain=(2 * config.depth) ** -0.5,
                pattention_args=shared,
                **place,
            )
            for numbers in counts_by_block(config.depth, **counts)
        )
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, **place)
        for number, block in enumerate(self.blocks):
            block.attn.layer_idx = number  # type: ignore[union-attr]
        nest_layers(self, config.nested, config.nested_kinds)
        for table in filter(None, (self.embedding, self.positions)):
            nn.init.normal_(table.weight, std=EMBEDDING_STD)

    @property
    def config(self) -> LMConfig:
        """The shape of the model, with the pairs and sizes that its layers have now."""
        return replace(self._config, **self.pair_fields())

    def pair_fields(self) -> dict[str, Any]:
        """Return the fields of the configuration that growth and pruning change."""
        arguments = layer_arguments(self.blocks, self._config.pattention_args)
        return arguments | nested_arguments(self)

    def computation(self) -> dict[str, Any]:
        """Return the fields of the configuration that the tensors do not show."""
        return computation_of({**asdict(self._config), **self.pair_fields()})

    def forward(
        self, tokens: Tensor, attention_mask: Any = None, cache: Any = None, positions: Any = None
    ) -> Tensor:
        """Compute the (B, N, C) features that a head reads.

        Args:
            tokens: (B, N) integers below V: the whole sequence, or those after the cache.
            attention_mask: (B, all tokens) true or 1 for tokens, false or 0 for padding; tokens of
                the cache come first. None if there is no padding.
            cache: :class:`KVCache` of earlier tokens; those of ``tokens`` are added.
            positions: (B, N) position of each token in its sequence, below the context length if
                positions are learned; default: counted from the first token that is not padding.
        """
        past = cache.get_seq_length() if cache else 0
        if positions is None:
            positions = self.find_positions(tokens, past, attention_mask)
        mask = _causal_mask(tokens, past, attention_mask)
        return self.run_blocks(self.embedding(tokens), positions, mask, cache)

    def find_positions(self, tokens: Tensor, past: Any, attention_mask: Tensor | None) -> Tensor:
        """Return the (B or 1, N) positions of N tokens after ``past`` others; padding has none."""
        N, context = tokens.shape[1], self._config.context_length
        # A static cache has a tensor; reading it waits for the device.
        if not isinstance(past, Tensor) and past + N > context:
            raise InputError(
                f"the sequence has {past + N} tokens, but context_length is {context}: shorten it"
            )
        places = torch.arange(N, device=tokens.device) + past
        if attention_mask is None:
            return places[None]
        return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, places]

    def run_blocks(self, x: Tensor, positions: Tensor, mask: Any, cache: Any, **how: Any) -> Tensor:
        """Compute the (B, N, C) features of (B, N, C) embedded tokens at (B or 1, N) positions."""
        turns, rotated = None, self._config.rotary_dims
        if self.positions is not None:
            x = x + self.positions(positions)
        else:  # (B or 1, 1, N, 2 R) sines and cosines, in float32
            dims = torch.arange(0, rotated, 2, device=positions.device, dtype=torch.float32)
            frequencies = self._config.rotary_base ** (-dims / rotated)
            angles = positions[:, None, :, None] * frequencies.repeat(2)
            turns = torch.cat((angles.sin(), angles.cos()), dim=-1)
        # transformers lowers the depth while the first blocks draft (assistant_early_exit).
        for block in list(self.blocks)[: self._config.depth]:
            x = block(x, mask, turns, cache=cache, **how)
        return self.norm(x)


class TokenFormerLM(TokenFormerDecoder):
    """A :class:`TokenFormerDecoder` and a head without bias: (B, N) tokens -> (B, N, V) logits."""

    def __init__(self, config: LMConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__(config, device, dtype)
        self.head = None  # the embedding is also the head
        if not config.tie_embeddings:
            self.head = nn.Linear(config.embed_dim, config.vocab_size, False, device, dtype)
            nn.init.normal_(self.head.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Predict the next token at each position; arguments as for :class:`TokenFormerDecoder`."""
        head = self.head or self.embedding
        return F.linear(super().forward(tokens, *args, **kwargs), head.weight)


def _causal_mask(tokens: Tensor, past: int, attention_mask: Tensor | None) -> Tensor | None:
    """Return a (B or 1, 1, N, all tokens) boolean mask, or None as :func:`attend` takes it."""
    N = tokens.shape[1]
    if attention_mask is None and (past == 0 or N == 1):
        return None
    causal = torch.ones(N, past + N, dtype=torch.bool, device=tokens.device).tril(past)
    if attention_mask is None:
        return causal[None, None]
    # Padding may attend to itself: a row without any token would give NaN.
    own = torch.eye(past + N, dtype=torch.bool, device=tokens.device)[past:]
    return (causal & attention_mask.bool()[:, None, None, :]) | own
