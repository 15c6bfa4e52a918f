"""The rows of a table: the runs of each variant, and the cells with their results."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from .fields import Measure
from .variants import Variant

_LONGEST_ERROR = 90  # characters
_FEWEST_SEEDS = 3  # for a verdict

Record = dict[str, Any]
Group = Mapping[Variant, Sequence[Record]]  # the runs of a table, or of one learning rate


def finished(records: Iterable[Record]) -> list[Record]:
    """Return the records of runs that did not fail."""
    return [record for record in records if "failed" not in record]


def by_variant(variants: Sequence[Variant], records: Iterable[Record]) -> dict[Variant, list]:
    """Sort records by variant, in the order of the variants."""
    rows = {variant.name: (variant, []) for variant in variants}
    for record in records:
        rows[record["variant"]][1].append(record)
    return dict(rows.values())


def best_lr(measure: Measure, records: Iterable[Record]) -> float | None:
    """Return the learning rate with the best mean result, or None if no run has a result.

    Only rates with the most finished runs are candidates: if some runs of a rate diverged, the mean
    of the other runs is too good.
    """
    done = [
        (record["lr"], record["final"][measure.name])
        for record in finished(records)
        if record["final"]
    ]
    rates = pd.DataFrame(done, columns=["lr", "result"]).groupby("lr").result.agg(["count", "mean"])
    means = rates.loc[rates["count"] == rates["count"].max(), "mean"]
    return max(means.index, key=lambda lr: measure.score(means[lr]), default=None)


def at_best_lr(
    measure: Measure, variants: Sequence[Variant], records: Iterable[Record]
) -> dict[Variant, list[Record]]:
    """Keep each variant's runs at its best learning rate, and those that failed at any rate."""
    kept = {}
    for variant, runs in by_variant(variants, records).items():
        best = best_lr(measure, runs)
        kept[variant] = [run for run in runs if run["lr"] == best or "failed" in run]
    return kept


@dataclass(frozen=True)
class Row:
    """A variant at one learning rate."""

    variant: Variant
    group: Group  # its own runs, and those that it is compared with
    measure: Measure
    best: bool = False  # of several learning rates; it is printed in bold

    @property
    def records(self) -> Sequence[Record]:
        """The runs."""
        return self.group[self.variant]

    def other(self, variant: Variant) -> "Row":
        """Return the row of another variant in the same group."""
        return Row(variant, self.group, self.measure)

    def by_seed(self, value: Callable[[Record], float]) -> pd.Series:
        """Return a figure of each finished run, by seed."""
        runs = finished(self.records)
        return pd.Series({run["seed"]: value(run) for run in runs}, dtype=float).sort_index()

    def results(self) -> pd.Series:
        """Return the results by seed."""
        return self.by_seed(lambda run: run["final"][self.measure.name])

    def results_at(self, time: float, unit: str) -> pd.Series:
        """Return the results of the last validation up to an epoch or iteration, by seed.

        A run without a validation by then has NaN.
        """

        def at(run: Record) -> float:
            curve = run["validation"]
            index = bisect_right(curve[unit], time) - 1
            return curve[self.measure.name][index] if index >= 0 else math.nan

        return self.by_seed(at)

    def mean(self, results: pd.Series | None = None) -> str:
        """Mean and standard deviation of results by seed; default: the final ones."""
        results = (self.results() if results is None else results).dropna()
        return _with_deviation(results, ".2f") if len(results) else "–"

    def result(self) -> str:
        """Mean, standard deviation and number of the finished runs."""
        text = f"{self.mean()} (n = {n})" if (n := len(self.results())) else "–"
        return f"**{text}**" if self.best else text

    def steps(self, other: "Row") -> tuple[pd.Series, int]:
        """Return the differences by seed, over the seeds of both rows, and the most of a row."""
        mine, theirs = self.results(), other.results()
        return (mine - theirs).dropna(), max(len(mine), len(theirs))

    def difference(self, other: "Row") -> str:
        """Mean and standard deviation of the differences, over the seeds that both rows have."""
        steps, most = self.steps(other)
        if steps.empty:
            return "–"
        text = _with_deviation(steps, "+.2f")
        return text if len(steps) == most else f"{text} (n = {len(steps)})"

    def compared(self, other: "Row") -> str:
        """Mean and standard error of the differences, over the seeds that both rows have.

        *better* or *worse* follows a mean over two standard errors, of three seeds or more. n is
        given if it is below three, or below that of a row.
        """
        steps, most = self.steps(other)
        if steps.empty:
            return "–"
        mean, error = steps.mean(), steps.sem()
        text = f"{mean:+.2f}" if len(steps) == 1 else f"{mean:+.2f} ± {error:.2f}"
        if len(steps) >= _FEWEST_SEEDS and abs(mean) > 2 * error:
            text += ", better" if (mean > 0) != self.measure.logarithmic else ", worse"
        all_seeds = len(steps) == max(most, _FEWEST_SEEDS)
        return minus(text) if all_seeds else f"{minus(text)} (n = {len(steps)})"

    def lr(self) -> str:
        """Learning rate of the finished runs, or all rates if every run failed."""
        runs = finished(self.records) or self.records
        return ", ".join(f"{lr:g}" for lr in sorted({run["lr"] for run in runs}))

    def counts(self, key: str) -> str:
        """Counts such as the number of parameters; a failed run may not have them."""
        counts = sorted({run[key] for run in self.records if key in run})
        return ", ".join(f"{count:,}" for count in counts)

    def parameters(self) -> str:
        """Number of parameters at the start and, if the model grew, at the end."""
        sizes = {
            (record["parameters"], (record.get("growth") or [record])[-1]["parameters"])
            for record in finished(self.records) or self.records
        }
        return ", ".join(
            f"{start:,}" if start == end else f"{start:,} → {end:,}" for start, end in sorted(sizes)
        )

    def flops(self) -> str:
        """Mean training FLOPs, of the runs whose FLOPs could be counted."""
        flops = self.by_seed(lambda run: run.get("flops", math.nan)).dropna()
        return scientific(flops.mean()) if len(flops) else "–"

    def times_flops(self, other: "Row") -> str:
        """Training FLOPs, divided by the FLOPs of another row."""
        return times(self.mean_flops(), other.mean_flops())

    def mean_flops(self) -> float:
        """Mean training FLOPs; NaN without runs."""
        return float(self.by_seed(lambda run: run["flops"]).mean())

    def minutes(self) -> str:
        """Mean time of the runs that were not resumed; others record only their last part."""
        whole = [run for run in finished(self.records) if not run["resumed_at_iteration"]]
        seconds = pd.Series([run["seconds"] for run in whole], dtype=float)
        return f"{seconds.mean() / 60:.1f}" if len(seconds) else "–"

    def failures(self) -> str:
        """The runs that failed, and why; of several learning rates, each run's is named."""
        swept = len({record["lr"] for record in self.records}) > 1
        texts = []
        for record in sorted(self.records, key=lambda record: (record["lr"], record["seed"])):
            if error := record.get("failed", "").replace("|", "\\|"):
                if len(error) > _LONGEST_ERROR:
                    error = f"{error[:_LONGEST_ERROR].rstrip()} …"
                lr = f"lr {record['lr']:g}, " if swept else ""
                texts.append(f"{lr}seed {record['seed']}: {error}")
        return "; ".join(texts)


class Column(NamedTuple):
    """A column of a table: heading, cell of a row with runs, and cell of a row without runs."""

    heading: str
    cell: Callable[[Row], str]
    without: Callable[[Row], str] = lambda row: ""


def result_column(measure: Measure, cell: Callable[[Row], str] = Row.result) -> Column:
    """Return the column of the results; a variant without runs is marked as not run."""
    return Column(measure.heading, cell, lambda row: "not run")


MINUTES = Column("minutes", Row.minutes)
FAILED = Column("failed", Row.failures)


def head(columns: Sequence[Column]) -> str:
    """Render the head of a table."""
    names = "".join(f" {column.heading} |" for column in columns)
    return f"| |{names}\n|---|{'---|' * len(columns)}\n"


def line(row: Row, columns: Sequence[Column]) -> str:
    """Render a row of a table."""
    cells = [column.cell(row) if row.records else column.without(row) for column in columns]
    return f"| {' | '.join([row.variant.label, *cells])} |\n"


def _with_deviation(values: pd.Series, form: str) -> str:
    """Format the mean and, of several values, the standard deviation."""
    text = minus(format(values.mean(), form))
    return f"{text} ± {values.std():.2f}" if len(values) > 1 else text


def times(cost: float, other: float) -> str:
    """Format a cost as a multiple of another one; either is NaN without runs."""
    return "–" if math.isnan(cost / other) else f"{cost / other:.2f}"


def minus(text: str) -> str:
    """Replace hyphens by minus signs."""
    return text.replace("-", "−")


def scientific(value: float) -> str:
    """Format a large number with three digits and a power of ten."""
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits} · {power_of_ten(int(exponent))}"


def power_of_ten(exponent: int) -> str:
    """Format a power of ten."""
    return f"10{str(exponent).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
