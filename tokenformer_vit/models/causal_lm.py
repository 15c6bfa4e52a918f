"""Causal language models of TokenFormer blocks.

They add an embedding, a causal mask, rotary or learned positions, a cache of keys and values, and a
head to the blocks of the vision models. Read from top to bottom.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import (
    COUNTS,
    counts_by_block,
    model_pattention_args,
)
from tokenformer_vit.layers.block import token_arguments
from tokenformer_vit.ops import is_few, linear

from .causal_block import CausalBlock, KVCache
from .checkpoints import computation_of
from .lm_config import LMConfig
from .sizes import Size, nest_layers, nested_sizes, set_size

# Standard deviation of the initial embeddings and head.
EMBEDDING_STD = 0.02


class TokenFormerDecoder(nn.Module):
    """A causal language model without its head, and without linear layers.

    Args:
        config: Shape of the model.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        checkpoint_blocks: Whether training computes each block again in the backward pass, to save
            memory.
        sizes: The nested sizes, smallest first, then 1.0 for the whole model.

    Shape:
        (B, N) token numbers -> (B, N, C) normalised features.

    Note:
        Initialisation: embeddings N(0, 0.02²), parameter tokens as
        :class:`~tokenformer_vit.layers.Pattention` says, with a ``residual_init_gain`` of
        1/√(2·depth).
        ``pattention_args={"init": "released"}`` draws them as the released code does.

    Source:
        TokenFormer, arXiv:2410.23168, Sections 3 and 4.2.
    """

    block: type[CausalBlock] = CausalBlock
    checkpoint_blocks = False
    # Not buffers: a cast must not round them, and to_empty() must not empty them.
    _turns: tuple[Tensor, Tensor] | None = None
    _turns_of: tuple[float, int] | None = None  # their base and rotated dimensions

    def __init__(
        self,
        config: LMConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config: Any = config
        self.build(config, device, dtype)

    def build(
        self,
        config: LMConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make all layers; arguments as for the class."""
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
            self.block(
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
        for number, block in enumerate(self.blocks):
            block.attn.layer_idx = number  # type: ignore[union-attr]
        for layer in self.blocks.modules():
            if isinstance(layer, Pattention):
                layer.of_model = True
        self.rotary_dims = config.rotary_dims  # torch.compile cannot read a property of a config
        self.sizes = nest_layers(self, config.nested)
        for module in (self.embedding, self.positions):
            if module is not None:
                nn.init.normal_(module.weight, std=EMBEDDING_STD)

    @property
    def shape(self) -> LMConfig:
        """The shape of the model now, after growth or pruning."""
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
        """Compute the features that a head reads.

        Args:
            tokens: (B, N) integers below V: the whole sequence, or the tokens that follow those in
                ``cache``.
            attention_mask: (B, all tokens) true or 1 for tokens, false or 0 for padding; tokens of
                the cache come first. None if there is no padding.
            cache: Keys and values of earlier tokens; the keys and values of ``tokens`` are added.
            positions: (B, N) position of each token in its sequence, below the context length if
                positions are learned; default: counted from the first token that is not padding.

        Returns:
            (B, N, C) normalised features.

        Raises:
            InputError: If sequence and cache together are longer than the context.
        """
        past = 0 if cache is None else cache.get_seq_length()
        self.check_length(past + tokens.shape[1])
        if positions is None:
            positions = find_positions(tokens, past, attention_mask)
        mask = _causal_mask(tokens, past, attention_mask)
        return self.run_blocks(self.embedding(tokens), positions, mask, cache)

    def check_length(self, length: int) -> None:
        """Check that the context has room for a sequence.

        Raises:
            InputError: If it has not.
        """
        if length > self.config.context_length:
            raise InputError(
                f"the sequence has {length} tokens, but the model's context_length is "
                f"{self.config.context_length}: shorten the prompt, or ask for fewer new tokens"
            )

    def run_blocks(
        self, x: Tensor, positions: Tensor, mask: Any, past_key_values: Any, **kwargs: Any
    ) -> Tensor:
        """Compute features of embedded tokens.

        Args:
            x: (B, N, C) embeddings of tokens.
            positions: (B or 1, N) position of each token, as for :meth:`forward`.
            mask: Mask that the attention function takes.
            past_key_values: Cache, or None.
            **kwargs: ``attend``, the attention function.

        Returns:
            (B, N, C) normalised features.
        """
        if self.positions is not None:
            x, rotation = x + self.positions(positions), None
        else:
            rotation = self._rotation(positions, not torch.is_grad_enabled() and is_few(x))
        # A block that is computed twice would append to the cache twice.
        again = self.checkpoint_blocks and self.training and past_key_values is None
        # transformers lowers the depth while the first blocks draft (assistant_early_exit).
        for block in list(self.blocks)[: self.config.depth]:
            run = partial(checkpoint, block, use_reentrant=False) if again else block
            x = run(x, mask, rotation, past_key_values=past_key_values, **kwargs)
        return self.norm(x)

    def set_size(self, size: Size | None) -> None:
        """Use only the first pairs of every layer; it is not saved with the model.

        Args:
            size: Size, as for :meth:`TokenFormerViT.set_size
                <tokenformer_vit.models.TokenFormerViT.set_size>`.

        Raises:
            InputError: If the size is out of range, or a mask is active. Then nothing is changed.
        """
        set_size(self, size)

    def record_param_tokens(self) -> None:
        """Update the numbers of pairs and the sizes in ``config`` after growth or pruning."""
        self.config = self._recorded()

    def _recorded(self) -> LMConfig:
        own = token_arguments(self.blocks, self.shape.pattention_args)  # type: ignore[arg-type]
        self.sizes = nested_sizes(self, self.sizes)
        return replace(self.shape, **own, nested=self.sizes[:-1])

    def _rotation(self, positions: Tensor, few: bool) -> tuple[Tensor, ...]:
        """Return what :func:`rotate` takes besides queries and keys, in float32.

        Args:
            positions: (B or 1, N) positions of tokens, any whole numbers.
            few: Whether operations on them take longer than what they compute.
        """
        device = positions.device
        compiled = torch.compiler.is_compiling()
        # A compiled graph must not make a tensor that stays.
        turns, swap = self._make_turns(device) if compiled else self._kept_turns(device)
        if few and not compiled:
            angles = positions[:, None, :, None] * turns
            return angles.cos(), angles.sin(), swap
        angles = positions[:, None, :, None] * turns[: self.rotary_dims]
        return angles.cos(), angles.sin()

    def _kept_turns(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what :meth:`_make_turns` made, which decoding steps would take long to make."""
        turns, turns_of = self._turns, (self.config.rotary_base, self.rotary_dims)
        if turns is None or turns[0].device != device or self._turns_of != turns_of:
            with torch.inference_mode(False), torch.no_grad():  # training may follow
                turns = self._make_turns(device)
            if type(turns[0]) is Tensor:  # a fake tensor must not stay
                self._turns, self._turns_of = turns, turns_of
        return turns

    def _make_turns(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the (D,) angles of position 1, and the (D,) ``swap`` of :func:`rotate`.

        The first angle of a pair is negative, for its sine; the cosine is the same.
        """
        rotated = self.rotary_dims
        powers = torch.arange(0, rotated, 2, device=device, dtype=torch.float32) / rotated
        turns = self.config.rotary_base**-powers
        dims = torch.arange(self.config.embed_dim // self.config.num_heads, device=device)
        first, second, rest = dims.tensor_split((rotated // 2, rotated))
        angles = torch.cat((-turns, turns, turns.new_zeros(len(rest))))
        return angles, torch.cat((second, first, rest))


class TokenFormerLM(TokenFormerDecoder):
    """A :class:`TokenFormerDecoder` with a head.

    Args:
        config: Shape of the model.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        head: The head, a linear layer without bias; None if the embedding is also the head.

    Shape:
        (B, N) token numbers -> (B, N, V) logits.
    """

    def build(
        self,
        config: LMConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make all layers; arguments as for the class."""
        super().build(config, device, dtype)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(
                config.embed_dim, config.vocab_size, bias=False, device=device, dtype=dtype
            )
            nn.init.normal_(self.head.weight, std=EMBEDDING_STD)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at each position; arguments as for :class:`TokenFormerDecoder`."""
        features = super().forward(tokens, attention_mask, cache, positions)
        return linear(features, (self.embedding if self.head is None else self.head).weight)


def find_positions(tokens: Tensor, past: int | Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the (B or 1, N) positions of the last tokens of sequences.

    Args:
        tokens: (B, N) tokens, or (B, N, C) embeddings of tokens.
        past: Number of tokens before them.
        attention_mask: (B, all tokens or more) 0 for padding, which has no position; None if there
            is none.

    Raises:
        InputError: If the mask has fewer columns than there are tokens.
    """
    N = tokens.shape[1]
    if attention_mask is None:
        if isinstance(past, int):
            return torch.arange(past, past + N, device=tokens.device)[None]
        return (torch.arange(N, device=tokens.device) + past)[None]
    positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    if not isinstance(past, int):  # reading it would wait for the device
        return positions.index_select(1, torch.arange(N, device=tokens.device) + past)
    if attention_mask.shape[1] < past + N:
        raise InputError(
            f"attention_mask is {tuple(attention_mask.shape)}, but there are {past + N} tokens, "
            f"{past} of them in the cache: give a column for each"
        )
    return positions[:, past : past + N]


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
