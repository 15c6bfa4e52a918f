"""Render ablations/TABLES.md, charts, and the tables of READMEs from records."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenformer_vit.files import write_whole

from . import readmes
from .image_models import IMAGES
from .language_models import LANGUAGE
from .plots import draw_diagnostics
from .questions import Question
from .results import Groups, read_groups, read_sweep
from .rows import Record, best_lr, by_variant
from .run import ROOT

PAPERS_CONFIG = "configs/imagenet_base.py"
# A run of the paper has its schedule and batch size, not only its config.
_PAPERS = {"config": PAPERS_CONFIG, "epochs": 300, "images_per_step": 4096}
_MOST_NAMED = 6  # variants in a line
_PAPERS_ARGUMENTS = (
    f"--config {PAPERS_CONFIG} --seeds 3 --nproc-per-node 8 --amp --batch-size 128 "
    "--cfg-options optim_wrapper.accumulative_counts=4"
)

# How to read all tables, and those of each field.
_READING = """\
Results are means over n seeds. A ± is the standard deviation; a single seed has none. Δ is the
difference to the row above, or to the row that its heading names, seed by seed. Where a heading
says *± standard error*, *better* and *worse* mean a difference of over two standard errors, with
three seeds or more. With three seeds, chance alone gives such a difference in about one comparison
of five. Where several learning rates were tried, each variant's best one was chosen on the same
validation data; a line below the table tells where it is the largest or the smallest of them, so
that others may be better. Where only the first seeds tried all of them, their results chose it and
also count in the mean, which is therefore a little too good. Failed runs are named and count in no
mean. Equal FLOPs are not equal time: minutes are also given, as means over runs that were not
interrupted. Another line compares the order of the variants half-way with the order at the end;
where it changes, longer runs may change it again.
"""
_IMAGES = """\
Top-1 is measured on the validation images after the last epoch. Runs of one seed share the order of
the data, the augmentation of each image and every weight outside the blocks. A ViT draws other
random numbers in its blocks, so it pairs other images in mixup and drops other paths. The paper's
figures are for its base model on ImageNet-1K; it does not say how many seeds. Training FLOPs are
those of the backbone, over all forward and backward passes.
"""
_LANGUAGE = """\
Perplexity is measured on held-out text after the last iteration. Runs of one seed share the order
of the data. Models that begin with the same sizes also begin with the same weights. Parameters
include the embedding. Training FLOPs are counted over all forward and backward passes, with the
head.
"""
_READING_OF = {IMAGES: _IMAGES, LANGUAGE: _LANGUAGE}
_TITLE = f"""# Ablations

Rendered by `python ablations/tables.py` from the records in `ablations/results/`, one for each run.
Most runs shared their machine with other work.

{_READING}
{_IMAGES}"""
LANGUAGE_TITLE = f"""# Ablations of language models

{_LANGUAGE}"""
TITLES = {IMAGES: _TITLE, LANGUAGE: LANGUAGE_TITLE}


def main(
    questions: Sequence[Question], argv: Sequence[str] | None = None, root: Path = ROOT
) -> None:
    """Run the command line, for all questions in the order of TABLES.md.

    Raises:
        InputError: If records cannot be compared.
        SystemExit: With --check, if a table is out of date.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    args = parser.parse_args(argv)
    results = root / "ablations" / "results"
    groups = _of_project(read_groups(questions, results))
    texts = {root / "ablations" / "TABLES.md": render(questions, groups)}
    texts |= readmes.render(root, groups)
    old = [
        path
        for path, text in texts.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if args.check:
        if old:
            names = ", ".join(str(path.relative_to(root)) for path in old)
            sys.exit(f"error: {names} is out of date; run `python ablations/tables.py`")
        return
    for path in old:
        write_whole(path, texts[path].encode())
    for (question, folder), records in groups.items():
        _draw(question, records, results / folder)


def write_own(question: Question, out: Path) -> Path:
    """Write the table of one sweep to ``OUT.md`` and its charts to ``OUT*.png``.

    Raises:
        InputError: If the records cannot be compared.
    """
    records = read_sweep(question, out)
    path = out.parent / f"{out.name}.md"
    reading = f"{_READING}\n{_READING_OF[question.field]}"
    parts = [f"# {_introduction(question)}", reading, *_sweep(question, records, out.name)]
    write_whole(path, "\n".join(parts).encode())
    _draw(question, records, out)
    return path


def _of_project(groups: Groups) -> Groups:
    """Leave out sweeps with configs from outside the project, and print their names."""
    kept = {}
    for (question, folder), records in groups.items():
        configs = {record["config"] for record in records}
        if all(config.startswith("configs/") for config in configs):
            kept[question, folder] = records
        else:
            names = ", ".join(sorted(configs))
            print(f"{folder} is left out: {names} is not in configs/", file=sys.stderr)
    return kept


def render(questions: Iterable[Question], groups: Groups) -> str:
    """Render TABLES.md."""
    parts, fields = [], []
    for question in questions:
        if question.field not in fields:
            fields.append(question.field)
            parts.append(TITLES[question.field])
        parts.append(f"## {_introduction(question)}")
        own = {folder: records for (asked, folder), records in groups.items() if asked is question}
        if question.field is IMAGES and question.papers_run:
            if not any(_PAPERS.items() <= run.items() for runs in own.values() for run in runs):
                command = f"python ablations/{question.name}.py {_PAPERS_ARGUMENTS}"
                parts.append(f"`{PAPERS_CONFIG}`, {question.papers_run} (`{command}`):\n")
                parts.append(question.table([]))
        elif not own:
            parts += ["Not run:\n", question.table([])]
        for folder, records in own.items():
            parts += _sweep(question, records, f"results/{folder}")
    return "\n".join(parts)


def _introduction(question: Question) -> str:
    parts = question.title, (question.text or "").strip(), question.note
    return "\n\n".join(filter(None, parts)) + "\n"


def _sweep(question: Question, records: Sequence[Record], link: str) -> list[str]:
    """Render the table of a sweep, with a line about its runs and a link to their folder."""
    field, name = question.field, Path(link).name

    def every(key: str) -> str:
        values = dict.fromkeys(record[key] for record in records if key in record)
        return ", ".join(value if isinstance(value, str) else f"{value:,}" for value in values)

    about = f"`{every('config')}` ([records]({link})), commit {every('commit')}: "
    about += every("hardware")
    if not all("failed" in record for record in records):
        about += (
            f", {every('dtype')}, {every(f'train_{field.examples}')} training {field.examples}, "
            f"{every(f'{field.examples}_per_step')} a step, {every(field.length)} {field.length}"
        )
        if all(column.heading != "lr" for column in question.columns()):
            about += f", lr {every('lr')}"
    chart = question.chart.format(field.measure.label.capitalize())
    charts = f"![{chart}, {name}]({link}.png)\n"
    if _has_layers(records):
        charts += f"![Diagnostics, {name}]({link}_diagnostics.png)\n"
    return [f"{about}:\n", question.table(records), *_at_ends(question, records), charts]


def _at_ends(question: Question, records: Sequence[Record]) -> list[str]:
    """Tell which variants are best at the largest or the smallest learning rate that they tried."""
    swept, at_ends = 0, []
    for variant, runs in by_variant(question.variants, records).items():
        rates = sorted({run["lr"] for run in runs})
        best = best_lr(question.field.measure, runs)
        if len(rates) > 1 and best is not None:
            swept += 1
            if best in (rates[0], rates[-1]):
                at_ends.append(f"{variant.label} at {best:g}")
    if not swept:
        return []
    text = (
        f"{len(at_ends)} of {swept} variants are best at the largest or the smallest learning rate "
        "that they tried"
    )
    named = f": {'; '.join(at_ends)}" if 0 < len(at_ends) <= _MOST_NAMED else ""
    return [f"{text}{named}.\n"]


def _draw(question: Question, records: Sequence[Record], folder: Path) -> None:
    figures = {"": question.draw(records)}
    if _has_layers(records):
        figures["_diagnostics"] = draw_diagnostics(question.field, question.variants, records)
    for name, figure in figures.items():
        path = folder.parent / f"{folder.name}{name}.png"
        figure.savefig(path, dpi=100, metadata={"Software": None})


def _has_layers(records: Iterable[Record]) -> bool:
    """Tell whether figures of layers were measured in any of the runs."""
    return any("diagnostics" in record for record in records)
