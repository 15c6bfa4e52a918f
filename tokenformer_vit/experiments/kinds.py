"""Two kinds of questions: rows as steps from one to the next, and rows beside a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from matplotlib.figure import Figure

from .plots import band, curves_of, name_of, points, scale
from .questions import Question
from .rows import FAILED, MINUTES, Column, Record, Row, at_best_lr, finished, minus, result_column


@dataclass(frozen=True, kw_only=True)
class Steps(Question):
    """Each variant is a step from the one above; all have as many parameters."""

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("lr", Row.lr),
            Column("parameters", Row.parameters),
            result_column(self.field.measure),
            Column("paper", _paper, _paper),
            Column("Δ", self._step),
            Column("Δ, paper", self._papers_step),
            MINUTES,
            FAILED,
        )

    def _above(self, row: Row) -> Row | None:
        """Return the row above, if there is a step from it."""
        index = self.variants.index(row.variant)
        above = row.other(self.variants[index - 1])
        return above if index and above.records and not row.variant.reference else None

    def _step(self, row: Row) -> str:
        above = self._above(row)
        return row.difference(above) if above else ""

    def _papers_step(self, row: Row) -> str:
        if (above := self._above(row)) is None:
            return ""
        mine, theirs = row.variant.paper, above.variant.paper
        return "–" if mine is None or theirs is None else minus(f"{mine - theirs:+.1f}")

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw results, loss and validation."""
        return _draw_results(self, records)


def _paper(row: Row) -> str:
    return "–" if row.variant.paper is None else f"{row.variant.paper:.1f}"


@dataclass(frozen=True, kw_only=True)
class Baseline(Question):
    """Every variant is compared with one of them, in parameters, FLOPs and result.

    Args:
        baseline: Name of that variant.
    """

    baseline: str
    same_size: ClassVar[bool] = False

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        (base,) = (variant for variant in self.variants if variant.name == self.baseline)

        def parameters(row: Row) -> str:
            if not (others := row.other(base).records):
                return "–"
            return f"{row.records[0]['parameters'] / others[0]['parameters']:.3f}"

        return (
            Column("parameters", Row.parameters),
            Column(f"× {base.label}", parameters),
            Column("training FLOPs", Row.flops),
            Column(f"× {base.label}", lambda row: row.times_flops(row.other(base))),
            result_column(self.field.measure),
            Column(
                f"Δ to {base.label}",
                lambda row: "" if row.variant is base else row.difference(row.other(base)),
            ),
            MINUTES,
            FAILED,
        )

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw results, loss and validation."""
        return _draw_results(self, records)


def _draw_results(question: Question, records: Sequence[Record]) -> Figure:
    """Draw the results with their deviation, training loss and validation.

    Curves are means over seeds, with a band of one standard deviation. The loss of a failed run is
    dotted up to its end. Every variant is drawn at its best learning rate.
    """
    field, measure = question.field, question.field.measure
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    result, loss, validation = figure.subplots(1, 3)
    group = at_best_lr(measure, question.variants, records)
    for index, (variant, runs) in enumerate(group.items()):
        style = {"color": f"C{index}", "label": name_of(variant, runs, records)}
        if done := finished(runs):
            points(result, index, Row(variant, group, measure).results(), fmt="o", **style)
            band(loss, curves_of(done, "loss", "iteration", "loss"), **style)
            band(validation, curves_of(done, "validation", field.unit, measure.name), **style)
        for run in runs:
            curve = curves_of([run], "loss", "iteration", "loss")
            if "failed" in run and len(curve):
                loss.plot(curve, ":", color=f"C{index}")
                loss.plot(curve[-1:], "x", color=f"C{index}")
    labels = [variant.label for variant in question.variants]
    result.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    result.set(title=f"{measure.axis}, mean ± standard deviation", xlim=(-0.5, len(labels) - 0.5))
    loss.set(title="training loss", xlabel="iteration")
    validation.set(title=f"validation {measure.axis}", xlabel=field.unit)
    scale(validation, measure)
    if loss.get_legend_handles_labels()[0]:
        loss.legend(fontsize="small")
    return figure
