"""Questions about models of several sizes: trained alone, nested in one model, or made smaller."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .plots import points, scale
from .questions import Question
from .rows import FAILED, Column, Record, Row, at_best_lr, finished, scientific
from .variants import Variant, arguments


@dataclass(frozen=True)
class Line:
    """A row of the table and a line of the chart: one way to get a model of each size.

    Args:
        label: Name in table and chart.
        runs: Each size and the name of the variant that has it, from the smallest on. One variant
            may have several.
        method: ``prune`` or ``top-k``: what the variant's run measured after its training. Empty
            for the model as it was trained.
        also: Names of other variants that the training needs, whose FLOPs count.
    """

    label: str
    runs: tuple[tuple[float, str], ...]
    method: str = ""
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all variants."""
        return tuple(dict.fromkeys([*(name for _, name in self.runs), *self.also]))

    @property
    def is_nested(self) -> bool:
        """Whether one variant has all sizes."""
        return len({name for _, name in self.runs}) == 1


@dataclass(frozen=True)
class _LineRow(Row):
    """A line, with the runs of all its variants; its ``variant`` has only the label."""

    line: Line = Line("", ())

    @property
    def parts(self) -> list[Row]:
        """The rows of its variants."""
        own = (variant for variant in self.group if variant.name in self.line.names)
        return [Row(variant, self.group, self.measure) for variant in own]

    @property
    def records(self) -> Sequence[Record]:
        """The runs."""
        return [run for row in self.parts for run in row.records]

    def mean_flops(self) -> float:
        """Mean training FLOPs of all variants together; NaN if one of them has no run."""
        return sum(row.mean_flops() for row in self.parts)

    def flops(self) -> str:
        """Mean training FLOPs of all variants together."""
        flops = self.mean_flops()
        return "–" if math.isnan(flops) else scientific(flops)

    def minutes(self) -> str:
        """Mean time of all variants together."""
        minutes = [row.minutes() for row in self.parts]
        return "–" if "–" in minutes else f"{sum(map(float, minutes)):.1f}"

    def at(self, size: float) -> "_SizeRow | None":
        """Return the row of one size, or None if the line does not have it."""
        name = dict(self.line.runs).get(size)
        if name is None:
            return None
        (variant,) = (each for each in self.group if each.name == name)
        largest = max(each for each, other in self.line.runs if other == name)
        place = "" if size == largest else f"_at_{size:g}"
        method = "" if size == 1 else self.line.method
        return _SizeRow(variant, self.group, self.measure, place=place, method=method, size=size)


@dataclass(frozen=True)
class _SizeRow(Row):
    """The results of a variant at one size."""

    place: str = ""  # end of the name of the result
    method: str = ""
    size: float = 1.0

    def results(self) -> pd.Series:
        """Return the results by seed."""
        return self.by_seed(self._result)

    def _result(self, run: Record) -> float:
        if self.method:
            return self._point(run)["top1"]
        return run["final"][f"{self.measure.name}{self.place}"]

    def _point(self, run: Record) -> Mapping[str, Any]:
        wanted = (self.method, self.size)
        (point,) = (p for p in run["compression"] if (p["method"], p["keep"]) == wanted)
        return point

    def forward_flops(self) -> float:
        """FLOPs of a forward pass, from the training FLOPs or from the compressed model."""
        (run, *_) = finished(self.records)
        if self.method:
            return self._point(run)["flops"]
        return run["flops"] / (3 * run["epochs"] * run["train_images"])


@dataclass(frozen=True, kw_only=True)
class NestedSizes(Question):
    """Ways to get models of several sizes, compared at each size with a model trained alone.

    Args:
        sizes: Shares of the pairs, from the smallest on.
        lines: The ways. The first one trains a model of each size alone.
    """

    sizes: tuple[float, ...]
    lines: tuple[Line, ...]
    same_size: ClassVar[bool] = False
    counts_flops: ClassVar[bool] = True
    papers_run: ClassVar[str] = ""
    chart: ClassVar[str] = "{} against FLOPs of a forward pass"

    @property
    def note(self) -> str:
        """How to read the table."""
        return (
            f"A size is a share of the pairs of every layer. Δ is the difference to *"
            f"{self.lines[0].label}* at the same size, in points. Training FLOPs and minutes are "
            "of all sizes of a row together."
        )

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        full = self.named(self.lines[0].runs[-1][1])

        return (
            *map(self._result, self.sizes),
            Column("training FLOPs", lambda row: row.flops()),
            Column("× all pairs", lambda row: row.times_flops(row.other(full))),
            *map(self._difference, self.sizes),
            Column("minutes", lambda row: row.minutes()),
            FAILED,
        )

    def _result(self, size: float) -> Column:
        def cell(row: Any) -> str:
            own = row.at(size)
            return own.result() if own else ""

        heading = f"{self.field.measure.heading} at {size:g}"
        return Column(heading, cell, lambda row: "not run" * (size == self.sizes[0]))

    def _difference(self, size: float) -> Column:
        def cell(row: Any) -> str:
            own, alone = row.at(size), self._row(self.lines[0], row.group).at(size)
            if own is None or alone is None or (own.variant, own.method) == (alone.variant, ""):
                return ""
            return own.compared(alone)

        return Column(f"Δ at {size:g}, ± standard error", cell)

    def _row(self, line: Line, group: Any) -> _LineRow:
        shown = Variant(line.label, line.label, arguments())
        return _LineRow(shown, group, self.field.measure, line=line)

    def rows(self, records: Sequence[Record]) -> Iterator[Row | str]:
        """Make a row for each line; every variant is at its best learning rate."""
        group = at_best_lr(self.field.measure, self.variants, records)
        yield from (self._row(line, group) for line in self.lines)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw the result of every line at each size over the FLOPs of a forward pass."""
        measure = self.field.measure
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        group = at_best_lr(measure, self.variants, records)
        alone = self._row(self.lines[0], group)
        for index, line in enumerate(self.lines):
            places = []
            for size in self.sizes:
                own, same = self._row(line, group).at(size), alone.at(size)
                if own is None or same is None or own.results().empty:
                    continue
                # A nested model costs at a size what a model of this size costs.
                like = same if line.is_nested and not own.method else own
                if finished(like.records):
                    places.append((like.forward_flops(), own.results()))
            if not places:
                continue
            style: dict[str, Any] = {
                "color": f"C{index}" if index < 10 else f"{0.1 * (index - 9):.1f}"
            }
            costs, means = zip(*((cost, own.mean()) for cost, own in places), strict=True)
            dashed = "--" if self.named(line.names[0]).reference else "-"
            axes.plot(costs, means, dashed, label=line.label, **style)
            for cost, results in places:
                points(axes, cost, results, each=False, fmt="o", markersize=4, **style)
        axes.set(
            xlabel="FLOPs of a forward pass",
            ylabel=f"final {measure.axis}, mean ± standard deviation",
        )
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
        scale(axes, measure)
        figure.legend(loc="outside right upper", fontsize="small")
        return figure
