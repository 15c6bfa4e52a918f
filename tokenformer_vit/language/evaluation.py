"""How well a language model predicts a text."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tqdm import tqdm

from tokenformer_vit.errors import InputError

_IGNORED = -100  # targets that F.cross_entropy ignores


def text_values(
    tokens: int, nats: float, bytes: int | None = None, words: int | None = None
) -> dict[str, Any]:
    """Turn the loss of a text into what records have.

    Args:
        tokens: Number of predicted tokens: all but the first.
        nats: Sum of -log p over these tokens.
        bytes: UTF-8 bytes of the text, with its first token; None if unknown.
        words: Number of words, separated by white space; None if unknown.

    Returns:
        ``tokens``, ``bytes``, ``words``; ``loss`` in nats a token; ``perplexity`` of a token, which
        compares only models with the same tokenizer; ``bits_per_byte`` and ``word_perplexity``,
        which compare any models; null if unknown.
    """

    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    return {
        "tokens": tokens,
        "bytes": bytes,
        "words": words,
        "loss": nats / tokens,
        "perplexity": exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / bytes if bytes else None,
        "word_perplexity": exp(nats / words) if words else None,
    }


def windows(predicted: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Divide a text of ``predicted`` + 1 tokens into windows that count each prediction once.

    Yields ``begin, end, known``: the model reads tokens ``begin`` to ``end`` - 1 and predicts
    tokens ``begin`` + 1 to ``end``; the window before already predicted the first ``known``.
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
        stride: Number of tokens from one window to the next, at most the context; default: the
            context, as validation in training does. With a smaller stride each token after the
            first window is predicted from at least ``context - stride`` others: slower, and a lower
            loss.
        batch_size: Number of windows computed at once.
        amp: Whether to compute in bfloat16 under torch.autocast.
        title: Name of the text in the progress bar and in errors.

    Returns:
        The number of predicted tokens, and the sum of their -log p in nats.

    Raises:
        InputError: If there are too few tokens, or the loss is not finite.

    Note:
        The log-softmax is float32 and the sum float64; with ``amp`` logits are bfloat16.

    Source:
        "Perplexity of fixed-length models" in the documentation of transformers. There, windows
        without overlap do not predict their first token; here, the window before predicts it.
    """
    predicted = len(tokens) - 1
    if predicted < 1:
        raise InputError(f"{title} has {len(tokens)} tokens; give a text of at least 2")
    device, nats = model.device, 0.0
    spans = windows(predicted, context, stride or context)
    with tqdm(total=predicted, desc=title, unit="token", unit_scale=True, disable=None) as bar:
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
