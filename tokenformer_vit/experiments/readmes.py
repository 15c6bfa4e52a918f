"""The tables of READMEs: what was trained, how fast it is, and what growth costs.

A README has a table between two markers, ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

import csv
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from tokenformer_vit.benchmarking.benchmark import MATCHED
from tokenformer_vit.records import read_json

from .fields import Field
from .image_models import IMAGES
from .language_models import LANGUAGE
from .results import Groups
from .rows import head
from .training_cost import TrainingCost

_PAGES = (
    "README.md",
    "ablations/README.md",
    "configs/README.md",
    "configs/MANY_MACHINES.md",
    *(
        f"tokenformer_vit/{name}/README.md"
        for name in ("benchmarking", "growth", "language", "ops")
    ),
)
RUNS = "configs/results"
SPEED = "tokenformer_vit/benchmarking/results"

# Name of the record of each training run, and a description of the run.
_IMAGE_RUNS = {
    "digits_demo": "`make demo`: 8 px digits, 0.6 M parameters",
    "cifar10_micro_pretrained": "`cifar10_micro_pretrained`: 32 px, 0.6 M parameters",
    "cifar10_tiny_5000": "`cifar10_tiny` on a 5,000-image slice",
    "cifar10_tiny_full": "`cifar10_tiny`, all 50,000 images, GPU",
    "imagenet_base_20_iterations": "`imagenet_base`, 20 iterations at batch 4, random images",
    "imagenet_base": "`imagenet_base`, the full recipe",
}
_LANGUAGE_RUNS = {
    "lm_reversal": "`lm_reversal`: 16 digits backwards, 0.15 M parameters",
    "lm_shakespeare": "`lm_shakespeare`: tiny Shakespeare by bytes, 0.6 M parameters",
    "lm_pile_150m": "`lm_pile_150m`, the full recipe",
}

# The image benchmarks that are rendered, and their variants.
_BASE = {
    "model": "tokenformer_base_matched",
    "baseline": "vit_base_patch16_224",
    "img_size": 224,
    "depth": None,
}
_SMALL = {
    "model": "tokenformer_cifar10_micro",
    "baseline": MATCHED,
    "img_size": 32,
    "depth": None,
}
_OURS = ("auto", "fused")  # the records of `fused` are of an earlier implementation
# Groups that every GPU should have.
_GPU_GROUPS = [
    f"{mode}, bfloat16 autocast, batch {batch}"
    for mode in ("train", "infer")
    for batch in (128, 256)
]
ANY_GPU = "an NVIDIA GPU"  # until one is measured

_BOTH, _CONVERTED, _CUTS = ["vit", "converted"], ["converted"], ["σ", "usage"]
_TIME = "converted_over_vit"
# Rows of the table of converted ViTs: what, the part, dtype, name and variants of values, a format.
_FROM_VIT = [
    ("top-1 %, float32: ViT / converted", "accuracy", "float32", "accuracy", _BOTH, ".2f"),
    ("top-1 %, bfloat16", "accuracy", "bfloat16", "accuracy", _BOTH, ".2f"),
    ("same class as the ViT, float32, %", "accuracy", "float32", "same_class", _CONVERTED, ".2f"),
    ("error of logits, float32", "accuracy", "float32", "relative_error", _CONVERTED, ".1e"),
    ("error of logits, bfloat16", "accuracy", "bfloat16", "relative_error", _BOTH, ".4f"),
    ("top-1 %, 96 of 192 pairs: by σ / by usage", "pairs", "float32", "96/192", _CUTS, ".2f"),
    ("top-1 %, 48 of 192 pairs", "pairs", "float32", "48/192", _CUTS, ".2f"),
    ("top-1 %, 24 of 192 pairs", "pairs", "float32", "24/192", _CUTS, ".2f"),
    ("top-1 %, 12 of 192 pairs", "pairs", "float32", "12/192", _CUTS, ".2f"),
    ("top-1 %, 200 more steps, rate 3e-4", "tune", "bfloat16", "lr 0.0003", _BOTH, ".2f"),
    ("top-1 %, 200 more steps, rate 1e-3", "tune", "bfloat16", "lr 0.001", _BOTH, ".2f"),
    ("parameters", "size", "float32", "parameters", _BOTH, ",.0f"),
    ("FLOPs of an image", "size", "float32", "flops", _BOTH, ",.0f"),
    ("time, × ViT, eager, float32", "size", "float32", _TIME, ["time, eager"], ".2f"),
    ("time, × ViT, eager, bfloat16", "size", "bfloat16", _TIME, ["time, eager"], ".2f"),
    ("time, × ViT, compiled, float32", "size", "float32", _TIME, ["time, compiled"], ".2f"),
    ("time, × ViT, compiled, bfloat16", "size", "bfloat16", _TIME, ["time, compiled"], ".2f"),
]

Link = Callable[[str, str], str]  # of a text and a path, as Markdown


def render(root: Path, groups: Groups) -> dict[Path, str]:
    """Return the texts of all READMEs of a repository with their tables."""
    paths = [root / page for page in _PAGES]
    return {path: _filled(path, root, groups) for path in paths if path.is_file()}


def _filled(path: Path, root: Path, groups: Groups) -> str:
    """Replace the tables between the markers of a README."""

    def link(text: str, target: str) -> str:
        return f"[{text}]({Path(os.path.relpath(root / target, path.parent)).as_posix()})"

    tables = {
        "runs": lambda: _runs(_IMAGE_RUNS, root, link),
        "language-runs": lambda: _runs(_LANGUAGE_RUNS, root, link),
        "speed": lambda: _image_speed(root, link),
        "language-speed": lambda: _language_speed(root, link),
        "growth": lambda: _growth(IMAGES, groups, link),
        "language-growth": lambda: _growth(LANGUAGE, groups, link),
        "from-vit": lambda: converted_vits(root / "ablations/from_vit.csv"),
    }
    return re.sub(
        r"(<!-- ([\w-]+) -->\n).*?(<!-- /\2 -->)",
        lambda match: match[1] + tables[match[2]]() + match[3],
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


def _runs(names: dict[str, str], root: Path, link: Link) -> str:
    """Render training runs."""
    if names is _IMAGE_RUNS:
        results = {"top-1 %": "accuracy/top1", "top-5 %": "accuracy/top5"}
        steps, length = "epochs", "epochs"
    else:
        results = {"perplexity, held out": "perplexity", "answers right, %": "answers/accuracy"}
        steps, length = "steps", "iterations"
    headings = f"run | hardware | {steps} | loss, first → mean of the last 20"
    rows = [_run(root, link, *run, length, *results.values()) for run in names.items()]
    return _table(f"{headings} | {' | '.join(results)} | minutes", rows)


def _run(root: Path, link: Link, name: str, what: str, length: str, *results: str) -> list[str]:
    """Render a training run."""
    path = root / RUNS / f"{name}.json"
    if not path.is_file():
        return [what, "not run"]
    run = read_json(path)
    return [
        link(what, f"{RUNS}/{name}.json"),
        f"{run['hardware']}, {run['dtype']}",
        f"{run[length]:,}",
        f"{run['loss_first']:.2f} → {run['loss_last_20_mean']:.2f}",
        *(f"{run[key]:.2f}" if key in run else "–" for key in results),
        # The record of a resumed run has the time of its last part only.
        "–" if run["resumed_at_iteration"] else f"{run['seconds'] / 60:.1f}",
    ]


def _image_speed(root: Path, link: Link) -> str:
    """Render the benchmarks of the base model and of a small one, each compiled as its ViT is."""
    rows: list[list[str]] = []
    gpus: dict[str, set[str]] = {}  # the groups that each of them has
    small = []
    for path in sorted((root / SPEED).glob("speed_*.json")):
        record = read_json(path)
        name = link(record["hardware"], f"{SPEED}/{path.name}")
        name += f", products by {record['products']}" if "products" in record else ""
        if _BASE.items() <= record.items():
            own = _speed_rows(name, record, "image")
            if record["device"] == "cuda":
                groups = {row[0].removeprefix(f"{name}, ") for row in own}
                gpus.setdefault(record["hardware"], set()).update(groups)
            rows += own
        elif _SMALL.items() <= record.items():
            small += _speed_rows(f"`{record['model']}`, {name}", record, "image")
    for name, groups in (gpus or {ANY_GPU: set()}).items():
        rows += [[f"{name}, {each}", "not run"] for each in _GPU_GROUPS if each not in groups]
    return _table(_speed_headings("ViT", "ViT", "images", "MB an image"), rows + small)


def _language_speed(root: Path, link: Link) -> str:
    """Render the benchmarks of language models."""
    rows = []
    for path in sorted((root / SPEED).glob("speed_lm_*.json")):
        record = read_json(path)
        what = f"`{record['model']}`, {record['num_tokens']} tokens, {record['hardware']}"
        if record["baseline"] != "transformer":
            what += f", to a {record['baseline']}"
        rows += _speed_rows(link(what, f"{SPEED}/{path.name}"), record, "token")
    headings = _speed_headings("Transformer", "Transformer", "tokens", "kB a token")
    return _table(headings, rows or [["not run"]])


def _speed_headings(theirs: str, short: str, things: str, unit: str) -> str:
    return (
        f"| {theirs}, {things}/s | TokenFormer, {things}/s | × {short} (p20–p80) "
        f"| × released formula, eager | kept for backward, {unit} | peak memory, × {short} | MFU %"
    )


def _speed_rows(link: str, record: dict[str, Any], unit: str) -> list[list[str]]:
    """Render the groups of a benchmark that have all variants of a row and equal libraries."""
    rows = []
    for group in record["groups"]:
        variants = {row["variant"]: row for row in group["variants"]}
        how = "eager" if group["mode"] == "decode" else "compiled"  # decoding is not compiled
        ours = [f"{name} {how}" for name in _OURS if f"{name} {how}" in variants]
        names = [*ours[:1], f"baseline {how}", "released eager"]
        if ours and variants.keys() >= set(names) and _equal_libraries(record, group, ours[0]):
            name = f"{link}, {group['mode']}, {group['dtype']}, batch {group['batch_size']}"
            rows.append([name, *_speed([variants[name] for name in names], unit)])
    return rows


def _equal_libraries(record: dict[str, Any], group: dict[str, Any], ours: str) -> bool:
    """Tell whether our products and attention used the library of the baseline.

    The records with ``fused`` are of an AMD processor. There, oneDNN is the faster library in
    float32, and ours alone used it; in bfloat16 both did. Attention of images, which are at most
    200 tokens, had faster gradients in ours.
    """
    if record["device"] == "cuda" or not ours.startswith("fused"):
        return True
    if group["precision"] == "float32":
        return record.get("products") == "MKL"
    return group["mode"] != "train" or "img_size" not in record


def _speed(variants: Sequence[dict[str, Any]], unit: str) -> list[str]:
    """Compare our variant, the baseline and the released formula, in images or tokens."""
    ours, theirs, released = variants
    if failed := [row["variant"] for row in variants if "failed" in row]:
        return [f"{', '.join(failed)} failed"]
    seconds = zip(released["seconds"], ours["seconds"], strict=True)
    kept = peak = "–"
    saved = [row[f"saved_mb_per_{unit}"] for row in (ours, theirs)]
    if None not in saved:
        own, other = (each if unit == "image" else 1e3 * each for each in saved)
        kept = f"{own:.1f} / {other:.1f} = {own / other:.2f}"
    if ours["peak_mib"] is not None:
        peak = f"{ours['peak_mib'] / theirs['peak_mib']:.2f}"
    speeds = [row[f"{unit}s_per_s"] for row in (theirs, ours)]
    return [
        *(f"{speed:.3g}" if speed < 1000 else f"{speed:,.0f}" for speed in speeds),
        f"{ours['ratio_p50']:.2f} ({ours['ratio_p20']:.2f}–{ours['ratio_p80']:.2f})",
        f"{median(other / own for other, own in seconds):.2f}",
        kept,
        peak,
        f"{100 * ours['mfu']:.0f}",
    ]


def _growth(field: Field, groups: Groups, link: Link) -> str:
    """Render the sweeps of training cost of a field."""
    text = ""
    for (question, folder), records in groups.items():
        if isinstance(question, TrainingCost) and question.field is field:
            hardware = ", ".join(sorted({record["hardware"] for record in records}))
            name = f"`{Path(records[0]['config']).stem}`"
            text = text or head(question.summary_columns())
            text += f"| **{link(name, f'ablations/results/{folder}')}**, {hardware} | | | | |\n"
            text += question.summary(records)
    return text or _table("", [["not run"]])


def converted_vits(path: Path) -> str:
    """Render what trained ViTs keep when they are converted."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    values: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        name = row["name"].partition(" data ")[0]
        key = row["part"], row["dtype"], name, row["variant"], row["model"]
        values[key][row["seed"]].append(float(row["value"]))

    def cell(*key: str, form: str) -> str:
        seeds = [mean(each) for each in values[key].values()]
        if not seeds:
            return "–"
        spread = f" ± {stdev(seeds):{form}}" if len({*seeds}) > 1 else ""
        return f"{mean(seeds):{form}}{spread}"

    models = list(dict.fromkeys(row["model"] for row in rows))
    table = []
    for what, part, dtype, name, variants, form in _FROM_VIT:
        keys = [[(part, dtype, name, variant, model) for variant in variants] for model in models]
        table.append([what, *(" / ".join(cell(*key, form=form) for key in own) for own in keys)])
    return _table(" | ".join(["", *models]), table)


def _table(headings: str, rows: Sequence[Sequence[str]]) -> str:
    """Render a table. Short rows are filled up with empty cells."""
    columns = headings.count("|") + 1
    lines = [f"| {headings} |", "|" + "---|" * columns]
    lines += [f"| {' | '.join(row)} |" + " |" * (columns - len(row)) for row in rows]
    return "\n".join([*lines, ""])
