"""Tables of a question about training cost: how good it makes a model, what growth saves of it.

A grown model of score *a* (top-1, or minus the logarithm of perplexity) that took F FLOPs has saved
1 − F / N(a), where N(a) are the FLOPs that training from scratch needs for *a*. N is read off the
upper concave envelope of the complete runs from scratch, of every size and schedule, over the
logarithm of FLOPs: straight lines from run to run, none of which lies above them. It is meant to be
a hard bar. Steps, lines through every run, unlucky ones, too, lines over the FLOPs themselves, and
runs cut off half-way, whose learning rate is still high, would all be easier ones.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from statistics import mean

from .fields import LANGUAGE, VISION, Measure
from .questions import Question, Variant
from .rows import Record, Row, Rows, line, minus

HEAD = (
    "| | parameters, start → end | training FLOPs | × the largest | {} | Δ to the largest "
    "| saved at its {} | minutes | failed |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
HEADS = {
    VISION: HEAD.format(VISION.measure.heading, "accuracy"),
    LANGUAGE: HEAD.format(LANGUAGE.measure.heading, "perplexity"),
}
NOTES = {
    VISION: (
        "*× the largest* and Δ are relative to the model that has its full size from the start and "
        "trains for all epochs; for a ViT that is the matched ViT. *Saved at its accuracy* is how "
        "many fewer FLOPs a grown model took than training from scratch needs for the same top-1. "
        "That is read off the upper envelope of the complete runs from scratch, of every size and "
        "schedule: straight lines between them over the logarithm of FLOPs, such that none lies "
        "above. Where it is flat, a small difference in top-1 is a large saving; below zero it is "
        "a loss. *> all*: no run from scratch is as good. *≤*: even the cheapest one is better, "
        "and might be so for less than it took. Δ and savings are those of the means over seeds "
        "and, in parentheses, of each seed by itself."
    ),
    LANGUAGE: (
        "*× the largest* and Δ are relative to the model that has its full size from the start and "
        "trains for all iterations; for a Transformer that is the matched Transformer. *Saved at "
        "its perplexity* is how many fewer FLOPs a grown model took than training from scratch "
        "needs for the same perplexity. That is read off the lower envelope of the complete runs "
        "from scratch, of every size and schedule: straight lines between them, of the logarithm "
        "of perplexity over that of FLOPs, such that none lies below. Where it is flat, a small "
        "difference in perplexity is a large saving; below zero it is a loss. *> all*: no run from "
        "scratch is as good. *≤*: even the cheapest one is better, and might be so for less than "
        "it took. Δ and savings are those of the means over seeds (savings, of the logarithm) and, "
        "in parentheses, of each seed by itself. Of a single size from scratch no saving is told."
    ),
}

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

Point = tuple[float, float]  # training FLOPs, score


class CostRow(Row):
    """A variant at one learning rate, and what its training cost."""

    def __init__(self, variant: Variant, records: Sequence[Record], measure: Measure) -> None:
        super().__init__(variant, records, measure)
        self.points: dict[int, Point] = {
            record["seed"]: (record["flops"], measure.score(self.by_seed[record["seed"]]))
            for record in self.done
        }

    def mean_point(self, seeds: Collection[int]) -> Point:
        """Return the mean cost and the mean score of some seeds."""
        flops, scores = zip(*(self.points[seed] for seed in seeds), strict=True)
        return mean(flops), mean(scores)

    def flops(self) -> str:
        """Give the cost of a training."""
        return scientific(self.mean_point(self.points)[0]) if self.points else "–"

    def times(self, other: "CostRow") -> str:
        """Give the cost of a training relative to that of another."""
        if not (self.points and other.points):
            return "–"
        own, whole = (each.mean_point(each.points)[0] for each in (self, other))
        return f"{own / whole:.2f}"


class Scratch:
    """The runs from scratch that a variant is measured against.

    Args:
        question: What is asked.
        rows: Its runs at one learning rate.
        reference: Of the variants that are there for comparison, rather than of the others.
    """

    def __init__(self, question: Question, rows: Rows, reference: bool) -> None:
        self.rows = [
            CostRow(variant, records, question.field.measure)
            for variant, records in rows.items()
            if variant.reference == reference and not variant.grown
        ]
        names = [row.variant.name for row in self.rows]
        self.largest = self.rows[0 if reference else names.index(question.compute)]

    def seeds(self) -> set[int]:
        """Return those with which each of the variants came to its end."""
        return set.intersection(*(set(row.points) for row in self.rows))

    def envelope(self, seeds: Collection[int]) -> list[Point]:
        """Return the envelope of the means over some seeds."""
        return envelope(row.mean_point(seeds) for row in self.rows)

    def times(self, row: CostRow) -> str:
        """Give the cost of a row relative to that of the largest."""
        return row.times(self.largest)

    def difference(self, row: CostRow) -> str:
        """Give the result of a row less that of the largest."""
        seeds = sorted(row.by_seed.keys() & self.largest.by_seed.keys())
        if not seeds:
            return "–"
        own = {seed: row.by_seed[seed] - self.largest.by_seed[seed] for seed in seeds}
        each = [minus(f"{value:+.2f}") for value in own.values()]
        return _with_seeds(minus(f"{mean(own.values()):+.2f}"), each, row)

    def saving(self, row: CostRow) -> str:
        """Give what a row has saved at its score, if all of the envelope is known."""
        seeds = sorted(row.points.keys() & self.seeds())
        if not seeds:
            return "–"
        whole = saved(row.mean_point(seeds), self.envelope(seeds))
        each = [saved(row.points[seed], self.envelope([seed])) for seed in seeds]
        return _with_seeds(whole, each, row)


def envelope(points: Iterable[Point]) -> list[Point]:
    """Leave of some points those on their upper concave envelope, up to the best, in order."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if kept and point[1] <= kept[-1][1]:
            continue
        while len(kept) > 1 and _slope(kept[-2], point) >= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(point)
    return kept


def _slope(one: Point, other: Point) -> float:
    return (other[1] - one[1]) / math.log(other[0] / one[0])


def needed(score: float, scratch: Sequence[Point]) -> float:
    """Return the FLOPs at which an envelope reaches a score.

    Those of its first point are the least that is known; above its last they are infinite.
    """
    if score <= scratch[0][1]:
        return scratch[0][0]
    for (cheap, low), (dear, high) in pairwise(scratch):
        if score <= high:
            return cheap * (dear / cheap) ** ((score - low) / (high - low))
    return math.inf


def saved(own: Point, scratch: Sequence[Point]) -> str:
    """Give the share of FLOPs that a model has saved at its score, beside an envelope."""
    flops, score = own
    need = needed(score, scratch)
    if math.isinf(need):
        return "> all"
    bound = "≤ " if score < scratch[0][1] else ""
    return f"{bound}{minus(str(round(100 * (1 - flops / need))))} %"


def _with_seeds(whole: str, each: Sequence[str], row: CostRow) -> str:
    """Put the figures of single seeds behind that of their mean."""
    text = f"{whole} ({', '.join(each)})" if len(each) > 1 else whole
    return text if len(each) == len(row.points) else f"{text} (n = {len(each)})"


def scientific(value: float) -> str:
    """Write a large number to three digits."""
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits} · {power_of_ten(int(exponent))}"


def power_of_ten(exponent: int) -> str:
    """Write a power of ten."""
    return f"10{str(exponent).translate(SUPERSCRIPTS)}"


def group(
    question: Question, rows: Rows, marked: set[Variant] | frozenset[Variant] = frozenset()
) -> str:
    """Render the rows of a group; the means of the marked ones are the best of their variant."""
    text = ""
    for variant, records in rows.items():
        if not records:
            text += line(variant.label, "", "", "", "not run", "", "", "", "")
            continue
        row = CostRow(variant, records, question.field.measure)
        scratch = Scratch(question, rows, variant.reference)
        # A single run from scratch has no envelope.
        compared = variant.grown and len(scratch.rows) > 1
        text += line(
            variant.label,
            row.parameters(),
            row.flops(),
            scratch.times(row),
            f"**{row.result()}**" if variant in marked else row.result(),
            "" if variant is scratch.largest.variant else scratch.difference(row),
            scratch.saving(row) if compared else "",
            row.minutes(),
            row.failures(),
        )
    return text


def summary(question: Question, rows: Rows) -> str:
    """Render the rows of a shorter table, for README.md."""
    text = ""
    for variant, records in rows.items():
        if not records:
            text += line(variant.label, "", "", "not run", "")
            continue
        row = CostRow(variant, records, question.field.measure)
        scratch = Scratch(question, rows, variant.reference)
        n = str(len(row.points))
        text += line(variant.label, row.parameters(), scratch.times(row), row.mean_result(), n)
    return text
