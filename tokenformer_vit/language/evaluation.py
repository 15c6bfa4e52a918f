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
    """Turn the sum of -log p over the predicted tokens of a text into what records have.

    ``perplexity`` is that of a token, and compares only models with the same tokenizer;
    ``bits_per_byte`` and ``word_perplexity`` compare any models. None if unknown.
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
    """Predict every one of (T,) tokens but the first; return their number, and the sum of -log p.

    With a ``stride`` below the context, each token after the first window is predicted from at
    least ``context - stride`` others: slower, and a lower loss. The log-softmax is float32 and the
    sum float64; with ``amp`` the logits are bfloat16.
    "Perplexity of fixed-length models" in the documentation of transformers does not predict the
    first token of a window; here, the window before predicts it.
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
