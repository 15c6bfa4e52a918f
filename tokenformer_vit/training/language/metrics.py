"""Metrics of language models.

Metrics of image classifiers read the class scores of data samples; these read the losses and
predictions of each token, as ``CausalLM`` returns them.
"""

import math
from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric
from mmpretrain.registry import METRICS
from torch import Tensor

from tokenformer_vit.errors import InputError


@METRICS.register_module()
class Perplexity(BaseMetric):
    """exp(mean cross-entropy per token), over all rows and over the rows of each text.

    Every token of a text except the first counts once. It is predicted from the tokens before it in
    its row.
    """

    default_prefix = ""  # none, and no warning of it

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Tensor]]) -> None:
        """Collect the sums of a batch."""
        for row in data_samples:
            losses = row["losses"].double()
            self.results.append((int(row["source"]), float(losses.sum()), len(losses)))

    def compute_metrics(self, results: list[tuple[int, float, int]]) -> dict[str, float]:
        """Return ``perplexity``; with several texts also ``perplexity/<name of the folder>``."""
        names = (self.dataset_meta or {}).get("sources", ("",))
        parts = {"": results}
        if len(names) > 1:
            parts |= {
                f"/{name}": [result for result in results if result[0] == number]
                for number, name in enumerate(names)
            }
        return {f"perplexity{part}": _perplexity(own) for part, own in parts.items()}


def _perplexity(results: list[tuple[int, float, int]]) -> float:
    total, tokens = (sum(column) for column in list(zip(*results, strict=True))[1:])
    try:
        return math.exp(total / tokens)
    except OverflowError:
        return math.inf


@METRICS.register_module()
class AnswerAccuracy(BaseMetric):
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

    def __init__(self, start: int, end: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._start, self._end = start, end

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Tensor]]) -> None:
        """Collect the answers of a batch."""
        for row in data_samples:
            answers, right = 0, 0
            begin: int | None = None
            targets, hits = row["targets"].tolist(), row["right"].tolist()
            for place, token in enumerate(targets):
                if token == self._start:
                    begin = place + 1
                elif token == self._end and begin is not None:
                    answers += 1
                    right += all(hits[begin : place + 1])
                    begin = None
            self.results.append((answers, right))

    def compute_metrics(self, results: list[tuple[int, int]]) -> dict[str, float]:
        """Return ``answers/accuracy`` in percent, and ``answers/count``, the number of answers."""
        answers, right = (sum(column) for column in zip(*results, strict=True))
        if not answers:
            raise InputError(
                f"no row of the validation text has an answer between the tokens {self._start} "
                f"and {self._end}; leave AnswerAccuracy out of val_evaluator"
            )
        return {"answers/accuracy": 100 * right / answers, "answers/count": answers}
