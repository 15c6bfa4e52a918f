"""Benchmark of a TokenFormer for language against a Transformer.

Both are models of transformers. This module does not import transformers: the caller gives
functions that build the models.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer_vit.models.compilation import blocks_of

from .costs import model_costs, total
from .variants import Group, as_released, set_backend

# Largest number of tokens of a sequence that a decoding step adds, one by one.
_DECODED = 32


class Decoder(nn.Module):
    """A causal language model of transformers, with its blocks in ``blocks``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.blocks = blocks_of(model.base_model)

    def forward(self, tokens: Tensor, **kwargs: Any) -> Any:
        """Return the output of the model for (B, N) tokens."""
        return self.model(input_ids=tokens, **kwargs)


class Language(NamedTuple):
    """Two language models to measure.

    Args:
        model: Function that builds the TokenFormer, as a causal language model of transformers.
        baseline: Function that builds the Transformer.
        vocab_size: Entries of both embeddings.
        num_tokens: Length N of a sequence.
    """

    model: Callable[[], nn.Module]
    baseline: Callable[[], nn.Module]
    vocab_size: int
    num_tokens: int

    unit = "token"
    modes = ("train", "prefill", "decode")

    @property
    def decoded(self) -> int:
        """Number of tokens that a decoding step adds to each sequence."""
        return min(_DECODED, self.num_tokens // 2)

    def create(self, implementation: str, seed: int) -> Decoder:
        """Build the baseline, or our model in one of ``BACKENDS``, with random weights."""
        torch.manual_seed(seed)
        if implementation == "baseline":
            return Decoder(self.baseline())
        decoder = Decoder(self.model())
        if implementation == "released":
            return as_released(decoder)
        return set_backend(decoder, implementation)

    def costs(self, implementation: str) -> tuple[int, dict[str, int]]:
        """Count the parameters, and the FLOPs per token in each mode.

        In ``prefill``, the head is computed only for the last token. A decoded token attends to
        itself and to the tokens before it.
        """
        with torch.device("meta"):
            model = self.create(implementation, 0)
        whole, single = (model_costs(model, tokens) for tokens in (self.num_tokens, 1))
        forward, attention = total(whole).forward_flops, single["token_token"].forward_flops
        prompt = forward - whole["head"].forward_flops + single["head"].forward_flops
        others = self.num_tokens - (self.decoded + 1) / 2  # on average; ``single`` has one of them
        return total(whole).parameters, {
            "train": 3 * forward // self.num_tokens,
            "prefill": prompt // self.num_tokens,
            "decode": round(total(single).forward_flops + attention * others),
        }

    def shape(self, group: Group) -> list[int]:
        """Return (B, N)."""
        return [group.batch_size, self.num_tokens]

    def items(self, group: Group) -> int:
        """Return the number of tokens that a step trains on, reads or adds."""
        return group.batch_size * (self.decoded if group.mode == "decode" else self.num_tokens)

    def draw(self, group: Group, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens, and the next token of each."""
        shape = (group.batch_size, self.num_tokens + 1)
        rows = torch.randint(self.vocab_size, shape, generator=random)
        return rows[:, :-1], rows[:, 1:]

    def bind(
        self, model: nn.Module, group: Group, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> Callable[[], Tensor]:
        """Return a function that computes the loss in training, and the last logits otherwise."""
        if group.mode == "decode":
            return self._decoding(model, batches[0][0])
        turn = itertools.cycle(batches)

        def train() -> Tensor:
            tokens, targets = next(turn)
            logits = model(tokens, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def prefill() -> Tensor:
            return model(next(turn)[0], use_cache=False, logits_to_keep=1).logits

        return train if group.mode == "train" else prefill

    def _decoding(self, model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
        """Return a function that continues the sequences greedily."""
        known = self.num_tokens - self.decoded
        cache: Any = None
        name = ""

        def decode() -> Tensor:
            nonlocal cache, name
            if cache is None:  # in the warm-up, which runs in the same precision
                start = model(tokens[:, :known], use_cache=True, logits_to_keep=1)
                name = "cache" if "cache" in start else "past_key_values"  # of transformers
                cache = start[name]
            token = tokens[:, known : known + 1]
            for _ in range(self.decoded):
                logits = model(token, use_cache=True, **{name: cache}).logits
                token = logits[:, -1].argmax(dim=-1, keepdim=True)
            cache.crop(-self.decoded)
            return logits  # type: ignore[possibly-unbound]

        return decode
