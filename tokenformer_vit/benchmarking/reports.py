"""The record of a benchmark, its figures, table and chart.

Like every record it has the command, commit, date, hardware and versions. Its own keys are::

    device, threads            cpu or cuda; threads of a CPU operation
    unit                       image or token, written as UNIT below
    model, baseline            timm names, "matched-vit"; a preset, "transformer[, rotary]"
    img_size                   for language num_tokens of a sequence, and config, of LMConfig
    depth, n                   null if each model has its own; number of rounds
    parameters                 {model, baseline}: number of parameters
    flops_per_UNIT             {model, baseline}: {mode: FLOPs}
    groups                     a list of
      mode, precision, dtype, batch_size
      items                    images or tokens in a step
      matmul_tflops            of a large matrix product, measured after the group
      variants                 a list of
        variant, implementation, compiled
        failed                 "out of memory"; then nothing below is there
        seconds, seconds_p20, _p50, _p80    of every round, and their percentiles
        UNITs_per_s            median speed
        ratio_p20, _p50, _p80  seconds of the compiled baseline (in decoding: of the eager baseline)
                               divided by the variant's in the same round; above 1 is faster
        saved_mb_per_UNIT      memory kept for the backward pass, 10^6 bytes; null if not training
        peak_mib               on a GPU: parameters, optimizer state and the rise during a step
        mfu                    counted FLOPs, divided by those of matmul_tflops in the same time
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokenformer_vit.records import environment

from .benchmark import Subject
from .measures import percentiles, short

_COLOURS = {"baseline": "0.6", "released": "C1", "reference": "C9"}


def new_record(subject: Subject, models: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Start a record; ``models`` describes the two models."""
    unit, sides = subject.unit, {"model": False, "baseline": True}
    costs = {name: subject.costs(baseline) for name, baseline in sides.items()}
    return {
        **environment(device),
        "device": device,
        "threads": torch.get_num_threads(),
        **models,
        "unit": unit,
        "parameters": {name: parameters for name, (parameters, _) in costs.items()},
        f"flops_per_{unit}": {name: flops for name, (_, flops) in costs.items()},
        "groups": [],
    }


def add_figures(group: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Add percentiles, speeds, ratios and MFU to the variants of a group."""
    unit, rows = record["unit"], {row["variant"]: row for row in group["variants"]}
    how = "eager" if group["mode"] == "decode" else "compiled"  # decoding is never compiled
    baseline = rows.get(f"baseline {how}", {}).get("seconds")
    for row in rows.values():
        if "failed" in row:
            continue
        row |= percentiles("seconds", row["seconds"])
        speed = group["items"] / row["seconds_p50"]
        row[f"{unit}s_per_s"] = short(speed)
        if baseline:
            both = zip(baseline, row["seconds"], strict=True)
            row |= percentiles("ratio", [theirs / own for theirs, own in both])
        side = "baseline" if row["implementation"] == "baseline" else "model"
        flops = record[f"flops_per_{unit}"][side][group["mode"]]
        row["mfu"] = short(flops * speed / group["matmul_tflops"] / 1e12)


def title(group: Mapping[str, Any]) -> str:
    """Return the title of a group."""
    return f"{group['mode']}, {group['dtype']}, batch {group['batch_size']}"


def table(group: Mapping[str, Any], unit: str) -> str:
    """Lay out a group of a record as text; ``unit`` is the unit of speed."""
    columns = {  # the key of a cell, its factor and its format
        f"{unit}s/s": (f"{unit}s_per_s", 1, "10.2f"),
        "ratio p20": ("ratio_p20", 1, "10.3f"),
        "p50": ("ratio_p50", 1, "10.3f"),
        "p80": ("ratio_p80", 1, "10.3f"),
        f"kB/{unit}": (f"saved_mb_per_{unit}", 1e3, "10.1f"),
        "peak MiB": ("peak_mib", 1, "10.0f"),
        "MFU %": ("mfu", 100, "10.1f"),
    }
    lines = [title(group), f"{'variant':20}" + "".join(f"{name:>10}" for name in columns)]
    for row in group["variants"]:
        cells = [
            f"{'–':>10}" if row.get(key) is None else f"{row[key] * factor:{form}}"
            for key, factor, form in columns.values()
        ]
        lines.append(f"{row['variant']:20}" + (row.get("failed") or "".join(cells)))
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the speed of all variants, and the memory kept in training, as a PNG file."""
    from matplotlib.figure import Figure  # only charts need it

    groups, unit = record["groups"], record["unit"]
    heights = [len(group["variants"]) + 2 for group in groups]
    figure = Figure(figsize=(11, 0.28 * sum(heights) + 0.6), layout="constrained")
    blocks = f" ({record['depth']} blocks)" if record["depth"] else ""
    figure.suptitle(f"{record['model']} and {record['baseline']}{blocks}, {record['hardware']}")
    grid = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights, sharey="row")
    for (speed, memory), group in zip(grid, groups, strict=True):
        rows = [row for row in group["variants"] if "failed" not in row]
        names = [row["variant"] for row in rows]
        low, middle, high = (
            [group["items"] / row[f"seconds_{point}"] for row in rows]
            for point in ("p80", "p50", "p20")
        )
        saved = [row[f"saved_mb_per_{unit}"] or 0 for row in rows]
        colours = [_COLOURS.get(row["implementation"], "C0") for row in rows]
        opacities = [1.0 if row["compiled"] else 0.5 for row in rows]
        for axis, lengths in ((speed, middle), (memory, saved)):
            axis.barh(names, lengths, color=[*zip(colours, opacities, strict=True)])
        speed.hlines(names, low, high, color="0.3")
        speed.invert_yaxis()
        speed.set(title=title(group))
        memory.set_visible(any(saved))
        memory.set(title=f"kept for backward, MB per {unit}")
    grid[-1, 0].set_xlabel(f"{unit}s/s: median, and 20th to 80th percentile")
    figure.savefig(path, dpi=120)
