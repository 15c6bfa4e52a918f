"""What a language model is validated by."""

import math
from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric
from mmpretrain.registry import METRICS
from torch import Tensor

from tokenformer_vit.errors import InputError


@METRICS.register_module()
class Perplexity(BaseMetric):
    """exp of the mean cross-entropy a token, of all rows and of each text by itself.

    Every token but the first of a text is predicted once, from those before it in its row.
    """

    default_prefix = ""  # none, and no warning of it

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Tensor]]) -> None:
        """Take the sums of some rows."""
        for row in data_samples:
            losses = row["losses"].double()
            self.results.append((int(row["source"]), float(losses.sum()), len(losses)))

    def compute_metrics(self, results: list[tuple[int, float, int]]) -> dict[str, float]:
        """Return ``perplexity``, and of several texts also ``perplexity/<name of the folder>``."""
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
    """Share of answers, in percent, whose every token is the model's likeliest.

    An answer is what follows a start token, up to its end token and with it. Since each token is
    predicted from the true ones before it, all of an answer is right exactly where greedy
    generation from the text before it gives the answer. What a row cuts off does not count.

    Args:
        start: Token behind which an answer begins.
        end: Token that ends it.

    Raises:
        InputError: If no row holds an answer.
    """

    default_prefix = ""  # none, and no warning of it

    def __init__(self, start: int, end: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._start, self._end = start, end

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Tensor]]) -> None:
        """Look for the answers in some rows."""
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
        """Return ``answers/accuracy``, and ``answers/count``, how many there were."""
        answers, right = (sum(column) for column in zip(*results, strict=True))
        if not answers:
            raise InputError(
                f"no row of the validation text holds an answer between the tokens {self._start} "
                f"and {self._end}; leave AnswerAccuracy out of val_evaluator"
            )
        return {"answers/accuracy": 100 * right / answers, "answers/count": answers}
