"""Render ablations/TABLES.md and its charts from the records of the sweeps.

python ablations/tables.py           writes them
python ablations/tables.py --check   fails if TABLES.md is not what the records say
"""

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from questions import Question, Variant

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole

HERE = Path(__file__).resolve().parent
QUESTIONS: tuple[Question, ...] = tuple(
    import_module(name).QUESTION
    for name in ("softmax", "layernorm", "gelu", "tau", "key_scale", "eps", "pairs")
)
PAPERS_CONFIG = "configs/imagenet_base.py"
PAPERS = {"config": PAPERS_CONFIG, "epochs": 300, "images_per_step": 4096}
PAPERS_ARGUMENTS = (
    f"--config {PAPERS_CONFIG} --seeds 3 --nproc-per-node 8 --amp --batch-size 128 "
    "--cfg-options optim_wrapper.accumulative_counts=4"
)

# Without these in common, runs are no comparison.
COMMON = ("config", "epochs", "train_images", "images_per_step", "dtype")
LONGEST_ERROR = 90

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
HEAD = (
    "| | lr | parameters | top-1 % | paper | Δ | Δ, paper | minutes | failed |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)

Record = dict[str, Any]


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
    from plots import draw_diagnostics, draw_results  # matplotlib is slow to import

    for (question, folder), records in groups.items():
        draw_results(question, records, results / f"{folder}.png")
        if with_diagnostics(records):
            draw_diagnostics(question, records, results / f"{folder}_diagnostics.png")
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
    told = {path: {**record, **_shared_settings(record)} for path, record in records.items()}
    for key in (*COMMON, "settings", "backbone"):
        values = {str(record[key]): path for path, record in told.items() if key in record}
        if len(values) > 1:
            (one, first), (other, second) = list(values.items())[:2]
            raise InputError(
                f"{key} is {one} in {first} and {other} in {second.name}: they cannot be compared; "
                "give one of the sweeps another --out"
            )


def _shared_settings(record: Record) -> Record:
    """Return what a run's settings should have in common with the others of its table.

    That is all but seeds, learning rate and what the variant changes; of a variant that replaces
    the whole backbone, all that is outside it.
    """
    settings = copy.deepcopy(record["settings"])
    settings.get("randomness", {}).pop("seed", None)
    settings.get("optim_wrapper", {}).get("optimizer", {}).pop("lr", None)
    backbone = settings.get("model", {}).pop("backbone", {})
    changed = record["options"].get("model", {}).get("backbone", {})
    shared = {"settings": _pruned(settings)}
    if "_delete_" not in backbone:
        kept = {key: backbone[key] for key in backbone.keys() - changed.keys() - {"stem_seed"}}
        shared["backbone"] = dict(sorted(kept.items()))
    return shared


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
        own = {folder: records for (asked, folder), records in groups.items() if asked is question}
        if not any(map(_is_papers, itertools.chain(*own.values()))):
            command = f"python ablations/{question.name}.py {PAPERS_ARGUMENTS}"
            rows = "".join(map(_not_run, question.variants))
            parts.append(f"`{PAPERS_CONFIG}`, the paper's setting (`{command}`):\n\n{HEAD}{rows}")
        for folder, records in own.items():
            parts.append(f"{_heading(folder, records)}\n\n{HEAD}{_rows(question, records)}")
            charts = f"![Top-1 and curves, {folder}](results/{folder}.png)\n"
            if with_diagnostics(records):
                charts += f"![Diagnostics, {folder}](results/{folder}_diagnostics.png)\n"
            parts.append(charts)
    return "\n".join(parts)


def _is_papers(record: Record) -> bool:
    """Tell whether a run had the paper's schedule and batch, not the name of its config alone."""
    return all(record.get(key) == value for key, value in PAPERS.items())


def _heading(folder: str, records: Sequence[Record]) -> str:
    """Say of what the runs of a table are."""

    def every(key: str) -> str:
        values = dict.fromkeys(record[key] for record in records if key in record)
        return ", ".join(f"{value:,}" if isinstance(value, int) else value for value in values)

    told = f"`{every('config')}` ([records](results/{folder})), commit {every('commit')}: "
    told += every("hardware")
    if all("failed" in record for record in records):
        return f"{told}:"
    return (
        f"{told}, {every('dtype')}, {every('train_images')} training images, "
        f"{every('images_per_step')} a step, {every('epochs')} epochs:"
    )


def with_diagnostics(records: Iterable[Record]) -> bool:
    """Tell whether any of the runs was measured in its layers."""
    return any("diagnostics" in record for record in records)


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


def best_lr(records: Iterable[Record]) -> float | None:
    """Return the learning rate of the highest mean top-1, if any run came to its end.

    Only rates at which the most runs came to their end are candidates: where some diverged, the
    mean of the others is no measure.
    """
    rates: dict[float, list[float]] = {}
    for record in finished(records):
        rates.setdefault(record["lr"], []).append(record["final"]["top1"])
    most = max(map(len, rates.values()), default=0)
    candidates = [lr for lr in sorted(rates) if len(rates[lr]) == most]
    return max(candidates, key=lambda lr: mean(rates[lr]), default=None)


def at_best_lr(question: Question, records: Iterable[Record]) -> dict[Variant, list[Record]]:
    """Leave of each variant the runs of its best learning rate; all, if it never came to an end."""
    chosen = {}
    for variant, own in by_variant(question, records).items():
        best = best_lr(own)
        chosen[variant] = [record for record in own if best in (None, record["lr"])]
    return chosen


def _rows(question: Question, records: Sequence[Record]) -> str:
    """Render the rows of a folder, a group for each learning rate."""
    rates = sorted({record["lr"] for record in records})
    if len(rates) == 1:
        return _group(by_variant(question, records))
    best = {variant: best_lr(own) for variant, own in by_variant(question, records).items()}
    text = ""
    for lr in rates:
        rows = by_variant(question, [record for record in records if record["lr"] == lr])
        text += f"| **lr {lr:g}** | | | | | | | | |\n"
        text += _group(rows, {variant for variant in rows if best[variant] == lr})
    text += "| **each at its best lr** | | | | | | | | |\n"
    return text + _group(at_best_lr(question, records))


def _group(
    rows: Mapping[Variant, Sequence[Record]],
    marked: set[Variant] | frozenset[Variant] = frozenset(),
) -> str:
    """Render the rows of a group; the means of the marked ones are the best of their variant."""
    text, above = "", None
    for variant, records in rows.items():
        if not records:
            text += _not_run(variant)
            above = None
            continue
        row = Row(variant, records)
        step = row.step_from(above) if above and not variant.reference else ("", "")
        top1 = f"**{row.top1()}**" if variant in marked else row.top1()
        text += _line(
            variant.label,
            ", ".join(f"{lr:g}" for lr in sorted({record["lr"] for record in records})),
            ", ".join(f"{count:,}" for count in sorted({r["parameters"] for r in records})),
            top1,
            "–" if variant.paper is None else f"{variant.paper:.1f}",
            *step,
            row.minutes(),
            row.failures(),
        )
        above = row
    return text


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _not_run(variant: Variant) -> str:
    paper = "–" if variant.paper is None else f"{variant.paper:.1f}"
    return _line(variant.label, "", "", "not run", paper, "", "", "", "")


class Row:
    """A variant at one learning rate.

    Args:
        variant: The variant.
        records: Its runs, those that failed included.
    """

    def __init__(self, variant: Variant, records: Sequence[Record]) -> None:
        self.variant = variant
        self.done = finished(records)
        self.failed = [record for record in records if "failed" in record]
        self.by_seed = {record["seed"]: record["final"]["top1"] for record in self.done}

    def top1(self) -> str:
        """Give mean, deviation and n."""
        values = list(self.by_seed.values())
        return f"{_with_deviation(values, '.2f')} (n = {len(values)})" if values else "–"

    def step_from(self, above: "Row") -> tuple[str, str]:
        """Give the difference of top-1 over the seeds that both rows have, and the paper's."""
        seeds = sorted(self.by_seed.keys() & above.by_seed.keys())
        own = [self.by_seed[seed] - above.by_seed[seed] for seed in seeds]
        papers = (self.variant.paper, above.variant.paper)
        step = _with_deviation(own, "+.2f") if own else "–"
        if own and len(own) < max(len(self.by_seed), len(above.by_seed)):
            step += f" (n = {len(own)})"
        return (
            step,
            "–" if None in papers else _minus(f"{papers[0] - papers[1]:+.1f}"),
        )

    def minutes(self) -> str:
        """Give the mean time; the record of a resumed run knows that of its last part alone."""
        whole = [r["seconds"] / 60 for r in self.done if not r["resumed_at_iteration"]]
        return f"{mean(whole):.1f}" if whole else "–"

    def failures(self) -> str:
        """Name the runs that failed, and why."""
        told = []
        for record in sorted(self.failed, key=lambda record: record["seed"]):
            line = record["failed"].replace("|", "\\|")
            line = line if len(line) <= LONGEST_ERROR else f"{line[:LONGEST_ERROR].rstrip()} …"
            told.append(f"seed {record['seed']}: {line}")
        return "; ".join(told)


def _with_deviation(values: Sequence[float], form: str) -> str:
    text = _minus(format(mean(values), form))
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 else text


def _minus(text: str) -> str:
    return text.replace("-", "−")


if __name__ == "__main__":
    run_tool(main)
