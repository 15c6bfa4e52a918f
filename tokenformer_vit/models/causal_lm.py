"""Causal language models: the blocks of the vision models, positions, a cache and a head."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS, counts_by_block, model_pattention_args
from tokenformer_vit.layers.block import token_arguments

from .causal_block import CausalBlock, KVCache
from .checkpoints import computation_of
from .lm_config import LMConfig
from .sizes import Size, nest_layers, nested_sizes, set_size

EMBEDDING_STD = 0.02  # of the initial embeddings and head


class TokenFormerDecoder(nn.Module):
    """A causal language model without its head, and without linear layers.

    Args:
        config: Shape of the model.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Shape:
        (B, N) token numbers -> (B, N, C) normalised features.

    Note:
        Embeddings start from N(0, 0.02²), parameter tokens as
        :class:`~tokenformer_vit.layers.Pattention` says with a ``residual_init_gain`` of
        1/√(2·depth), or as in the released code by ``pattention_args={"init": "released"}``.

    Source:
        TokenFormer, arXiv:2410.23168, Sections 3 and 4.2.
    """

    block: type[CausalBlock] = CausalBlock

    def __init__(self, config: LMConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.config: Any = config
        self.build(config, device=device, dtype=dtype)

    def build(self, config: LMConfig, **place: Any) -> None:
        """Make all layers; the class for transformers has a constructor of its own."""
        width = config.embed_dim
        shared = model_pattention_args(config.pattention_args, width, config.depth)
        counts = {name: getattr(config, name) for name in COUNTS.values()}
        self.embedding = nn.Embedding(config.vocab_size, width, **place)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, width, **place)
        self.blocks = nn.ModuleList(
            self.block(
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
        self.rotary_dims = config.rotary_dims
        self.sizes = nest_layers(self, config.nested)
        for module in self.children():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=EMBEDDING_STD)

    @property
    def shape(self) -> LMConfig:
        """The shape of the model now; the class for transformers has other configurations."""
        return self.config

    def computation(self) -> dict[str, Any]:
        """Return the fields of the shape that the tensors do not show."""
        return computation_of(vars(self.shape))

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the (B, N, C) features that a head reads.

        Args:
            tokens: (B, N) integers below V: the whole sequence, or those after the cache.
            attention_mask: (B, all tokens) true or 1 for tokens, false or 0 for padding; tokens of
                the cache come first. None if there is no padding.
            cache: Keys and values of earlier tokens; those of ``tokens`` are added.
            positions: (B, N) position of each token in its sequence, below the context length if
                positions are learned; default: counted from the first token that is not padding.
        """
        past = cache.get_seq_length() if cache else 0
        if positions is None:
            self.check_length(past + tokens.shape[1])
            positions = find_positions(tokens, past, attention_mask)
        mask = _causal_mask(tokens, past, attention_mask)
        return self.run_blocks(self.embedding(tokens), positions, mask, cache)

    def check_length(self, length: int) -> None:
        """Refuse a sequence that is longer than the context."""
        if length > (context := self.config.context_length):
            raise InputError(
                f"the sequence has {length} tokens, but context_length is {context}: shorten it"
            )

    def run_blocks(
        self, x: Tensor, positions: Tensor, mask: Any, cache: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the (B, N, C) features of (B, N, C) embedded tokens at (B or 1, N) positions."""
        if self.positions is None:
            turns = self._turns(positions)
        else:
            x, turns = x + self.positions(positions), None
        # transformers lowers the depth while the first blocks draft (assistant_early_exit).
        for block in list(self.blocks)[: self.config.depth]:
            x = block(x, mask, turns, cache=cache, **kwargs)
        return self.norm(x)

    def _turns(self, positions: Tensor) -> Tensor:
        """Return the (B or 1, 1, N, 2 R) sines and cosines of :func:`rotate`, in float32."""
        dims = torch.arange(0, self.rotary_dims, 2, device=positions.device, dtype=torch.float32)
        turns = self.config.rotary_base ** (-dims / self.rotary_dims)
        angles = positions[:, None, :, None] * turns.repeat(2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def set_size(self, size: Size | None) -> None:
        """Use only the first pairs of every layer, as :meth:`.TokenFormerViT.set_size` does."""
        set_size(self, size)

    def record_param_tokens(self) -> None:
        """Update the numbers of pairs and the sizes in ``config`` after growth or pruning."""
        own = token_arguments(self.blocks, self.shape.pattention_args)  # type: ignore[arg-type]
        self.sizes = nested_sizes(self, self.sizes)
        self.take(replace(self.shape, **own, nested=self.sizes[:-1]))

    def take(self, shape: LMConfig) -> None:
        """Keep a new shape."""
        self.config = shape


class TokenFormerLM(TokenFormerDecoder):
    """A :class:`TokenFormerDecoder` with a head: from (B, N) tokens to (B, N, V) logits.

    ``head`` is a linear layer without bias, or None if the embedding is also the head.
    """

    def build(self, config: LMConfig, **place: Any) -> None:
        """Make all layers."""
        super().build(config, **place)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False, **place)
            nn.init.normal_(self.head.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Predict the next token at each position; arguments as for :class:`TokenFormerDecoder`."""
        head = self.embedding if self.head is None else self.head
        return F.linear(super().forward(tokens, *args, **kwargs), head.weight)


def find_positions(tokens: Tensor, past: int | Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the (B or 1, N) positions of N tokens after ``past`` others; padding has none."""
    places = torch.arange(tokens.shape[1], device=tokens.device) + past
    if attention_mask is None:
        return places[None]
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, places]


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
