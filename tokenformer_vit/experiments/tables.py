"""Render ablations/TABLES.md and its charts from the records of the sweeps.

python ablations/tables.py           writes them
python ablations/tables.py --check   fails if TABLES.md is not what the records say
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.files import write_whole

from . import baseline_tables, compute_tables, text_tables, tuning_tables
from .comparable import read_groups
from .fields import LANGUAGE, VISION
from .questions import Question, Variant
from .rows import Record, Row, Rows, at_best_lr, best_lr, by_variant, line

HERE = Path(__file__).resolve().parent
QUESTIONS: tuple[Question, ...] = tuple(
    import_module(name).QUESTION
    for name in (
        *("softmax", "layernorm", "gelu", "tau", "key_scale", "eps", "pairs"),
        *("growth", "tuning"),
        *("lm_transformer", "lm_growth", "lm_schedules", "lm_continue", "lm_languages"),
    )
)
PAPERS_CONFIG = "configs/imagenet_base.py"
PAPERS = {"config": PAPERS_CONFIG, "epochs": 300, "images_per_step": 4096}
PAPERS_ARGUMENTS = (
    f"--config {PAPERS_CONFIG} --seeds 3 --nproc-per-node 8 --amp --batch-size 128 "
    "--cfg-options optim_wrapper.accumulative_counts=4"
)

TITLE = """# Ablations

Rendered by `python ablations/tables.py` from the records in `ablations/results/`, one for each run.

Top-1 is that of the last epoch on the validation images, mean ± standard deviation over n seeds; of
one seed no deviation is known. Δ is the step from the row above, seed by seed: runs of one seed
share the order of the data, the augmentation of each image and every weight outside the blocks; a
ViT, whose blocks draw other random numbers, pairs other images in mixup and drops other paths.
Runs that failed are named and count in no mean. Where several learning rates were tried, the best
is that of the highest mean on the same validation images. The paper's figures are those of its base
model on ImageNet-1K, of unstated seeds. Minutes are the mean over runs that were not interrupted.
"""
LANGUAGE_TITLE = """# Ablations of language models

Perplexity is that of the last iteration on held-out text, mean ± standard deviation over n seeds.
Runs of one seed share the order of the data and, where their models begin with the same sizes, the
weights they begin with; other models draw other weights. Parameters are all of a model, embedding
included; training FLOPs are those of all forward and backward passes, head included.
Failures, learning rates and minutes are told as above.
"""
TITLES = {VISION: TITLE, LANGUAGE: LANGUAGE_TITLE}
HEAD = (
    "| | lr | parameters | top-1 % | paper | Δ | Δ, paper | minutes | failed |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if out of date")
    args = parser.parse_args(argv)
    path, results = HERE / "TABLES.md", HERE / "results"
    groups = read_groups(QUESTIONS, results)
    text = render(groups)
    if args.check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {path.name} is not what the records say; run `ablations/tables.py`")
        return
    for (question, folder), records in groups.items():
        form = _form(question)
        plots = import_module(form.plots)  # late: matplotlib is slow to import
        getattr(plots, form.draw)(question, records, results / f"{folder}.png")
        if with_diagnostics(records):
            plots = import_module("diagnostics_plots")
            plots.draw_diagnostics(question, records, results / f"{folder}_diagnostics.png")
    write_whole(path, text.encode())


class Form(NamedTuple):
    """What a question's tables look like.

    Args:
        head: The head of each.
        rows: Renders its rows out of records; without any, all are said not to have been run.
        note: How to read them.
        draw: The function that draws the chart.
        chart: What the chart shows.
        plots: The module that has the function.
    """

    head: str
    rows: Callable[[Question, Sequence[Record]], str]
    note: str
    draw: str
    chart: str
    plots: str = "plots"


def _form(question: Question) -> Form:
    if question.compute is not None:
        head, note = (each[question.field] for each in (compute_tables.HEADS, compute_tables.NOTES))
        chart = f"{question.field.measure.title} against training FLOPs"
        return Form(head, partial(_rates, compute_tables.group), note, "draw_costs", chart)
    if question.pretraining is not None:
        chart = "Top-1 against trained parameters"
        return Form(tuning_tables.HEAD, tuning_tables.rows, "", "draw_tuning", chart)
    if question.texts:
        head, chart = text_tables.head(question), "Perplexity of each text"
        return Form(
            head,
            partial(_rates, text_tables.group),
            text_tables.NOTE,
            "draw_texts",
            chart,
            "text_plots",
        )
    chart = f"{question.field.measure.title} and curves"
    if question.baseline is not None:
        head = baseline_tables.head(question)
        return Form(head, partial(_rates, baseline_tables.group), "", "draw_results", chart)
    return Form(HEAD, partial(_rates, _group), "", "draw_results", chart)


def render(groups: Mapping[tuple[Question, str], Sequence[Record]]) -> str:
    """Render the whole text."""
    parts, fields = [], []
    for question in QUESTIONS:
        if question.field not in fields:
            fields.append(question.field)
            parts.append(TITLES[question.field])
        form = _form(question)
        parts.append(f"## {question.title}\n\n{question.text}\n")
        if form.note:
            parts.append(f"{form.note}\n")
        own = {folder: records for (asked, folder), records in groups.items() if asked is question}
        parts += _not_run(question, form, own)
        for folder, records in own.items():
            rows = form.rows(question, records)
            parts.append(f"{_heading(question, form, folder, records)}\n\n{form.head}{rows}")
            charts = f"![{form.chart}, {folder}](results/{folder}.png)\n"
            if with_diagnostics(records):
                charts += f"![Diagnostics, {folder}](results/{folder}_diagnostics.png)\n"
            parts.append(charts)
    return "\n".join(parts)


def _not_run(question: Question, form: Form, own: Mapping[str, Sequence[Record]]) -> Iterable[str]:
    """Render the table of what was never run: where the paper has one, in its setting."""
    rows = form.rows(question, [])
    if question.pretraining is not None or question.field is not VISION:
        if not own:
            yield f"Not run:\n\n{form.head}{rows}"
    elif not any(map(_is_papers, itertools.chain(*own.values()))):
        setting = "the paper's setting"
        if question.compute is not None:
            setting += ", in which it grew no model"
        command = f"python ablations/{question.name}.py {PAPERS_ARGUMENTS}"
        yield f"`{PAPERS_CONFIG}`, {setting} (`{command}`):\n\n{form.head}{rows}"


def _is_papers(record: Record) -> bool:
    """Tell whether a run had the paper's schedule and batch, not the name of its config alone."""
    return all(record.get(key) == value for key, value in PAPERS.items())


def _heading(question: Question, form: Form, folder: str, records: Sequence[Record]) -> str:
    """Say of what the runs of a table are."""
    field = question.field
    examples, words = field.examples

    def every(key: str) -> str:
        values = dict.fromkeys(record[key] for record in records if key in record)
        return ", ".join(value if isinstance(value, str) else f"{value:,}" for value in values)

    told = f"`{every('config')}` ([records](results/{folder})), commit {every('commit')}: "
    told += every("hardware")
    if all("failed" in record for record in records):
        return f"{told}:"
    return (
        f"{told}, {every('dtype')}, {every(examples)} {words}, "
        f"{every(field.per_step)} a step, {every(field.length)} {field.length}"
        # Elsewhere it is a column.
        + ("" if "| lr |" in form.head else f", lr {every('lr')}")
        + ":"
    )


def with_diagnostics(records: Iterable[Record]) -> bool:
    """Tell whether any of the runs was measured in its layers."""
    return any("diagnostics" in record for record in records)


def _rates(group: Callable[..., str], question: Question, records: Sequence[Record]) -> str:
    """Render the rows of a folder, a group for each learning rate."""
    rates = sorted({record["lr"] for record in records})
    if len(rates) < 2:
        return group(question, by_variant(question, records))
    measure = question.field.measure
    best = {
        variant: best_lr(measure, own) for variant, own in by_variant(question, records).items()
    }
    blank = " |" * _form(question).head.split("\n")[0].count("| ")
    text = ""
    for lr in rates:
        rows = by_variant(question, [record for record in records if record["lr"] == lr])
        text += f"| **lr {lr:g}**{blank}\n"
        text += group(question, rows, {variant for variant in rows if best[variant] == lr})
    text += f"| **each at its best lr**{blank}\n"
    return text + group(question, at_best_lr(question, records))


def _group(
    question: Question, rows: Rows, marked: set[Variant] | frozenset[Variant] = frozenset()
) -> str:
    """Render the rows of a group; the means of the marked ones are the best of their variant."""
    text, above = "", None
    for variant, records in rows.items():
        if not records:
            text += line(variant.label, "", "", "not run", _papers(variant), "", "", "", "")
            above = None
            continue
        row, step = Row(variant, records, question.field.measure), ("", "")
        if above and not variant.reference:
            step = (row.difference(above), row.papers_difference(above))
        text += line(
            variant.label,
            row.lr(),
            row.parameters(),
            f"**{row.result()}**" if variant in marked else row.result(),
            _papers(variant),
            *step,
            row.minutes(),
            row.failures(),
        )
        above = row
    return text


def _papers(variant: Variant) -> str:
    return "–" if variant.paper is None else f"{variant.paper:.1f}"


if __name__ == "__main__":
    run_tool(main)
