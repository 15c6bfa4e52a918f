"""The rows of a table: the runs of each variant, and what is said of them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from .fields import Measure
from .questions import Question, Variant

LONGEST_ERROR = 90

Record = dict[str, Any]
Rows = Mapping[Variant, Sequence[Record]]


def finished(records: Iterable[Record]) -> list[Record]:
    """Leave out the runs that failed."""
    return [record for record in records if "failed" not in record]


def by_variant(question: Question, records: Iterable[Record]) -> dict[Variant, list[Record]]:
    """Sort records into the rows of a table, in its order."""
    rows: dict[Variant, list[Record]] = {variant: [] for variant in question.variants}
    names = {variant.name: variant for variant in question.variants}
    for record in records:
        rows[names[record["variant"]]].append(record)
    return rows


def best_lr(measure: Measure, records: Iterable[Record]) -> float | None:
    """Return the learning rate of the best mean, if any run came to its end.

    Only rates at which the most runs came to their end are candidates: where some diverged, the
    mean of the others is no measure.
    """
    rates: dict[float, list[float]] = {}
    for record in finished(records):
        rates.setdefault(record["lr"], []).append(record["final"][measure.name])
    most = max(map(len, rates.values()), default=0)
    candidates = [lr for lr in sorted(rates) if len(rates[lr]) == most]
    return max(candidates, key=lambda lr: measure.score(mean(rates[lr])), default=None)


def at_best_lr(question: Question, records: Iterable[Record]) -> dict[Variant, list[Record]]:
    """Leave of each variant the runs of its best learning rate; all, if it never came to an end."""
    chosen = {}
    for variant, own in by_variant(question, records).items():
        best = best_lr(question.field.measure, own)
        chosen[variant] = [record for record in own if best in (None, record["lr"])]
    return chosen


class Row:
    """A variant at one learning rate.

    Args:
        variant: The variant.
        records: Its runs, those that failed included.
        measure: What is told of them.
    """

    def __init__(self, variant: Variant, records: Sequence[Record], measure: Measure) -> None:
        self.variant = variant
        self.records = records
        self.done = finished(records)
        self.failed = [record for record in records if "failed" in record]
        self.by_seed = {record["seed"]: record["final"][measure.name] for record in self.done}

    def result(self) -> str:
        """Give mean, deviation and n."""
        return f"{self.mean_result()} (n = {len(self.by_seed)})" if self.by_seed else "–"

    def mean_result(self) -> str:
        """Give mean and deviation."""
        values = list(self.by_seed.values())
        return with_deviation(values, ".2f") if values else "–"

    def difference(self, other: "Row") -> str:
        """Give the difference of the means over the seeds that both rows have."""
        seeds = sorted(self.by_seed.keys() & other.by_seed.keys())
        own = [self.by_seed[seed] - other.by_seed[seed] for seed in seeds]
        step = with_deviation(own, "+.2f") if own else "–"
        if own and len(own) < max(len(self.by_seed), len(other.by_seed)):
            step += f" (n = {len(own)})"
        return step

    def papers_difference(self, other: "Row") -> str:
        """Give the difference that the paper reports."""
        papers = (self.variant.paper, other.variant.paper)
        return "–" if None in papers else minus(f"{papers[0] - papers[1]:+.1f}")

    def lr(self) -> str:
        """Give the learning rate."""
        return ", ".join(f"{lr:g}" for lr in sorted({run["lr"] for run in self.records}))

    def parameters(self) -> str:
        """Give their number at the start and, where it is another, at the end."""
        sizes = {
            (record["parameters"], (record.get("growth") or [record])[-1]["parameters"])
            for record in self.done or self.failed
        }
        return ", ".join(
            f"{start:,}" if start == end else f"{start:,} → {end:,}" for start, end in sorted(sizes)
        )

    def minutes(self) -> str:
        """Give the mean time; the record of a resumed run knows that of its last part alone."""
        whole = [r["seconds"] / 60 for r in self.done if not r["resumed_at_iteration"]]
        return f"{mean(whole):.1f}" if whole else "–"

    def failures(self) -> str:
        """Name the runs that failed, and why."""
        told = []
        for record in sorted(self.failed, key=lambda record: record["seed"]):
            error = record["failed"].replace("|", "\\|")
            if len(error) > LONGEST_ERROR:
                error = f"{error[:LONGEST_ERROR].rstrip()} …"
            told.append(f"seed {record['seed']}: {error}")
        return "; ".join(told)


def with_deviation(values: Sequence[float], form: str) -> str:
    """Give the mean and, of several, the standard deviation."""
    text = minus(format(mean(values), form))
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 else text


def minus(text: str) -> str:
    """Write a minus as one."""
    return text.replace("-", "−")


def line(*cells: str) -> str:
    """Write a line of a table."""
    return "| " + " | ".join(cells) + " |\n"
