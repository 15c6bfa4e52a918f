"""Questions about equal cost: variants of several sizes, each trained with several budgets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import ClassVar

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

from .plots import points, scale
from .questions import Question
from .rows import (
    FAILED,
    MINUTES,
    Column,
    Record,
    Row,
    at_best_lr,
    finished,
    result_column,
    times,
)

_MARKERS = "os^vD*PX"


@dataclass(frozen=True, kw_only=True)
class Budgets(Question):
    """Variants differ in size and in training FLOPs; each is compared with others of equal cost.

    The variants name what they are compared with in ``against``, and the line of the chart that
    they are on in ``line``.

    Args:
        accounts: Name of each account of training FLOPs, and the share of the run that a stage
            starts from which it counts.
        full: Heading, in ``against``, of the run that costs are relative to.
    """

    accounts: tuple[tuple[str, float], ...] = (("", 0.0),)
    full: str
    same_size: ClassVar[bool] = False
    counts_flops: ClassVar[bool] = True
    starts_at_best: ClassVar[bool] = True
    papers_run: ClassVar[str] = ""
    chart: ClassVar[str] = "{} against training FLOPs"

    @property
    def note(self) -> str:
        """How to read the table."""
        note = (
            "Every variant is at its best learning rate, which the first seeds tried. A Δ is the "
            "mean of the differences, seed by seed, ± its standard error. It is called *better* or "
            "*worse* only over two standard errors and with three seeds or more. With three seeds, "
            "chance alone gives such a difference in about one comparison of five."
        )
        if len(self.accounts) > 1:
            note += (
                " A stage starts from the end of the small model at its best learning rate, with "
                "the same seed. Its own FLOPs and minutes do not include the small model."
            )
        return note

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("parameters", Row.parameters),
            Column("best lr", Row.lr),
            Column("training FLOPs", Row.flops),
            *(self._times(name, share) for name, share in self.accounts),
            result_column(self.field.measure),
            *self.comparisons(),
            MINUTES,
            FAILED,
        )

    def _times(self, name: str, share: float) -> Column:
        """Return the column of one account: FLOPs, divided by those of the full training."""

        def cell(row: Row) -> str:
            full = dict(row.variant.against).get(self.full)
            if full is None or (share and row.variant.start is None):
                return ""
            return times(self._cost(row, share), row.other(self.named(full)).mean_flops())

        return Column(f"× {self.full}{f', {name}' if name else ''}", cell)

    def _cost(self, row: Row, share: float) -> float:
        start = row.variant.start
        before = share * row.other(self.named(start)).mean_flops() if share and start else 0.0
        return row.mean_flops() + before

    def rows(self, records: Sequence[Record]) -> Iterator[Row | str]:
        """Make a row for each variant that has run, at its best learning rate."""
        group = at_best_lr(self.field.measure, self.variants, records)
        rows = (Row(variant, group, self.field.measure) for variant in self.variants)
        yield from (row for row in rows if row.records or not records)

    def table(self, records: Sequence[Record]) -> str:
        """Render the table of some runs, and name the variants without runs below it."""
        run = {record["variant"] for record in records}
        missing = [variant.label for variant in self.variants if variant.name not in run]
        named = f"\nNot run: {'; '.join(missing)}.\n" if run and missing else ""
        return super().table(records) + named

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw final results over training FLOPs, with a panel for each account."""
        measure = self.field.measure
        figure = Figure(figsize=(3 + 5 * len(self.accounts), 4.8), layout="constrained")
        panels = figure.subplots(1, len(self.accounts), squeeze=False, sharey=True)[0]
        group = at_best_lr(measure, self.variants, records)
        lines: dict[str, list[Row]] = {}
        for variant in self.variants:
            if finished(group[variant]):
                row = Row(variant, group, measure)
                lines.setdefault(variant.line or variant.label, []).append(row)
        for axes, (name, share) in zip(panels, self.accounts, strict=True):
            markers = cycle(_MARKERS)
            for index, (label, rows) in enumerate(lines.items()):
                style = {"color": colormaps["tab20"](index % 20), "label": label}
                dashed = "--" if rows[0].variant.reference else "-"
                costs = [(self._cost(row, share), row) for row in rows]
                done = [(cost, row.results()) for cost, row in costs if not math.isnan(cost)]
                done.sort(key=lambda point: point[0])
                means = [results.mean() for _, results in done]
                marker = next(markers)
                axes.plot([cost for cost, _ in done], means, dashed, marker=marker, **style)
                for cost, results in done:
                    points(axes, cost, results, each=False, fmt="none", ecolor=style["color"])
            axes.set(xscale="log", xlabel=f"training FLOPs{f', {name}' if name else ''}")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            every = (math.inf, math.inf)  # otherwise only powers of ten are labelled
            axes.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=every))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3)
            scale(axes, measure)
        panels[0].set_ylabel(f"final {measure.axis}, mean ± standard deviation")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
        return figure
