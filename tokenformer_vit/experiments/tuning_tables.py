"""Tables of a question about tuning: what is trained of a trained model, and how far it gets."""

from collections.abc import Iterable

from .questions import Question
from .rows import Record, Row, best_lr, by_variant, line

HEAD = (
    "| | trained parameters | all parameters | lr | top-1 % | minutes | failed |\n"
    "|---|---|---|---|---|---|---|\n"
)


def rows(question: Question, records: Iterable[Record]) -> str:
    """Render a row for each variant and learning rate; of several rates the best is bold.

    Args:
        question: One with ``pretraining``.
        records: Of a folder; without any, every variant is said not to have been run.
    """
    text, measure = "", question.field.measure
    for variant, runs in by_variant(question, records).items():
        if not runs:
            text += line(variant.label, "", "", "", "not run", "", "")
        rates = sorted({run["lr"] for run in runs})
        for lr in rates:
            row = Row(variant, own := [run for run in runs if run["lr"] == lr], measure)
            best = len(rates) > 1 and lr == best_lr(measure, runs)
            trained, parameters = (
                ", ".join(f"{count:,}" for count in sorted({run[key] for run in own}))
                for key in ("trainable", "parameters")
            )
            text += line(
                variant.label,
                trained,
                parameters,
                f"{lr:g}",
                f"**{row.result()}**" if best else row.result(),
                row.minutes(),
                row.failures(),
            )
    return text
