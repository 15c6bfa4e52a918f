"""Published figures of language models, and tables that set others beside them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenformer_vit.command_line import printable

__all__ = ["PUBLISHED", "TITLES", "Published", "average", "loss_table", "zero_shot_table"]

# The tasks, in the order of the figures below, by their names on the command line.
TITLES = {
    "lambada": "LAMBADA",
    "hellaswag": "HellaSwag",
    "piqa": "PIQA",
    "arc_easy": "ARC-e",
    "arc_challenge": "ARC-c",
    "winogrande": "WinoGrande",
}


class Published(NamedTuple):
    """A model's zero-shot results.

    Attributes:
        model: Its name.
        accuracies: In percent, of the tasks in :data:`TITLES`.
        average: In percent, as printed.
        pile_perplexity: On the Pile's validation part; None if not known here.
    """

    model: str
    accuracies: tuple[float, ...]
    average: float
    pile_perplexity: float | None = None


# Source: TokenFormer, arXiv:2410.23168, Table 1, and the same table in the authors' model cards
# (huggingface.co/Haiyang-W/TokenFormer-1-5B), which has the single figures. The average of Pythia
# 160M is printed as 40.1 in both; its six figures have the mean 41.1.
PUBLISHED = (
    Published("Pythia 160M", (35.4, 30.3, 62.3, 43.6, 23.6, 51.3), 40.1),
    Published("TokenFormer 150M", (45.0, 35.5, 64.9, 47.3, 24.9, 50.4), 44.7, 10.45),
    Published("Pythia 410M", (51.4, 40.6, 66.9, 52.1, 24.6, 53.8), 48.2),
    Published("TokenFormer 450M", (57.3, 47.5, 69.5, 56.2, 26.7, 54.6), 52.0, 8.28),
    Published("Pythia 1B", (56.1, 47.2, 70.7, 57.0, 27.1, 53.5), 51.9),
    Published("TokenFormer 900M", (64.0, 55.3, 72.4, 59.9, 30.6, 56.4), 56.4, 7.38),
    Published("TokenFormer 1.5B", (64.7, 60.0, 74.8, 64.8, 32.0, 59.7), 59.3, 6.91),
)


def average(
    accuracies: Mapping[str, tuple[float, float | None]],
) -> tuple[float, float | None] | None:
    """Return the mean over the six tasks with its standard error; None if one is not there.

    Args:
        accuracies: Of each task the accuracy and its standard error.
    """
    if any(name not in accuracies for name in TITLES):
        return None
    values, errors = zip(*(accuracies[name] for name in TITLES), strict=True)
    known = [error for error in errors if error is not None]
    # The tasks' items are drawn independently.
    error = math.hypot(*known) / len(TITLES) if len(known) == len(TITLES) else None
    return sum(values) / len(TITLES), error


def zero_shot_table(
    model: str, accuracies: Mapping[str, tuple[float, float | None]], limit: int | None = None
) -> str:
    """Set a model's accuracies beside the published ones.

    Args:
        model: What to call it.
        accuracies: Of each task, by its name in :data:`TITLES`, the accuracy from 0 to 1 and its
            standard error.
        limit: So many items were asked of each task; None for all.

    Returns:
        A Markdown table in percent.
    """
    mean = average(accuracies)
    own = [accuracies.get(name) for name in TITLES]
    rows = [[model, *map(_percent, own), _percent(mean), "–"]]
    for published in PUBLISHED:
        perplexity = published.pile_perplexity
        figures = [f"{value:.1f}" for value in (*published.accuracies, published.average)]
        rows.append([published.model, *figures, "–" if perplexity is None else f"{perplexity:.2f}"])
    table = _markdown(["model", *TITLES.values(), "average", "Pile perplexity"], rows)
    notes = [
        "Accuracy in percent, of HellaSwag and ARC-c normalised by the answers' lengths; ± is the "
        "standard error. All rows but the first are published ones (arXiv:2410.23168, Table 1)."
    ]
    if limit:
        notes.append(f"The first row is of the first {limit} items of each task only.")
    return "\n\n".join((table, *notes))


def loss_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Tell how well texts were predicted.

    Args:
        results: Of each text ``TextLoss.values()``.

    Returns:
        A Markdown table.
    """
    columns = {
        "tokens": ",.0f",
        "loss": ".4f",
        "perplexity": ".3f",
        "bits_per_byte": ".4f",
        "word_perplexity": ".2f",
    }
    rows = [
        [
            text,
            *(
                "–" if values[name] is None else format(values[name], form)
                for name, form in columns.items()
            ),
        ]
        for text, values in results.items()
    ]
    return _markdown(["text", *(name.replace("_", " ") for name in columns)], rows)


def _percent(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return "–"
    return f"{value[0]:.1%}"[:-1] + ("" if value[1] is None else f" ± {value[1]:.1%}"[:-1])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns line up as text, too: the first to the left, others right."""
    # Names of files come from others.
    rows = [[printable(cell).replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    ruler = [f"{'-' * (width - 1)}{'-' if not at else ':'}" for at, width in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in (header, ruler, *rows)
    )
