"""Questions about training cost: quality for training FLOPs, and how much growth saves.

A grown model with score *a* (top-1, or minus the logarithm of perplexity) that took F FLOPs has
saved 1 − F / N(a). N(a) is the number of FLOPs that training from scratch needs for *a*. It comes
from the upper concave envelope of the complete runs from scratch, of every size and schedule, over
the logarithm of FLOPs: straight lines from run to run, with no run above them. This comparison is
strict on purpose. Steps, lines through every run, lines over plain FLOPs, and runs stopped half-way
(with a learning rate that is still high) would all make growth look better.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .plots import band, curves_of, name_of, points, scale
from .questions import Question
from .rows import (
    FAILED,
    MINUTES,
    Column,
    Record,
    Row,
    at_best_lr,
    finished,
    line,
    minus,
    power_of_ten,
    result_column,
)
from .variants import Variant

# Colours of variants, in turn: whether they are references, and whether they grow.
_COLOURS = {
    (False, False): ["#9ecae1", "#4292c6", "#08306b", "#6a51a3", "#737373", "#c7a252"],
    (False, True): ["#d7301f", "#fd8d3c", "#ce1256"],
    (True, False): ["#006d2c", "#6b6b10"],
    (True, True): ["#41ab5d", "#a1a118"],
}

Point = tuple[float, float]  # training FLOPs, score


@dataclass(frozen=True, kw_only=True)
class TrainingCost(Question):
    """Variants differ in size and in training FLOPs; some of them grow.

    Args:
        largest: Name of the variant that has its full size from the start and trains for the whole
            length. The others' FLOPs and results are relative to it.
    """

    largest: str
    same_size: ClassVar[bool] = False
    counts_flops: ClassVar[bool] = True
    chart: ClassVar[str] = "{} against training FLOPs"
    papers_run: ClassVar[str] = "the paper's setting, in which it grew no model"

    @property
    def note(self) -> str:
        """How to read the table."""
        measure, other = self.field.measure, self.field.transformer
        result = measure.label
        if measure.logarithmic:
            edge, beyond, scale = "lower", "below", "of the logarithm of perplexity over that of"
        else:
            edge, beyond, scale = "upper", "above", "over the logarithm of"
        return (
            f"*× the largest* and Δ are relative to the model that has its full size from the "
            f"start and trains for all {self.field.length}. For a {other} that is the matched "
            f"{other}. *Saved at its {self._quality}* is how many fewer FLOPs a grown model took "
            f"than training from scratch needs for the same {result}. This need comes from the "
            f"{edge} envelope of the complete runs from scratch, of every size and schedule: "
            f"straight lines between runs, {scale} FLOPs, with no run {beyond} them. Where the "
            f"envelope is flat, a small difference in {result} is a large saving. A negative "
            "saving is a loss. *> all*: no run from scratch is as good. *≤*: even the cheapest run "
            "from scratch is better, and might be so for fewer FLOPs than it took. Δ and savings "
            "are given for the means over seeds and, in parentheses, for each seed. Where only one "
            "size was trained from scratch, no saving is given."
        )

    @property
    def _quality(self) -> str:
        return "perplexity" if self.field.measure.logarithmic else "accuracy"

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("parameters, start → end", Row.parameters),
            Column("training FLOPs", Row.flops),
            Column("× the largest", self._times),
            result_column(self.field.measure),
            Column("Δ to the largest", self._difference),
            Column(f"saved at its {self._quality}", self._saving),
            MINUTES,
            FAILED,
        )

    def summary(self, records: Sequence[Record]) -> str:
        """Render a shorter table, each variant at its best learning rate."""
        measure = self.field.measure
        group = at_best_lr(measure, self.variants, records)
        rows = (Row(variant, group, measure) for variant in self.variants)
        return "".join(line(row, self.summary_columns()) for row in rows)

    def summary_columns(self) -> Sequence[Column]:
        """Return the columns of the shorter table."""
        return (
            Column("parameters, start → end", Row.parameters),
            Column("FLOPs, × the largest", self._times),
            result_column(self.field.measure, Row.mean),
            Column("n", lambda row: str(len(row.results()))),
        )

    def from_scratch(self, reference: bool | str) -> list[Variant]:
        """List the variants that do not grow: the references of a kind, or the TokenFormers."""
        return [each for each in self.variants if each.reference == reference and not each.grown]

    def _largest(self, row: Row) -> Row:
        """Return the row that a row is relative to."""
        scratch = self.from_scratch(row.variant.reference)
        named = [variant for variant in scratch if variant.name == self.largest]
        return row.other((named or scratch)[0])

    def _times(self, row: Row) -> str:
        return row.times_flops(self._largest(row))

    def _difference(self, row: Row) -> str:
        largest = self._largest(row)
        if row.variant is largest.variant:
            return ""
        steps, _ = row.steps(largest)
        if steps.empty:
            return "–"
        each = [minus(f"{step:+.2f}") for step in steps]
        return _with_seeds(minus(f"{steps.mean():+.2f}"), each, row)

    def _saving(self, row: Row) -> str:
        scratch = [row.other(variant) for variant in self.from_scratch(row.variant.reference)]
        if not row.variant.grown or len(scratch) == 1:  # a single variant has no envelope
            return ""
        costs = _cost_and_score(row)
        whole = [_cost_and_score(each) for each in scratch]
        seeds = set(costs.index).intersection(*(each.index for each in whole))
        if not seeds:
            return "–"

        def saving(seeds: Collection[int]) -> str:
            return saved(_mean_of(costs, seeds), envelope(_mean_of(each, seeds) for each in whole))

        return _with_seeds(saving(seeds), [saving([seed]) for seed in sorted(seeds)], row)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw results over training FLOPs, during training and at its end.

        Curves are means over seeds, with a band of one standard deviation. A triangle is a growth.
        At the end, points of the same FLOPs are drawn side by side.
        """
        measure = self.field.measure
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        curves, ends = figure.subplots(1, 2)
        group = at_best_lr(measure, self.variants, records)
        done = {variant: finished(runs) for variant, runs in group.items() if finished(runs)}
        colours = {kind: cycle(each) for kind, each in _COLOURS.items()}
        handles = []
        for variant, runs in done.items():
            linestyle, marker = ("--", "s") if variant.reference else ("-", "o")
            colour = next(colours[bool(variant.reference), variant.grown])
            style: dict[str, Any] = {"color": colour, "label": name_of(variant, runs, records)}
            validation = curves_of(runs, "validation", "flops", measure.name)
            band(curves, validation, linestyle=linestyle, **style)
            if variant.grown:
                self._mark_growths(curves, runs, colour)
            results, flops = Row(variant, done, measure).results(), runs[0]["flops"]
            points(curves, flops, results, fmt=marker, zorder=5, each=False, **style)
            points(ends, flops * _aside(variant, done), results, fmt=marker, zorder=5, **style)
            handles.append(Line2D([], [], linestyle=linestyle, marker=marker, **style))
        if any(variant.grown for variant in done):
            triangle: dict[str, Any] = {"marker": "^", "color": "w", "markeredgecolor": "0.2"}
            handles.append(Line2D([], [], linestyle="", label="growth", **triangle))
        whole = [_cost_and_score(Row(each, group, measure)) for each in self.from_scratch(False)]
        if seeds := set.intersection(*(set(each.index) for each in whole)):
            flops, scores = zip(*envelope(_mean_of(each, seeds) for each in whole), strict=True)
            label = "envelope of TokenFormers from scratch"
            style = {"color": "0.5", "linestyle": ":", "label": label}
            ends.plot(flops, [measure.value(score) for score in scores], zorder=1, **style)
            handles.append(Line2D([], [], **style))
        curves.set(title=f"validation {measure.axis} during training")
        ends.set(title=f"final {measure.axis}, mean ± standard deviation", xscale="log")
        for axes in (curves, ends):
            scale(axes, measure)
            _name_flops(axes, max((runs[0]["flops"] for runs in done.values()), default=1))
        figure.legend(handles=handles, loc="outside right upper", fontsize="small")
        return figure

    def _mark_growths(self, axes: Axes, runs: Sequence[Record], colour: str) -> None:
        """Draw a triangle where a model grew: the FLOPs by then, and the mean result."""
        measured, unit = runs[0]["validation"], self.field.unit
        per_unit = runs[0]["iterations"] / runs[0][self.field.length]
        times = [growth["iteration"] / per_unit for growth in runs[0]["growth"]]
        flops = np.interp(times, [0, *measured[unit]], [0, *measured["flops"]])
        means = curves_of(runs, "validation", unit, self.field.measure.name).mean(axis=1)
        results = np.interp(times, means.index, means)  # at the points that all runs have
        axes.plot(flops, results, "^", color=colour, markeredgecolor="0.2", zorder=4)


def _cost_and_score(row: Row) -> pd.DataFrame:
    """Return training FLOPs and score of each finished run, by seed."""
    scores = row.results().map(row.measure.score)
    return pd.DataFrame({"flops": row.by_seed(lambda run: run["flops"]), "score": scores})


def _mean_of(costs: pd.DataFrame, seeds: Collection[int]) -> Point:
    """Return the mean FLOPs and the mean score of some seeds."""
    flops, score = costs.loc[sorted(seeds)].mean()
    return flops, score


def envelope(runs: Iterable[Point]) -> list[Point]:
    """Return the points on the upper concave envelope, up to the best one, in order of FLOPs."""
    kept: list[Point] = []
    for point in sorted(runs, key=lambda point: (point[0], -point[1])):
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

    A score below the envelope gives the FLOPs of its first point, a score above it gives infinity.
    """
    flops, scores = zip(*scratch, strict=True)
    return float(np.exp(np.interp(score, scores, np.log(flops), right=np.inf)))


def saved(own: Point, scratch: Sequence[Point]) -> str:
    """Format the share of FLOPs that a model saved, compared with an envelope at its score."""
    flops, score = own
    need = needed(score, scratch)
    if math.isinf(need):
        return "> all"
    bound = "≤ " if score < scratch[0][1] else ""
    return f"{bound}{minus(str(round(100 * (1 - flops / need))))} %"


def _with_seeds(whole: str, each: Sequence[str], row: Row) -> str:
    """Put the figures of single seeds after the figure of their mean."""
    text = f"{whole} ({', '.join(each)})" if len(each) > 1 else whole
    return text if len(each) == len(row.results()) else f"{text} (n = {len(each)})"


def _aside(variant: Variant, done: Mapping[Variant, Sequence[Record]]) -> float:
    """Return a factor near 1 that separates points of the same FLOPs on a logarithmic axis."""
    flops = done[variant][0]["flops"]
    same = [
        other
        for other, runs in done.items()
        if bool(other.reference) == bool(variant.reference)
        and math.isclose(runs[0]["flops"], flops, rel_tol=0.03)
    ]
    return 1.015 ** (same.index(variant) - (len(same) - 1) / 2)


def _name_flops(axes: Axes, largest: float) -> None:
    """Label an axis of FLOPs in units of a power of ten, also if it is logarithmic."""
    exponent = math.floor(math.log10(largest))
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 10**exponent:g}"))
    axes.set_xlabel(f"training FLOPs / {power_of_ten(exponent)}")
