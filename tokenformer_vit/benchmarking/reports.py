"""Figures, tables and charts of a benchmark's record; its keys are described in records.py."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenformer_vit.files import write_figure

from .measures import percentiles
from .variants import PRECISIONS, short

_TOKEN_BYTES = 8
_LABELS = {
    "baseline": "baseline",
    "released": "authors' formula",
    "reference": "ours, reference",
    "auto": "ours",
}
# Number format of the memory kept: a token keeps far less than an image.
_SAVED = {"image": "16.1f", "token": "16.4f"}
_COLOURS = {
    "baseline": "0.6",
    "released": "C1",
    "reference": "C9",
}


def _label(row: Mapping[str, Any]) -> str:
    name = row["implementation"]
    return _LABELS.get(name, f"ours, {name}")


def _colour(row: Mapping[str, Any]) -> str:
    return _COLOURS.get(row["implementation"], "C0")


def figures(group: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the figures of a group.

    Args:
        group: Entry of the group, with the seconds and the memory of its variants.
        record: Record with the counts and the ceilings.

    Returns:
        The entry with all its keys.
    """
    items, unit, rate = group["items"], record["unit"], record["ceilings"][group["precision"]]
    matmul, copy = rate["matmul_tflops"] * 1e12, rate["copy_gb_per_s"] * 1e9
    flops = {
        name: counts[group["mode"]] * items for name, counts in record[f"flops_per_{unit}"].items()
    }

    rows = group["variants"]
    saved = [
        row[f"saved_mb_per_{unit}"] * 1e6 * items
        for row in rows
        if row["implementation"] not in ("baseline", "released") and row.get(f"saved_mb_per_{unit}")
    ]
    item = PRECISIONS[group["precision"]].weights.itemsize
    parameters = record["parameters"]["model"] * item
    inputs = math.prod(group["input_shape"]) * (item if unit == "image" else _TOKEN_BYTES)
    least = inputs + parameters
    if group["mode"] == "train":
        least = inputs + 10 * parameters + 2 * min(saved, default=0)
    elif group["mode"] == "decode":  # token by token
        least = inputs + items // group["batch_size"] * parameters
    bound = {"matmul": flops["model"] / matmul, "copy": least / copy}
    by = max(bound, key=lambda name: bound[name])

    # Decoding is never compiled.
    against = "baseline eager" if group["mode"] == "decode" else "baseline compiled"
    baseline = next((row for row in rows if row["variant"] == against), {})
    return {
        **{key: value for key, value in group.items() if key != "variants"},
        "minimal_bytes": round(least),
        f"bound_{unit}s_per_s": short(items / bound[by]),
        "bound_by": by,
        "variants": [
            _row_figures(
                row,
                baseline.get("seconds"),
                {f"{unit}s_per_s": items},
                flops["baseline" if row["implementation"] == "baseline" else "model"] / matmul,
            )
            for row in rows
        ],
    }


def _row_figures(
    row: Mapping[str, Any],
    baseline: Sequence[float] | None,
    per_step: Mapping[str, int],
    ideal: float,
) -> dict[str, Any]:
    """Compute the figures of a variant.

    Args:
        row: Entry of the variant.
        baseline: Seconds of the baseline in every round, if it was measured.
        per_step: Names of speeds, and the number of units in a step for each.
        ideal: Seconds of a step at the matmul ceiling.
    """
    if "failed" in row:
        return dict(row)
    seconds = row["seconds"]
    figures = named_percentiles("seconds", seconds)
    figures |= {name: short(each / figures["seconds_p50"]) for name, each in per_step.items()}
    if baseline:
        ratios = [theirs / own for theirs, own in zip(baseline, seconds, strict=True)]
        figures |= named_percentiles("ratio", ratios)
    figures["mfu"] = short(ideal / figures["seconds_p50"])
    return {**row, **figures}


def named_percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return ``NAME_p20``, ``NAME_p50`` and ``NAME_p80`` of values."""
    return {
        f"{name}_{point}": short(value)
        for point, value in zip(("p20", "p50", "p80"), percentiles(values), strict=True)
    }


def title(group: Mapping[str, Any]) -> str:
    """Return the title of a group."""
    return f"{group['mode']}, {group['dtype']}, batch {group['batch_size']}"


def table(group: Mapping[str, Any], unit: str) -> str:
    """Lay out a group of a record as text; ``unit`` is the unit of speed."""
    lines = [
        f"{title(group)}: at most {group[f'bound_{unit}s_per_s']:.1f} {unit}s/s "
        f"(by the {group['bound_by']} ceiling)",
        f"{'variant':20}{f'{unit}s/s':>10}{'ratio p20':>12}{'p50':>8}{'p80':>8}"
        f"{f'saved MB/{unit}':>16}{'peak MiB':>10}{'MFU %':>7}",
    ]
    for row in group["variants"]:
        if "failed" in row:
            lines.append(f"{row['variant']:20}  {row['failed']}")
            continue
        lines.append(
            f"{row['variant']:20}{row[f'{unit}s_per_s']:10.2f}"
            f"{_cell(row.get('ratio_p20'), '12.3f')}"
            f"{_cell(row.get('ratio_p50'), '8.3f')}{_cell(row.get('ratio_p80'), '8.3f')}"
            f"{_cell(row[f'saved_mb_per_{unit}'], _SAVED[unit])}{_cell(row['peak_mib'], '10.0f')}"
            f"{100 * row['mfu']:7.1f}"
        )
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    width = form.partition(".")[0]
    return format("–", f">{width}") if value is None else format(value, form)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the images or tokens per second of every variant as bars.

    Args:
        record: Record of a benchmark.
        path: PNG file to write.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    from matplotlib.figure import Figure  # only charts need it

    groups, speed = record["groups"], f"{record['unit']}s/s"
    heights = [len(group["variants"]) + 2 for group in groups]
    figure = Figure(figsize=(9, 0.28 * sum(heights) + 0.6), layout="constrained")
    blocks = f" ({record['depth']} blocks)" if record["depth"] else ""
    figure.suptitle(f"{record['model']} and {record['baseline']}{blocks}, {record['hardware']}")
    axes = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    for axis, group in zip(axes, groups, strict=True):
        rows = [row for row in group["variants"] if "failed" not in row]
        names = [row["variant"] for row in rows]
        low, middle, high = (
            [group["items"] / row[f"seconds_{point}"] for row in rows]
            for point in ("p80", "p50", "p20")
        )
        bars = axis.barh(names, middle, color=[_colour(row) for row in rows])
        axis.hlines(names, low, high, color="0.3")
        for bar, row in zip(bars, rows, strict=True):
            bar.set_alpha(1.0 if row["compiled"] else 0.5)
        bound = group[f"bound_{record['unit']}s_per_s"]
        axis.axvline(bound, color="k", linestyle="--")
        axis.invert_yaxis()
        axis.set(title=f"{title(group)}; dashed: the bound, {bound:.4g} ({group['bound_by']})")
    axes[-1].set_xlabel(f"{speed}: median, and 20th to 80th percentile")
    write_figure(path, figure, dpi=120)


def draw_summary(record: Mapping[str, Any], path: Path) -> bool:
    """Draw two bars for each compiled variant of the first training group: memory and speed.

    Args:
        record: Record of a benchmark.
        path: PNG file to write.

    Returns:
        False if the record has no training group with compiled variants; then nothing is drawn.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    from matplotlib.figure import Figure  # only charts need it

    unit = record["unit"]
    for group in record["groups"]:
        rows = [row for row in group["variants"] if row["compiled"] and "failed" not in row]
        if group["mode"] == "train" and rows:
            break
    else:
        return False
    names = [_label(row) for row in rows]
    names[0] = record["baseline"] if rows[0]["implementation"] == "baseline" else names[0]
    colours = [_colour(row) for row in rows]
    figure = Figure(figsize=(9, 0.4 * len(rows) + 1.4), layout="constrained")
    figure.suptitle(f"{record['model']}, {title(group)}, compiled, {record['hardware']}")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, words in (
        (axes[0], f"saved_mb_per_{unit}", f"kept for backward, MB per {unit}: less is better"),
        (axes[1], f"{unit}s_per_s", f"training, {unit}s per second: more is better"),
    ):
        bars = axis.barh(names, [row[key] for row in rows], color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.margins(x=0.15)
        axis.set_xlabel(words)
    axes[0].invert_yaxis()
    write_figure(path, figure, dpi=120)
    return True
