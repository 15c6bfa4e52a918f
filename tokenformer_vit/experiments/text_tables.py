"""Tables of a question about several texts: how well each is known after every stage of training.

A row is a stage: a run that starts from a model of its own, or from the end of another.
"""

from dataclasses import replace

from .compute_tables import CostRow
from .fields import Measure
from .questions import Question, Variant
from .rows import Row, Rows, line, minus

NOTE = (
    "A row is a stage of training. One with an arrow starts from the end of that which stands "
    "before its last arrow, of the same seed; FLOPs and minutes are those of the stage alone. Each "
    "column of a text is the perplexity of its held-out part, and in parentheses, where an earlier "
    "stage trained on it, the change since the end of that stage: above zero is forgetting."
)


def head(question: Question) -> str:
    """Return the head of a table."""
    texts = "".join(f"| `{text}` " for text in question.texts)
    columns = 7 + len(question.texts)
    return (
        f"| | trained on | parameters | training FLOPs {texts}| n | minutes | failed |\n"
        f"|{'---|' * columns}\n"
    )


def measure_of(question: Question, text: str) -> Measure:
    """Return the measure of one of several texts."""
    measure = question.field.measure
    return replace(measure, name=f"{measure.name}/{text}", heading=text)


def group(
    question: Question, rows: Rows, marked: set[Variant] | frozenset[Variant] = frozenset()
) -> str:
    """Render the rows of a group; those of the marked ones are the best of their variant."""
    text = ""
    for variant, records in rows.items():
        trained = f"`{variant.text}`"
        if not records:
            blank = [""] * (len(question.texts) - 1)
            text += line(variant.label, trained, "", "", "not run", *blank, "", "", "")
            continue
        row = CostRow(variant, records, question.field.measure)
        text += line(
            f"**{variant.label}**" if variant in marked else variant.label,
            trained,
            row.parameters(),
            row.flops(),
            *(_cell(question, rows, variant, each) for each in question.texts),
            str(len(row.by_seed)),
            row.minutes(),
            row.failures(),
        )
    return text


def chain(question: Question, variant: Variant) -> list[Variant]:
    """List a variant and those it starts from, the first stage first."""
    named = {each.name: each for each in question.variants}
    stages = [variant]
    while stages[0].start is not None:
        stages.insert(0, named[stages[0].start])
    return stages


def _cell(question: Question, rows: Rows, variant: Variant, text: str) -> str:
    """Give the perplexity of a text, and how it changed since a stage that trained on it."""
    measure = measure_of(question, text)
    row = Row(variant, rows[variant], measure)
    earlier = [stage for stage in chain(question, variant)[:-1] if stage.text == text]
    if not (row.by_seed and earlier and variant.text != text):
        return row.mean_result()
    change = row.difference(Row(earlier[-1], rows[earlier[-1]], measure))
    return f"{row.mean_result()} ({minus(change)})"
