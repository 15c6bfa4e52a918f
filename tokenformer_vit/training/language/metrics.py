"""Metrics of language models.

Metrics of image classifiers read the class scores of data samples; these read the losses and
predictions of each token, as ``CausalLM`` returns them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from mmpretrain.registry import METRICS
from torch import Tensor

from tokenformer_vit.errors import InputError

from ..metrics import RowMetric, endings, precise


@METRICS.register_module()
class Perplexity(RowMetric):
    """exp(mean cross-entropy per token), over all rows and over the rows of each text.

    Every token of a text except the first counts once. It is predicted from the tokens before it in
    its row. The perplexity of a smaller size of a nested model has the size in its name:
    ``perplexity_at_0.25``.
    """

    default_prefix = ""  # none, and no warning of it

    @property
    def num_columns(self) -> int:  # type: ignore[override]
        """Number of the text, number of tokens, and the sum of losses at each size."""
        return 2 + len(self._sizes)

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Tensor]]) -> None:
        """Collect the sums of a batch."""
        self._sizes = endings(data_samples[0], "losses")
        sums = [
            torch.stack([precise(row[f"losses{size}"]).sum() for row in data_samples])
            for size in self._sizes
        ]
        sources = torch.stack([row["source"] for row in data_samples])
        tokens = torch.full_like(sums[0], len(data_samples[0]["losses"]))
        self.results.append(torch.stack([sources, tokens, *sums], dim=1))

    def compute_metrics(self, results: Tensor) -> dict[str, float]:  # type: ignore[override]
        """Return ``perplexity``; with several texts also ``perplexity/<name of the folder>``.

        Args:
            results: (N, 2 + sizes), for each row the number of its text, the number of its tokens
                and, for each size, the sum of its losses.
        """
        names = (self.dataset_meta or {}).get("sources", ("",))
        parts = {"": results}
        if len(names) > 1:
            parts |= {
                f"/{name}": results[results[:, 0] == number] for number, name in enumerate(names)
            }
        return {
            f"perplexity{size}{part}": _perplexity(own[:, 2 + index], own[:, 1])
            for index, size in enumerate(self._sizes)
            for part, own in parts.items()
        }


def _perplexity(sums: Tensor, counts: Tensor) -> float:
    total, tokens = sum(sums.tolist()), sum(counts.tolist())
    try:
        return math.exp(total / tokens)
    except OverflowError:
        return math.inf


@METRICS.register_module()
class AnswerAccuracy(RowMetric):
    """Percentage of answers in which every token is the most likely one.

    An answer is the tokens after a start token, up to and with an end token. Each token is
    predicted from the true tokens before it: an answer is right exactly if greedy generation gives
    it. Answers that a row cuts off do not count.

    Args:
        start: Token before an answer.
        end: Last token of an answer.

    Raises:
        InputError: If no row has an answer.
    """

    default_prefix = ""  # none, and no warning of it
    num_columns = 2

    def __init__(self, start: int, end: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._start, self._end = start, end

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Tensor]]) -> None:
        """Count the answers of a batch, and those that are right."""
        targets, right = (
            torch.stack([row[key] for row in data_samples]) for key in ("targets", "right")
        )  # (B, N)
        places = torch.arange(targets.shape[1], device=targets.device)
        start = targets == self._start
        end = (targets == self._end) & ~start
        # The last start up to each place, and the last end before it.
        begin = torch.where(start, places, -1).cummax(dim=1).values
        ended = torch.where(end, places, -1).cummax(dim=1).values.roll(1, dims=1)
        ended[:, 0] = -1
        answers = end & (begin > ended)
        wrong = (~right).cumsum(dim=1)
        none_wrong = wrong == wrong.gather(1, begin.clamp(min=0))
        self.results.append(
            precise(torch.stack([answers.sum(dim=1), (answers & none_wrong).sum(dim=1)], dim=1))
        )

    def compute_metrics(self, results: Tensor) -> dict[str, float]:  # type: ignore[override]
        """Return ``answers/accuracy`` in percent, and ``answers/count``, the number of answers.

        Args:
            results: (N, 2), the answers of each row, and the right ones among them.
        """
        answers, right = results.sum(dim=0).long().tolist()
        if not answers:
            raise InputError(
                f"no row of the validation text has an answer between the tokens {self._start} "
                f"and {self._end}; leave AnswerAccuracy out of val_evaluator"
            )
        return {"answers/accuracy": 100 * right / answers, "answers/count": answers}
