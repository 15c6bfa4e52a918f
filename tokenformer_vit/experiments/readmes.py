"""The tables of READMEs: what was trained, how fast it is, and what growth costs.

A README has a table between two markers, ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .fields import Field
from .image_models import IMAGES
from .language_models import LANGUAGE
from .results import Groups
from .rows import Record
from .training_cost import TrainingCost, summary_head

READMES = (
    "README.md",
    "ablations/README.md",
    "configs/README.md",
    "tokenformer_vit/benchmarking/README.md",
    "tokenformer_vit/growth/README.md",
    "tokenformer_vit/language/README.md",
)
RUNS = "configs/results"
SPEED = "tokenformer_vit/benchmarking/results"
ABLATIONS = "ablations/results"

# Name of the record of each training run, and what was run for it.
IMAGE_RUNS = {
    "digits_demo": "`make demo`: 8 px digits, 0.6 M parameters",
    "cifar10_tiny_5000": "`cifar10_tiny` on a 5,000-image slice",
    "cifar10_tiny_full": "`cifar10_tiny`, all 50,000 images, GPU",
    "imagenet_base_20_iterations": "`imagenet_base`, 20 iterations at batch 4, random images",
    "imagenet_base": "`imagenet_base`, the full recipe",
}
LANGUAGE_RUNS = {
    "lm_reversal": "`lm_reversal`: 16 digits backwards, 0.15 M parameters",
    "lm_shakespeare": "`lm_shakespeare`: tiny Shakespeare by bytes, 0.6 M parameters",
    "lm_pile_150m": "`lm_pile_150m`, the full recipe",
}

# The image benchmarks that are rendered, and their variants.
BENCHMARK = {
    "model": "tokenformer_base_matched",
    "baseline": "vit_base_patch16_224",
    "img_size": 224,
    "depth": None,
}
VARIANTS = ("fused compiled", "baseline compiled", "released eager")
DECODING_VARIANTS = ("fused eager", "baseline eager", "released eager")  # decoding is not compiled
# What a benchmark on a GPU would show, until there is a record of one.
GPU_GROUPS = [
    f"{mode}, bfloat16 autocast, batch {batch}"
    for mode in ("train", "infer")
    for batch in (128, 256)
]


def render(root: Path, groups: Groups) -> dict[Path, str]:
    """Fill the tables of all READMEs.

    Args:
        root: The repository.
        groups: The records of all ablations.

    Returns:
        The text of each README that has markers.
    """
    texts = {}
    for name in READMES:
        path = root / name
        if path.is_file() and "<!-- /" in (text := path.read_text(encoding="utf-8")):
            texts[path] = fill(text, Tables(root, path.parent, groups))
    return texts


def fill(text: str, tables: "Tables") -> str:
    """Replace the tables between the markers of a text."""
    rendered = {
        "runs": tables.image_runs,
        "language-runs": tables.language_runs,
        "speed": tables.image_speed,
        "language-speed": tables.language_speed,
        "growth": lambda: tables.growth(IMAGES),
        "language-growth": lambda: tables.growth(LANGUAGE),
    }
    for name, table in rendered.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if between.search(text):
            new = table()
            text = between.sub(lambda match, new=new: match[1] + new + match[2], text)
    return text


class Tables:
    """The tables of one README.

    Args:
        root: The repository.
        folder: Folder of the README, from which links start.
        groups: The records of all ablations.
    """

    def __init__(self, root: Path, folder: Path, groups: Groups) -> None:
        self._root, self._folder, self._groups = root, folder, groups

    def _link(self, text: str, path: Path) -> str:
        return f"[{text}]({Path(os.path.relpath(path, self._folder)).as_posix()})"

    def image_runs(self) -> str:
        """Render the training runs of image classifiers."""
        headings = ["run", "hardware", "epochs", "loss, first → mean of the last 20"]
        headings += ["top-1 %", "top-5 %", "minutes"]
        keys = ("epochs", "accuracy/top1", "accuracy/top5")
        return _table(headings, [self._run(*run, *keys) for run in IMAGE_RUNS.items()])

    def language_runs(self) -> str:
        """Render the training runs of language models."""
        headings = ["run", "hardware", "steps", "loss, first → mean of the last 20"]
        headings += ["perplexity, held out", "answers right, %", "minutes"]
        keys = ("iterations", "perplexity", "answers/accuracy")
        return _table(headings, [self._run(*run, *keys) for run in LANGUAGE_RUNS.items()])

    def _run(self, name: str, what: str, length: str, *results: str) -> list[str]:
        path = self._root / RUNS / f"{name}.json"
        if not path.is_file():
            return [what, "not run"]
        run: Record = json.loads(path.read_text())
        # The record of a resumed run has the time of its last part only.
        minutes = "–" if run["resumed_at_iteration"] else f"{run['seconds'] / 60:.1f}"
        return [
            self._link(what, path),
            f"{run['hardware']}, {run['dtype']}",
            f"{run[length]:,}",
            f"{run['loss_first']:.2f} → {run['loss_last_20_mean']:.2f}",
            *(f"{run[key]:.2f}" if key in run else "–" for key in results),
            minutes,
        ]

    def _benchmarks(self, pattern: str) -> Iterator[tuple[Path, Record]]:
        for path in sorted((self._root / SPEED).glob(pattern)):
            yield path, json.loads(path.read_text())

    def image_speed(self) -> str:
        """Render the benchmarks of the base model against ViT-B/16, both compiled."""
        found = [
            each for each in self._benchmarks("*.json") if BENCHMARK.items() <= each[1].items()
        ]
        rows = [
            _speed(self._link(record["hardware"], path), group, "image")
            for path, record in found
            for group in _complete(record)
        ]
        if not any(record["device"] == "cuda" for _, record in found):
            rows += [[f"NVIDIA H200, {group}", "not run"] for group in GPU_GROUPS]
        return _table(_speed_headings("ViT-B/16", "ViT", "images", "MB an image"), rows)

    def language_speed(self) -> str:
        """Render the benchmarks of language models."""
        rows = []
        for path, record in self._benchmarks("speed_lm_*.json"):
            what = f"`{record['model']}`, {record['num_tokens']} tokens, {record['hardware']}"
            link = self._link(what, path)
            rows += [_speed(link, group, "token") for group in _complete(record)]
        headings = _speed_headings("Transformer", "Transformer", "tokens", "kB a token")
        return _table(headings, rows or [["not run"]])

    def growth(self, field: Field) -> str:
        """Render the sweeps of training cost of a field."""
        text = ""
        for (question, folder), records in self._groups.items():
            if isinstance(question, TrainingCost) and question.field is field:
                hardware = ", ".join(sorted({record["hardware"] for record in records}))
                name = f"`{Path(records[0]['config']).stem}`"
                link = self._link(name, self._root / ABLATIONS / folder)
                text = text or summary_head(question)
                text += f"| **{link}**, {hardware} | | | | |\n{question.summary(records)}"
        return text or _table(["training cost"], [["not run"]])


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table whose first heading is empty, unless it has a name; rows may be short."""
    lines = [f"| {' | '.join(headings)} |".replace("|  |", "| |"), "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(row)} |" + " |" * (len(headings) - len(row)) for row in rows]
    return "\n".join([*lines, ""])


def _speed_headings(theirs: str, short: str, things: str, unit: str) -> list[str]:
    return [
        "",
        f"{theirs}, {things}/s",
        f"TokenFormer, {things}/s",
        f"× {short} (p20–p80)",
        "× released formula, eager",
        f"kept for backward, {unit}",
        f"peak memory, × {short}",
        "MFU %",
    ]


def _complete(record: Record) -> Iterator[dict[str, Any]]:
    """List the groups of a benchmark that have all variants of a row."""
    for group in record["groups"]:
        if {row["variant"] for row in group["variants"]} >= set(_variants(group)):
            yield group


def _variants(group: dict[str, Any]) -> tuple[str, str, str]:
    """Name our variant, the baseline and the released formula."""
    return DECODING_VARIANTS if group["mode"] == "decode" else VARIANTS


def _speed(link: str, group: dict[str, Any], unit: str) -> list[str]:
    """Render one group of a benchmark that counts images or tokens."""
    rows = {row["variant"]: row for row in group["variants"]}
    name = f"{link}, {group['mode']}, {group['dtype']}, batch {group['batch_size']}"
    ours, theirs, released = (rows[name] for name in _variants(group))
    if failed := [row["variant"] for row in (ours, theirs, released) if "failed" in row]:
        return [name, f"{', '.join(failed)} failed"]
    seconds = zip(released["seconds"], ours["seconds"], strict=True)
    kept = peak = "–"
    saved = [row[f"saved_mb_per_{unit}"] for row in (ours, theirs)]
    if None not in saved:
        own, other = (each if unit == "image" else 1e3 * each for each in saved)
        kept = f"{own:.1f} / {other:.1f} = {own / other:.2f}"
    if ours["peak_mib"] is not None:
        peak = f"{ours['peak_mib'] / theirs['peak_mib']:.2f}"
    return [
        name,
        _rate(theirs[f"{unit}s_per_s"]),
        _rate(ours[f"{unit}s_per_s"]),
        f"**{ours['ratio_p50']:.2f}** ({ours['ratio_p20']:.2f}–{ours['ratio_p80']:.2f})",
        f"{median(other / own for other, own in seconds):.2f}",
        kept,
        peak,
        f"{100 * ours['mfu']:.0f}",
    ]


def _rate(per_second: float) -> str:
    """Format a speed with three digits, or as a whole number."""
    return f"{per_second:.3g}" if per_second < 1000 else f"{per_second:,.0f}"
