"""Metrics of language models, of the losses and predictions of each token by ``CausalLM``."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

from ..engine import METRICS
from ..metrics import SumMetric, endings, sum_dtype


@METRICS.register_module()
class Perplexity(SumMetric):
    """exp(mean cross-entropy per token), over all rows and over the rows of each text.

    A token is predicted from the tokens before it in its row. A smaller size of a nested model has
    ``perplexity_at_0.25``.
    """

    def sums(self, data_samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Add up tokens and losses, of all rows and of those of each of several texts."""
        sources = torch.stack([row["source"] for row in data_samples])  # (B,)
        rows = {"": torch.ones_like(sources, dtype=torch.bool)}
        texts = (self.dataset_meta or {}).get("sources", ())
        if len(texts) > 1:
            rows |= {f"/{name}": sources == number for number, name in enumerate(texts)}
        length = len(data_samples[0]["losses"])
        found = {f"tokens{text}": own.sum() * length for text, own in rows.items()}
        for size in endings(data_samples[0], "losses"):
            tokens = torch.stack([row[f"losses{size}"] for row in data_samples])
            losses = tokens.sum(dim=1, dtype=sum_dtype())  # (B,)
            for text, own in rows.items():
                found[f"perplexity{size}{text}"] = torch.where(own, losses, 0).sum()
        return found

    def compute_metrics(self, results: dict[str, float]) -> dict[str, float]:  # type: ignore[override]
        """Return the perplexities."""
        found = {}
        for name, total in results.items():
            _, slash, text = name.partition("/")
            tokens = results.get(f"tokens{slash}{text}")
            if name.startswith("perplexity") and tokens:  # a shortened validation may lack a text
                found[name] = math.inf if total > 700 * tokens else math.exp(total / tokens)
        return found


@METRICS.register_module()
class AnswerAccuracy(SumMetric):
    """Percentage of answers in which every token is the most likely one.

    An answer is the tokens after a ``start`` token, up to and with an ``end`` token in its row. It
    is right exactly if greedy generation gives it.
    """

    def __init__(self, start: int, end: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._start, self._end = start, end

    def sums(self, data_samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
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
        return {"answers": answers.sum(), "right": (answers & none_wrong).sum()}

    def compute_metrics(self, results: dict[str, float]) -> dict[str, float]:  # type: ignore[override]
        """Return ``answers/accuracy`` in percent, and ``answers/count``, the number of answers."""
        answers, right = int(results["answers"]), int(results["right"])
        if not answers:
            raise InputError(
                f"no row has an answer between the tokens {self._start} and {self._end}; leave "
                "AnswerAccuracy out of val_evaluator"
            )
        return {"answers/accuracy": 100 * right / answers, "answers/count": answers}
