"""Tables of 8-bit products: their errors, what they cost in trainings, what they could save."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tokenformer_vit.records import read_record

from .image_models import IMAGES
from .rows import Record, best_lr, finished

RECORD = "tokenformer_vit/benchmarking/results/fp8.json"
TRAININGS = "ablations/results"
_NAMES = "bfloat16", "fp8"

Table = tuple[str, list[list[str]]]  # headings, rows


def read(root: Path) -> dict[str, Any]:
    """Read the record of ``tokenformer_vit.benchmarking.fp8``."""
    return read_record(root / RECORD)


def errors(root: Path) -> Table:
    """Lay out relative errors in percent, with a row for each way to compute."""
    entries = read(root)["errors"]
    ways, modules = (list(dict.fromkeys(e[key] for e in entries)) for key in ("computed", "of"))
    found = {(entry["computed"], entry["of"]): entry for entry in entries}
    parts = ("output", "x", "keys", "values")

    def cell(way: str, module: str) -> str:
        entry = found.get((way, module))
        return " / ".join(f"{100 * entry[part]:.2f}" for part in parts) if entry else ""

    rows = [[way, *(cell(way, module) for module in modules)] for way in ways]
    return f"error in %: output / x / keys / values | {' | '.join(modules)}", rows


def savings(root: Path) -> Table:
    """Lay out the counted times."""
    rows = []
    for entry in read(root)["savings"]:
        plain, ours, step = (entry[key] for key in ("bfloat16_ms", "fp8_ms", "step_ms"))
        saved = [f"{100 * (plain - ours) / whole:.0f}" for whole in (plain, step)]
        name = f"`{entry['model']}`"
        rows.append([name, f"{entry['width']:,}", f"{plain:.1f}", f"{ours:.1f}", *saved])
    headings = "model | width | Pattention in bfloat16, ms | in 8 bits, ms | saved, %"
    return f"{headings} | saved of a step, %", rows


def trainings(root: Path, link: Callable[[str, str], str]) -> Table:
    """Lay out the loss and the accuracy of trainings, seed by seed, each at its best rate."""
    rows = []
    for folder in sorted((root / TRAININGS).glob("fp8_*/")):
        done = finished(map(read_record, sorted(folder.glob("*.json"))))
        runs = {name: _by_seed([run for run in done if run["variant"] == name]) for name in _NAMES}
        seeds = sorted(runs["bfloat16"].keys() & runs["fp8"].keys())
        if not seeds:
            continue
        cells = []
        for measure, digits in ((_loss, 4), (_top1, 2)):
            pairs = [[measure(runs[name][seed]) for name in runs] for seed in seeds]
            steps = [new - old for old, new in pairs]
            cells += [f"{mean(values):.{digits}f}" for values in zip(*pairs, strict=True)]
            change = f"{mean(steps):+.{digits}f}".replace("-", "−")
            if len(steps) > 1:
                change += f" ± {stdev(steps) / len(steps) ** 0.5:.{digits}f}"
            cells.append(change)
        record = runs["fp8"][seeds[0]]
        name = link(f"`{Path(record['config']).stem}`", f"{TRAININGS}/{folder.name}")
        rows.append([f"{name}, {record['iterations']:,} steps, n = {len(seeds)}", *cells])
    headings = "loss, bfloat16 | 8 bits | Δ ± standard error | top-1 %, bfloat16 | 8 bits"
    return f"training | {headings} | Δ ± standard error", rows


def _by_seed(records: list[Record]) -> dict[int, Record]:
    best = best_lr(IMAGES.measure, records)
    return {record["seed"]: record for record in records if record["lr"] == best}


def _loss(record: Record) -> float:
    return record["loss_last_20_mean"]


def _top1(record: Record) -> float:
    return record["final"]["top1"]
