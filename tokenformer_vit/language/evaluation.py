"""How well a language model predicts a text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError

_IGNORED = -100  # targets that F.cross_entropy ignores
_MOST_NATS = 700.0  # exp() of more overflows


@dataclass(frozen=True)
class TextLoss:
    """How well a model predicted a text.

    Attributes:
        tokens: Number of predicted tokens: all but the first.
        nats: Sum of -log p over these tokens.
        bytes: UTF-8 bytes of the text, with its first token; None if unknown.
        words: Number of words, separated by white space; None if unknown.
    """

    tokens: int
    nats: float
    bytes: float | None = None
    words: int | None = None

    @property
    def loss(self) -> float:
        """Nats per token, like the loss in training."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity of a token; it compares only models with the same tokenizer."""
        return math.exp(min(self.loss, _MOST_NATS))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte; it compares models with different tokenizers."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    @property
    def word_perplexity(self) -> float | None:
        """Perplexity of a word; None if words are not counted, or above 700 nats a word."""
        if not self.words or self.nats / self.words > _MOST_NATS:
            return None
        return math.exp(self.nats / self.words)

    def values(self) -> dict[str, float | None]:
        """Return all values by name, ready for JSON."""
        names = ("tokens", "bytes", "words", "loss")
        names += ("perplexity", "bits_per_byte", "word_perplexity")
        return {name: getattr(self, name) for name in names}


def windows(predicted: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Divide a text of ``predicted`` + 1 tokens into windows that count each prediction once.

    Args:
        predicted: Number of predicted tokens: all but the first.
        context: Largest number of tokens that the model reads at once.
        stride: Number of tokens from the start of one window to the next, at most ``context``.

    Yields:
        ``begin, end, known``: the model reads tokens ``begin`` to ``end`` - 1 and predicts tokens
        ``begin`` + 1 to ``end``. The first ``known`` of these were already predicted in the window
        before.
    """
    done = 0
    for begin in range(0, predicted, stride):
        end = min(begin + context, predicted)
        yield begin, end, done - begin
        done = end
        if end == predicted:
            return


@torch.inference_mode()
def measure_text(
    model: Any,
    tokens: NDArray[np.integer],
    context: int,
    stride: int | None = None,
    *,
    batch_size: int = 8,
    amp: bool = False,
    title: str = "text",
) -> tuple[int, float]:
    """Predict every token of a text but the first, each once.

    Args:
        model: Causal language model of transformers, in evaluation mode.
        tokens: (T,) two or more tokens below the model's ``vocab_size``.
        context: Largest number of tokens that the model reads at once.
        stride: Number of tokens from one window to the next; default: ``context``, as validation
            in training does. With a smaller stride each token after the first window is
            predicted from at least ``context - stride`` others: slower, and a lower loss.
        batch_size: Number of windows computed at once.
        amp: Whether to compute in bfloat16 under torch.autocast.
        title: Name of the text in the progress bar and in errors.

    Returns:
        The number of predicted tokens, and the sum of their -log p in nats.

    Raises:
        InputError: If there are too few tokens, a token is not in the vocabulary, the stride is
            out of range, or the loss is not finite.

    Note:
        The log-softmax is float32 and the sum float64. After :func:`float32_head` the logits are
        also float32 with ``amp``.

    Source:
        "Perplexity of fixed-length models" in the documentation of transformers. There, windows
        without overlap do not predict their first token; here, the window before predicts it.
    """
    stride = stride or context
    predicted, vocab_size = len(tokens) - 1, model.config.vocab_size
    if predicted < 1:
        raise InputError(f"{title} has {len(tokens)} tokens; give a text of at least 2")
    if not 1 <= stride <= context:
        raise InputError(f"stride must be from 1 to {context}, the context, but got {stride}")
    if int(tokens.max()) >= vocab_size:
        raise InputError(
            f"{title} has the token {int(tokens.max())}, but the model's vocab_size is "
            f"{vocab_size}: prepare the text with the tokenizer of the model"
        )
    device, nats = model.device, 0.0
    spans = windows(predicted, context, stride)
    with tqdm(
        total=predicted, desc=printable(title), unit="token", unit_scale=True, disable=None
    ) as bar:
        while batch := list(islice(spans, batch_size)):
            # With causal attention, padding on the right changes nothing.
            size = max(end - begin for begin, end, _ in batch)
            inputs = np.zeros((len(batch), size), dtype=np.int64)
            targets = np.full((len(batch), size), _IGNORED, dtype=np.int64)
            for row, (begin, end, known) in enumerate(batch):
                inputs[row, : end - begin] = tokens[begin:end]
                targets[row, known : end - begin] = tokens[begin + known + 1 : end + 1]
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                logits = model(torch.from_numpy(inputs).to(device), use_cache=False).logits
            for row, target in zip(logits, torch.from_numpy(targets).to(device), strict=True):
                losses = F.cross_entropy(
                    row.float(), target, ignore_index=_IGNORED, reduction="none"
                )
                nats += losses.sum(dtype=torch.float64).item()
            bar.update(sum(end - begin - known for begin, end, known in batch))
    if not math.isfinite(nats):
        raise InputError(
            f"the model's loss on {title} is {nats}: leave out --amp, or use another checkpoint"
        )
    return predicted, nats


def float32_head(model: Any) -> None:
    """Keep the product that gives the logits in float32 under autocast.

    bfloat16 rounds logits above 16 to multiples of 1/8 or more. Two answers may differ by less.

    Args:
        model: Causal language model of transformers with float32 weights; changed in place.
    """
    head = model.get_output_embeddings()
    inner = head.forward

    def forward(features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return inner(features.float())

    head.forward = forward


def context_of(model: Any, asked: int | None = None) -> int:
    """Return how many tokens the model reads at once: ``asked``, or all that it can.

    Raises:
        InputError: If ``asked`` is more than the model can read, or its configuration does not
            say how many.
    """
    most: int | None = getattr(model.config, "max_position_embeddings", None)
    context = asked or most
    if context is None:
        raise InputError(
            f"the configuration of this {model.config.model_type} has no context length: give "
            "--context"
        )
    if most and context > most:
        raise InputError(f"--context {context} is more than the model's context of {most} tokens")
    return context


def read_text(path: Path) -> str:
    """Read a UTF-8 file without its byte order mark; line ends stay.

    Raises:
        InputError: If it is not UTF-8.
        OSError: If it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start} is invalid; convert the file, for "
            "example with iconv"
        ) from error


def flatten_rows(rows: NDArray[np.integer]) -> NDArray[np.integer]:
    """Join (R, N + 1) rows; each begins with the last token of the row before.

    Returns:
        (R · N + 1,) tokens of the whole text.
    """
    return np.concatenate((rows[0, :1], rows[:, 1:].ravel()))
