"""Render ablations/TABLES.md and its charts from the records of the sweeps.

python ablations/tables.py           writes them
python ablations/tables.py --check   fails if TABLES.md is not what the records say
"""

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import compute_tables
import tuning_tables
from questions import Question, Variant
from rows import Record, Row, Rows, at_best_lr, best_lr, by_variant, line

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole

HERE = Path(__file__).resolve().parent
QUESTIONS: tuple[Question, ...] = tuple(
    import_module(name).QUESTION
    for name in (
        *("softmax", "layernorm", "gelu", "tau", "key_scale", "eps", "pairs"),
        *("growth", "tuning"),
    )
)
PAPERS_CONFIG = "configs/imagenet_base.py"
PAPERS = {"config": PAPERS_CONFIG, "epochs": 300, "images_per_step": 4096}
PAPERS_ARGUMENTS = (
    f"--config {PAPERS_CONFIG} --seeds 3 --nproc-per-node 8 --amp --batch-size 128 "
    "--cfg-options optim_wrapper.accumulative_counts=4"
)

# Without these in common, runs are no comparison.
COMMON = ("config", "epochs", "train_images", "images_per_step", "dtype")

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
HEAD = (  # with as many columns as that of compute_tables
    "| | lr | parameters | top-1 % | paper | Δ | Δ, paper | minutes | failed |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if out of date")
    args = parser.parse_args(argv)
    path, results = HERE / "TABLES.md", HERE / "results"
    groups = read_groups(results)
    text = render(groups)
    if args.check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {path.name} is not what the records say; run `ablations/tables.py`")
        return
    import plots  # matplotlib is slow to import

    for (question, folder), records in groups.items():
        draw = plots.draw_results
        if question.compute is not None:
            draw = plots.draw_costs
        elif question.pretraining is not None:
            draw = plots.draw_tuning
        draw(question, records, results / f"{folder}.png")
        if with_diagnostics(records):
            plots.draw_diagnostics(question, records, results / f"{folder}_diagnostics.png")
    write_whole(path, text.encode())


def read_groups(results: Path) -> dict[tuple[Question, str], list[Record]]:
    """Read the records, by question and folder.

    Args:
        results: Holds a folder for each sweep.

    Raises:
        InputError: If a record is of an unknown variant, or those of a folder differ in more than
            their question asks.
    """
    groups = {}
    for question in QUESTIONS:
        for folder in sorted(results.glob("*/")):
            records = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
            records = {
                path: record
                for path, record in records.items()
                if record.get("question") == question.name
            }
            for path, record in records.items():
                if record["variant"] not in {variant.name for variant in question.variants}:
                    raise InputError(
                        f"{path} is of {record['variant']}, which ablations/{question.name}.py "
                        "does not know; correct either"
                    )
            if records:
                _check_common(records)
                groups[question, folder.name] = list(records.values())
    return groups


def _check_common(records: Mapping[Path, Record]) -> None:
    told = {path: _told(record) for path, record in records.items()}
    for key in (*COMMON, "max_epochs", "settings", "backbone"):
        _check_one_value(key, {path: each[key] for path, each in told.items() if key in each})
    for name in {record["variant"] for record in records.values()}:
        own = {path: record for path, record in records.items() if record["variant"] == name}
        # What a variant is does not change between its runs.
        _check_one_value("options", {path: _pruned(run["options"]) for path, run in own.items()})
        _check_one_value(
            "start", {path: run["start"] for path, run in own.items() if "start" in run}
        )


def _check_one_value(key: str, values: Mapping[Path, Any]) -> None:
    different = {str(value): path for path, value in values.items()}
    if len(different) > 1:
        (one, first), (other, second) = list(different.items())[:2]
        raise InputError(
            f"{key} is {one} in {first} and {other} in {second.name}: they cannot be compared; "
            "give one of the sweeps another --out"
        )


def _told(record: Record) -> Record:
    """Return what a run should have in common with the others of its table.

    Of its settings that is all but seeds, learning rate and what the variant changes; of a variant
    that replaces the whole backbone, all that is outside it.
    """
    settings, options = copy.deepcopy(record["settings"]), record["options"]
    told = {key: record[key] for key in COMMON if key in record}
    settings.get("randomness", {}).pop("seed", None)
    settings.get("optim_wrapper", {}).get("optimizer", {}).pop("lr", None)
    backbone = settings.get("model", {}).pop("backbone", {})
    changed = options.get("model", {}).get("backbone", {})
    if "_delete_" not in backbone:
        own = {"stem_seed", "checkpoint_path"}  # the weights that are tuned are checked apart
        kept = {key: backbone[key] for key in backbone.keys() - changed.keys() - own}
        told["backbone"] = dict(sorted(kept.items()))
    epochs = settings.get("train_cfg", {}).pop("max_epochs", "the config's")
    if "max_epochs" in options.get("train_cfg", {}):
        told.pop("epochs", None)
    else:
        told["max_epochs"] = epochs
    if hooks := options.get("custom_hooks"):
        present = settings.get("custom_hooks", ())
        settings["custom_hooks"] = [hook for hook in present if hook not in hooks]
    return {**told, "settings": _pruned(settings)}


def _pruned(tree: Any) -> Any:
    """Leave out empty dicts, and sort."""
    if not isinstance(tree, dict):
        return tree
    branches = {key: _pruned(tree[key]) for key in sorted(tree)}
    return {key: branch for key, branch in branches.items() if branch != {}}


def render(groups: Mapping[tuple[Question, str], Sequence[Record]]) -> str:
    """Render the whole text."""
    parts = [TITLE]
    for question in QUESTIONS:
        parts.append(f"## {question.title}\n\n{question.text}\n")
        head, setting, chart = HEAD, "the paper's setting", "Top-1 and curves"
        if question.compute is not None:
            head, chart = compute_tables.HEAD, "Top-1 against training FLOPs"
            setting += ", in which it grew no model"
            parts.append(f"{compute_tables.NOTE}\n")
        own = {folder: records for (asked, folder), records in groups.items() if asked is question}
        if question.pretraining is not None:
            parts += _tuning(question, own)
            continue
        if not any(map(_is_papers, itertools.chain(*own.values()))):
            command = f"python ablations/{question.name}.py {PAPERS_ARGUMENTS}"
            rows = _renderer(question)(question, by_variant(question, []))
            parts.append(f"`{PAPERS_CONFIG}`, {setting} (`{command}`):\n\n{head}{rows}")
        for folder, records in own.items():
            parts.append(
                f"{_heading(question, folder, records)}\n\n{head}{_rows(question, records)}"
            )
            charts = f"![{chart}, {folder}](results/{folder}.png)\n"
            if with_diagnostics(records):
                charts += f"![Diagnostics, {folder}](results/{folder}_diagnostics.png)\n"
            parts.append(charts)
    return "\n".join(parts)


def _tuning(question: Question, folders: Mapping[str, Sequence[Record]]) -> Iterable[str]:
    """Render the tables of a question about trained weights, of which the paper has none."""
    head = tuning_tables.HEAD
    if not folders:
        yield f"Not run:\n\n{head}{tuning_tables.rows(question, [])}"
    for folder, records in folders.items():
        rows = tuning_tables.rows(question, records)
        yield f"{_heading(question, folder, records)}\n\n{head}{rows}"
        yield f"![Top-1 against trained parameters, {folder}](results/{folder}.png)\n"


def _renderer(question: Question) -> Callable[..., str]:
    """Return what renders a group of rows."""
    return _group if question.compute is None else compute_tables.group


def _is_papers(record: Record) -> bool:
    """Tell whether a run had the paper's schedule and batch, not the name of its config alone."""
    return all(record.get(key) == value for key, value in PAPERS.items())


def _heading(question: Question, folder: str, records: Sequence[Record]) -> str:
    """Say of what the runs of a table are."""

    def every(key: str) -> str:
        values = dict.fromkeys(record[key] for record in records if key in record)
        return ", ".join(value if isinstance(value, str) else f"{value:,}" for value in values)

    told = f"`{every('config')}` ([records](results/{folder})), commit {every('commit')}: "
    told += every("hardware")
    if all("failed" in record for record in records):
        return f"{told}:"
    return (
        f"{told}, {every('dtype')}, {every('train_images')} training images, "
        f"{every('images_per_step')} a step, {every('epochs')} epochs"
        # Elsewhere it is a column.
        + (f", lr {every('lr')}:" if question.compute is not None else ":")
    )


def with_diagnostics(records: Iterable[Record]) -> bool:
    """Tell whether any of the runs was measured in its layers."""
    return any("diagnostics" in record for record in records)


def _rows(question: Question, records: Sequence[Record]) -> str:
    """Render the rows of a folder, a group for each learning rate."""
    group = _renderer(question)
    rates = sorted({record["lr"] for record in records})
    if len(rates) == 1:
        return group(question, by_variant(question, records))
    best = {variant: best_lr(own) for variant, own in by_variant(question, records).items()}
    text = ""
    for lr in rates:
        rows = by_variant(question, [record for record in records if record["lr"] == lr])
        text += f"| **lr {lr:g}** | | | | | | | | |\n"
        text += group(question, rows, {variant for variant in rows if best[variant] == lr})
    text += "| **each at its best lr** | | | | | | | | |\n"
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
        row = Row(variant, records)
        step = row.step_from(above) if above and not variant.reference else ("", "")
        top1 = f"**{row.top1()}**" if variant in marked else row.top1()
        text += line(
            variant.label,
            ", ".join(f"{lr:g}" for lr in sorted({record["lr"] for record in records})),
            ", ".join(f"{count:,}" for count in sorted({r["parameters"] for r in records})),
            top1,
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
