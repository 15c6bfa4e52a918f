"""Published results of language models, and tables that compare a model with them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenformer_vit.command_line import printable

# Name of each task on the command line, and its title; in the order of the figures below.
TITLES = {
    "lambada": "LAMBADA",
    "hellaswag": "HellaSwag",
    "piqa": "PIQA",
    "arc_easy": "ARC-e",
    "arc_challenge": "ARC-c",
    "winogrande": "WinoGrande",
}
# The harness's metric in the published results. Source: the authors' README takes the zero-shot
# benchmark from Mamba, arXiv:2312.00752, Appendix E.2.3.
METRICS = dict.fromkeys(TITLES, "acc") | {"hellaswag": "acc_norm", "arc_challenge": "acc_norm"}


class Published(NamedTuple):
    """The zero-shot results of a model.

    Attributes:
        model: Name of the model.
        accuracies: Accuracy in percent of each task in :data:`TITLES`.
        average: Average in percent, as it was printed.
        pile_perplexity: Perplexity on the validation split of the Pile; None if unknown.
    """

    model: str
    accuracies: tuple[float, ...]
    average: float
    pile_perplexity: float | None = None


# Source: TokenFormer, arXiv:2410.23168, Table 1, and the same table in the authors' model cards
# (huggingface.co/Haiyang-W/TokenFormer-1-5B), which has a figure for each task. Both print 40.1 as
# the average of Pythia 160M; the mean of its six figures is 41.1.
PUBLISHED = (
    Published("Pythia 160M", (35.4, 30.3, 62.3, 43.6, 23.6, 51.3), 40.1),
    Published("TokenFormer 150M", (45.0, 35.5, 64.9, 47.3, 24.9, 50.4), 44.7, 10.45),
    Published("Pythia 410M", (51.4, 40.6, 66.9, 52.1, 24.6, 53.8), 48.2),
    Published("TokenFormer 450M", (57.3, 47.5, 69.5, 56.2, 26.7, 54.6), 52.0, 8.28),
    Published("Pythia 1B", (56.1, 47.2, 70.7, 57.0, 27.1, 53.5), 51.9),
    Published("TokenFormer 900M", (64.0, 55.3, 72.4, 59.9, 30.6, 56.4), 56.4, 7.38),
    Published("TokenFormer 1.5B", (64.7, 60.0, 74.8, 64.8, 32.0, 59.7), 59.3, 6.91),
)


def accuracies_of(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """Return the published metric of each task with its standard error.

    Args:
        tasks: Values of each task as :func:`~tokenformer_vit.language.tasks.run_task` returns them.
    """
    return {
        name: (values[METRICS[name]], values[f"{METRICS[name]}_stderr"])
        for name, values in tasks.items()
    }


def average(
    accuracies: Mapping[str, tuple[float, float | None]],
) -> tuple[float, float | None] | None:
    """Return the mean of the six tasks with its standard error; None if a task is missing.

    Args:
        accuracies: Accuracy of each task with its standard error.
    """
    if any(name not in accuracies for name in TITLES):
        return None
    values, errors = zip(*(accuracies[name] for name in TITLES), strict=True)
    known = [error for error in errors if error is not None]
    # Errors add up like this because the items of the tasks are drawn independently.
    error = math.hypot(*known) / len(TITLES) if len(known) == len(TITLES) else None
    return sum(values) / len(TITLES), error


def zero_shot_table(
    model: str, accuracies: Mapping[str, tuple[float, float | None]], limit: int | None = None
) -> str:
    """Make a table of a model's accuracies and the published ones.

    Args:
        model: Name of the model.
        accuracies: Accuracy, from 0 to 1, of each task in :data:`TITLES` with its standard error.
        limit: Number of items of each task that were evaluated; None for all.

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
        "Accuracy in percent ± standard error; for HellaSwag and ARC-c normalised by the length "
        "of the answer. All rows but the first are published (arXiv:2410.23168, Table 1)."
    ]
    if limit:
        notes.append(f"The first row is for the first {limit} items of each task only.")
    return "\n\n".join((table, *notes))


def loss_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Make a table of how well texts were predicted.

    Args:
        results: ``TextLoss.values()`` of each text.

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
    """Return a table whose columns also line up as plain text."""
    # Names of files may hold anything.
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
