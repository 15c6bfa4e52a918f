"""Questions of ablations: the base class of all kinds, and the two simplest kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from .fields import Config, Field
from .image_models import IMAGES
from .plots import band, curves_of, name_of, points, scale
from .rows import (
    FAILED,
    MINUTES,
    Column,
    Record,
    Row,
    at_best_lr,
    best_lr,
    by_variant,
    finished,
    head,
    line,
    minus,
    result_column,
)
from .variants import Shape, Variant


@dataclass(frozen=True, kw_only=True)
class Question(ABC):
    """One question, with its table and its chart. Subclasses are the kinds of questions.

    Args:
        name: Name of the file with the question.
        title: Heading.
        text: Docstring of the file, in Markdown: the question, and what the paper says.
        variants: Rows of the table, in order.
        field: Images or language.
        measured: Names of the variants whose layers are measured during training; by default all,
            unless every run counts its training FLOPs.
    """

    name: str
    title: str
    text: str | None
    variants: tuple[Variant, ...]
    field: Field = IMAGES
    measured: tuple[str, ...] | None = None

    same_size: ClassVar[bool] = True  # all variants have as many parameters, within 1 %
    loads_weights: ClassVar[bool] = False  # the config starts from trained weights
    counts_flops: ClassVar[bool] = False  # every run counts its training FLOPs
    starts_at_best: ClassVar[bool] = False  # a stage starts from the best lr of the run before it
    papers_run: ClassVar[str] = "the paper's setting"  # name in the table of images, or empty
    chart: ClassVar[str] = "{} and curves"  # title of the chart; {} is the measure

    # The runs.

    def start(self, cfg: Config) -> Config:
        """Return the config that every variant changes.

        Raises:
            InputError: If the config loads weights although the question trains from scratch, or
                loads none although the question needs trained weights.
        """
        return self.field.from_scratch(cfg)

    def start_of(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights that a variant starts from, for the record."""
        return {}

    def start_from(self, cfg: Config, folder: str) -> None:
        """Let a run start from the end of the run in a folder."""
        self.field.start_from(cfg, folder)

    def end_of(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config that builds the model at the end of a run from scratch."""
        return dict(part)

    def counts(self, model: nn.Module) -> dict[str, int]:
        """Count parameters for the record."""
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def put_data_root(self, cfg: Config, data_root: str | None) -> None:
        """Put ``--data-root`` into a config."""
        for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
            if data_root is not None:
                cfg[name]["dataset"]["data_root"] = data_root

    def outside(
        self, variant: Variant, shape: Shape, length: int, data_root: str | None
    ) -> dict[str, Any]:
        """Return what a variant changes outside the model."""
        return variant.outside(shape, length) if variant.outside is not None else {}

    def measures_layers(self, variant: str) -> bool:
        """Tell whether the layers of a variant are measured during training."""
        if self.measured is not None:
            return variant in self.measured
        return not (self.loads_weights or self.counts_flops or self.field.counts_flops)

    def named(self, name: str | None) -> Variant:
        """Return the variant of a name."""
        (variant,) = (each for each in self.variants if each.name == name)
        return variant

    # The table.

    @property
    def common(self) -> tuple[str, ...]:
        """Keys of a record whose values all runs of a table must share."""
        examples = self.field.examples
        return "config", self.field.length, f"train_{examples}", f"{examples}_per_step", "dtype"

    @property
    def note(self) -> str:
        """How to read the table."""
        return ""

    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""

    def comparisons(self) -> list[Column]:
        """Return a column for each heading in the variants' ``against``."""

        def column(heading: str) -> Column:
            def cell(row: Row) -> str:
                other = dict(row.variant.against).get(heading)
                return row.compared(row.other(self.named(other))) if other else ""

            return Column(f"Δ to {heading}, ± standard error", cell)

        headings = [heading for variant in self.variants for heading, _ in variant.against]
        return [column(heading) for heading in dict.fromkeys(headings)]

    def rows(self, records: Sequence[Record]) -> Iterator[Row | str]:
        """Sort the runs into rows; with several learning rates, yield a heading before each group.

        Args:
            records: The runs of a table; without any, every variant has an empty row.
        """
        measure = self.field.measure
        rates = sorted({record["lr"] for record in records})
        of_variants = by_variant(self.variants, records)
        best = {variant: best_lr(measure, runs) for variant, runs in of_variants.items()}
        for lr in rates if len(rates) > 1 else ():
            group = by_variant(self.variants, [run for run in records if run["lr"] == lr])
            yield f"lr {lr:g}"
            yield from (Row(each, group, measure, best[each] == lr) for each in self.variants)
        if len(rates) > 1:
            yield "each at its best lr"
        group = at_best_lr(measure, self.variants, records)
        yield from (Row(variant, group, measure) for variant in self.variants)

    def table(self, records: Sequence[Record]) -> str:
        """Render the table of some runs."""
        columns = self.columns()
        rows = (
            f"| **{row}** |{' |' * len(columns)}\n" if isinstance(row, str) else line(row, columns)
            for row in self.rows(records)
        )
        return head(columns) + "".join(rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw the results with their deviation, training loss and validation.

        Curves are means over seeds, with a band of one standard deviation. The loss of a failed run
        is dotted up to its end. Every variant that has run is drawn, at its best learning rate, or
        at all of them if every run failed.
        """
        field, measure = self.field, self.field.measure
        figure = Figure(figsize=(15.5, 3.8), layout="constrained")
        result, loss, validation = figure.subplots(1, 3)
        group = at_best_lr(measure, self.variants, records)
        group = {variant: runs for variant, runs in group.items() if runs}
        for index, (variant, runs) in enumerate(group.items()):
            style: dict[str, Any] = {"color": f"C{index}", "label": name_of(variant, runs, records)}
            if done := finished(runs):
                points(result, index, Row(variant, group, measure).results(), fmt="o", **style)
                band(loss, curves_of(done, "loss", "iteration", "loss"), **style)
                band(validation, curves_of(done, "validation", field.unit, measure.name), **style)
            rates = {run["lr"] for run in done or runs}
            for run in runs:
                curve = curves_of([run], "loss", "iteration", "loss")
                if "failed" in run and run["lr"] in rates and len(curve):
                    loss.plot(curve, ":", **style)
                    loss.plot(curve[-1:], "x", color=f"C{index}")
        result.set(
            title=f"{measure.axis}, mean ± standard deviation",
            xlim=(-0.5, len(group) - 0.5),
            xticks=[],
        )
        loss.set(title="training loss", xlabel="iteration")
        validation.set(title=f"validation {measure.axis}", xlabel=field.unit)
        scale(validation, measure)
        handles, labels = loss.get_legend_handles_labels()
        if named := dict(zip(labels, handles, strict=True)):
            figure.legend(named.values(), named.keys(), loc="outside right upper", fontsize="small")
        return figure


@dataclass(frozen=True, kw_only=True)
class Steps(Question):
    """Each variant is a step from the one above; all have the same number of parameters."""

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("lr", Row.lr),
            Column("parameters", Row.parameters),
            result_column(self.field.measure),
            Column("paper", _paper, _paper),
            Column("Δ", self._step),
            Column("Δ, paper", self._papers_step),
            *self.comparisons(),
            Column("training FLOPs", Row.flops),
            MINUTES,
            FAILED,
        )

    def table(self, records: Sequence[Record]) -> str:
        """Render the table of some runs, and the order of the variants half-way and at the end."""
        return super().table(records) + self._orders(records)

    def _orders(self, records: Sequence[Record]) -> str:
        """Tell whether the order of the variants still changed in the second half of the runs."""
        measure, unit = self.field.measure, self.field.unit
        group = at_best_lr(measure, self.variants, records)
        rows = [
            Row(variant, group, measure) for variant in self.variants if finished(group[variant])
        ]
        if len(rows) < 2:
            return ""
        run = finished(records)[0]
        end = run[self.field.length]
        half = max((time for time in run["validation"][unit] if time <= end / 2), default=None)
        if half is None:
            return ""

        def order(results: Callable[[Row], pd.Series]) -> dict[str, float]:
            means = {row.variant.label: results(row).mean() for row in rows}
            best_first = sorted(means, key=lambda label: measure.score(means[label]), reverse=True)
            return {label: means[label] for label in best_first}

        early, late = order(lambda row: row.results_at(half, unit)), order(Row.results)
        same = "the same order" if list(early) == list(late) else "another order"
        before, after = (
            ", ".join(f"{label} {mean:.2f}" for label, mean in each.items())
            for each in (early, late)
        )
        early_text = f"Best first, after {half} of {end} {unit}s: {before}."
        return f"\n{early_text} At the end, in {same}: {after}.\n"

    def _above(self, row: Row) -> Row | None:
        """Return the row above, if this row is a step from it."""
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


def _paper(row: Row) -> str:
    return "–" if row.variant.paper is None else f"{row.variant.paper:.1f}"


@dataclass(frozen=True, kw_only=True)
class Baseline(Question):
    """All variants are compared with one baseline, in parameters, FLOPs and result.

    Args:
        baseline: Name of the variant that is the baseline.
    """

    baseline: str
    same_size: ClassVar[bool] = False

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        base = self.named(self.baseline)

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
            *self.comparisons(),
            MINUTES,
            FAILED,
        )
