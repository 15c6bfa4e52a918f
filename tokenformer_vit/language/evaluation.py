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

from .modeling import TokenFormerForCausalLM

__all__ = [
    "TextLoss",
    "context_of",
    "flatten_rows",
    "float32_head",
    "measure_text",
    "read_text",
    "windows",
]

_IGNORED = -100  # what F.cross_entropy leaves out
_MOST_NATS = 700.0  # exp() of more is no float


@dataclass(frozen=True)
class TextLoss:
    """What the predictions of a text come to.

    Attributes:
        tokens: How many were predicted: all but the first.
        nats: Sum of -log p of these, p being the probability that the model gave each.
        bytes: Of the text in UTF-8, where known; also of its first token.
        words: Of the text, separated by white space, where known.
    """

    tokens: int
    nats: float
    bytes: float | None = None
    words: int | None = None

    @property
    def loss(self) -> float:
        """Nats a token: the loss of training."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Of a token; models of different tokenizers cannot be compared by it."""
        return math.exp(min(self.loss, _MOST_NATS))

    @property
    def bits_per_byte(self) -> float | None:
        """Of any tokenizer, since the text's bytes are the same."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    @property
    def word_perplexity(self) -> float | None:
        """Of a word; None too where a "word" has over 700 nats, as without spaces."""
        if not self.words or self.nats / self.words > _MOST_NATS:
            return None
        return math.exp(self.nats / self.words)

    def values(self) -> dict[str, float | None]:
        """Return all of these under their names, ready for JSON."""
        names = ("tokens", "bytes", "words", "loss")
        names += ("perplexity", "bits_per_byte", "word_perplexity")
        return {name: getattr(self, name) for name in names}


def windows(predicted: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cover a text of ``predicted`` + 1 tokens by windows, so that each prediction counts once.

    Args:
        predicted: Tokens to be predicted, all but the first.
        context: Most tokens that the model reads.
        stride: Tokens from the start of a window to that of the next, at most ``context``.

    Yields:
        ``begin, end, known``: the model reads tokens ``begin`` to ``end`` - 1 and predicts those
        at ``begin`` + 1 to ``end``, of which the window before has predicted ``known``.
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
        tokens: (T,) at least two, below the model's ``vocab_size``.
        context: Most tokens that the model is to read at once.
        stride: Tokens from a window to the next. The default, ``context``, is what training's
            validation does: windows side by side. With less each token but the first ``context``
            is predicted from at least ``context - stride`` others, which takes longer and gives a
            lower loss.
        batch_size: Windows computed at once.
        amp: Compute in bfloat16 where torch.autocast does.
        title: What the progress bar and errors call the text.

    Returns:
        The number of predicted tokens, and the sum of their -log p in nats.

    Raises:
        InputError: If there are too few tokens, one is not in the vocabulary, the stride is out
            of its range, or the loss is not finite.

    Note:
        The log-softmax is float32 and the sum float64. After :func:`float32_head` the logits are
        float32 with ``amp``, too.

    Source:
        "Perplexity of fixed-length models" in the documentation of transformers, whose windows
        side by side do not predict their first token; these do, from the window before.
    """
    stride = stride or context
    predicted, vocab_size = len(tokens) - 1, model.config.vocab_size
    if predicted < 1:
        raise InputError(f"{title} has {len(tokens)} tokens; at least 2 are needed to predict one")
    if not 1 <= stride <= context:
        raise InputError(f"the stride must be 1 to {context}, the context, but it is {stride}")
    if int(tokens.max()) >= vocab_size:
        raise InputError(
            f"{title} has the token {int(tokens.max())}, and the model's vocab_size is "
            f"{vocab_size}: it was made with another tokenizer"
        )
    device, nats = model.device, 0.0
    spans = windows(predicted, context, stride)
    with tqdm(
        total=predicted, desc=printable(title), unit="token", unit_scale=True, disable=None
    ) as bar:
        while batch := list(islice(spans, batch_size)):
            # Causal attention: what fills up a shorter window on the right changes nothing.
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
            f"the model's loss on {title} is {nats}: its weights, or --amp, are at fault"
        )
    return predicted, nats


def float32_head(model: Any) -> None:
    """Take a model's last product, that gives the logits, out of any autocast.

    bfloat16 logits are rounded to steps of up to 1/8 above 16: as much as what answers differ by.

    Args:
        model: Causal language model of transformers with float32 weights; is changed.
    """
    # A TokenFormer's head can be its embedding; other models have a layer for it.
    ours = isinstance(model, TokenFormerForCausalLM)
    owner, name = (model.model, "logits") if ours else (model.get_output_embeddings(), "forward")
    inner = getattr(owner, name)

    def head(features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return inner(features.float())

    setattr(owner, name, head)


def context_of(model: Any, asked: int | None = None) -> int:
    """Return how many tokens a model is to read at once: as many as it can, or fewer if asked.

    Raises:
        InputError: If more are asked for than the model can read, or it does not say how many.
    """
    most: int | None = getattr(model.config, "max_position_embeddings", None)
    context = asked or most
    if context is None:
        raise InputError(
            f"the configuration of this {model.config.model_type} has no context length: give one "
            "(--context)"
        )
    if most and context > most:
        raise InputError(f"--context {context} is more than the model's context of {most} tokens")
    return context


def read_text(path: Path) -> str:
    """Read a UTF-8 file as it is.

    Raises:
        InputError: If it is not UTF-8.
        OSError: If it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start} is no character") from error


def flatten_rows(rows: NDArray[np.integer]) -> NDArray[np.integer]:
    """Join (R, N + 1) rows, each of which begins with the last token of the one before.

    Returns:
        (R · N + 1,) tokens of the whole text.
    """
    return np.concatenate((rows[0, :1], rows[:, 1:].ravel()))
