"""Tables in which every variant is set beside one: in parameters, in cost and in result."""

from .compute_tables import CostRow
from .questions import Question, Variant
from .rows import Rows, line


def head(question: Question) -> str:
    """Return the head of a table."""
    (name,) = (each.label for each in question.variants if each.name == question.baseline)
    return (
        f"| | parameters | × {name} | training FLOPs | × {name} "
        f"| {question.field.measure.heading} | Δ to {name} | minutes | failed |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )


def group(
    question: Question, rows: Rows, marked: set[Variant] | frozenset[Variant] = frozenset()
) -> str:
    """Render the rows of a group; the means of the marked ones are the best of their variant."""
    measure = question.field.measure
    (baseline,) = (
        CostRow(variant, records, measure)
        for variant, records in rows.items()
        if variant.name == question.baseline
    )
    text = ""
    for variant, records in rows.items():
        if not records:
            text += line(variant.label, "", "", "", "", "not run", "", "", "")
            continue
        row = CostRow(variant, records, measure)
        text += line(
            variant.label,
            row.parameters(),
            _times(row, baseline),
            row.flops(),
            row.times(baseline),
            f"**{row.result()}**" if variant in marked else row.result(),
            "" if variant is baseline.variant else row.difference(baseline),
            row.minutes(),
            row.failures(),
        )
    return text


def _times(row: CostRow, baseline: CostRow) -> str:
    """Give the parameters of a row relative to those of the baseline."""
    if not baseline.records:
        return "–"
    return f"{row.records[0]['parameters'] / baseline.records[0]['parameters']:.3f}"
