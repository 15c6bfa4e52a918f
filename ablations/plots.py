"""Charts of a sweep: accuracy and curves of every variant, and what happened in its layers."""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from compute_tables import Scratch, power_of_ten
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from questions import Question, Variant
from rows import Record, at_best_lr, finished

from tokenformer_vit.files import write_whole

# Figure of the layers: title and scale of its axis.
FIGURES = {
    "key_grad_norm": ("gradient of keys", "log"),
    "value_grad_norm": ("gradient of values", "log"),
    "entropy": ("entropy of |Θ| / ln P", "linear"),
    "kurtosis": ("kurtosis of scores", "linear"),
    "tau": ("τ", "linear"),
}
# Colours of variants, in turn: whether they are there for comparison, and whether they grow.
COLOURS = {
    (False, False): ["#9ecae1", "#4292c6", "#08306b", "#6a51a3"],
    (False, True): ["#d7301f", "#fd8d3c", "#ce1256"],
    (True, False): ["#006d2c"],
    (True, True): ["#41ab5d", "#a1a118"],
}
# Part of a block: its line and name.
PARTS = {"attn": ("-", "attention, mean of q, k, v, o"), "mlp": ("--", "feed-forward")}


def draw_results(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw top-1 with its deviation, training loss and validation top-1 into a PNG file.

    Curves are the mean over seeds, with a band of one standard deviation; the loss of a run that
    failed is dotted up to its end. Every variant is shown at its best learning rate.
    """
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    top1, loss, validation = figure.subplots(1, 3)
    for index, (variant, own) in enumerate(at_best_lr(question, records).items()):
        style = {"color": f"C{index}", "label": _label(variant, own, records)}
        values = [record["final"]["top1"] for record in finished(own)]
        if values:
            deviation = stdev(values) if len(values) > 1 else None
            top1.errorbar(index, mean(values), deviation, fmt="o", capsize=4, **style)
            top1.plot([index] * len(values), values, "_", color="0.4")
            _band(loss, finished(own), "loss", "iteration", "loss", style)
            _band(validation, finished(own), "validation", "epoch", "top1", style)
        for record in own:
            points = record["loss"]["iteration"]
            if "failed" in record and points:
                loss.plot(points, _known(record["loss"]["loss"]), ":", color=f"C{index}")
                loss.plot(points[-1], _known(record["loss"]["loss"])[-1], "x", color=f"C{index}")
    labels = [variant.label for variant in question.variants]
    top1.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    top1.set(title="top-1 (%), mean ± standard deviation", xlim=(-0.5, len(labels) - 0.5))
    loss.set(title="training loss", xlabel="iteration")
    validation.set(title="validation top-1 (%)", xlabel="epoch")
    if loss.get_legend_handles_labels()[0]:
        loss.legend(fontsize="small")
    _save(figure, path)


def draw_costs(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw top-1 over training FLOPs, in the course of training and at its end, into a PNG file.

    Curves are the mean over seeds, with a band of one standard deviation; a triangle is where a
    model grew. Every variant is shown at its best learning rate. In the end, points of the same
    FLOPs are set side by side.
    """
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    rows = at_best_lr(question, records)
    done = {variant: finished(own) for variant, own in rows.items() if finished(own)}
    colours = {kind: iter(itertools.cycle(each)) for kind, each in COLOURS.items()}
    handles = []
    for variant, own in done.items():
        line, marker = ("--", "s") if variant.reference else ("-", "o")
        style = {
            "color": next(colours[variant.reference, variant.grown]),
            "label": _label(variant, own, records),
        }
        _band(curves, own, "validation", "flops", "top1", {**style, "linestyle": line})
        if variant.grown:
            curves.plot(*_growths(own), "^", color=style["color"], markeredgecolor="0.2", zorder=4)
        flops, values = own[0]["flops"], [record["final"]["top1"] for record in own]
        error = {"fmt": marker, "capsize": 4, "zorder": 5, **style}
        if len(values) > 1:
            error["yerr"] = stdev(values)
        curves.errorbar(flops, mean(values), **error)
        aside = flops * _aside(variant, done)
        ends.errorbar(aside, mean(values), **error)
        ends.plot([aside] * len(values), values, "_", color="0.4")
        handles.append(Line2D([], [], linestyle=line, marker=marker, **style))
    if any(variant.grown for variant in done):
        style = {"color": "w", "markeredgecolor": "0.2", "label": "growth"}
        handles.append(Line2D([], [], linestyle="", marker="^", **style))
    scratch = Scratch(question, rows, reference=False)
    if scratch.seeds():
        flops, top1 = zip(*scratch.envelope(scratch.seeds()), strict=True)
        style = {"color": "0.5", "linestyle": ":", "label": "envelope of TokenFormers from scratch"}
        ends.plot(flops, top1, zorder=1, **style)
        handles.append(Line2D([], [], **style))
    curves.set(title="validation top-1 (%) in the course of training")
    ends.set(title="final top-1 (%), mean ± standard deviation", xscale="log")
    _name_flops((curves, ends), max((own[0]["flops"] for own in done.values()), default=1))
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    _save(figure, path)


def draw_tuning(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw final top-1 over the number of trained parameters into a PNG file.

    What starts from the same weights is joined by a line; what starts from none stands apart. Every
    variant is shown at its best learning rate.
    """
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    starts: dict[str | None, list[tuple[float, float]]] = {}
    for variant, own in at_best_lr(question, records).items():
        if not (done := finished(own)):
            continue
        # Set aside where it would lie on another.
        count = done[0]["trainable"] * (1.06 if variant.reference else 1)
        values = [record["final"]["top1"] for record in done]
        start = done[0]["start"] and done[0]["start"]["sha256"]
        starts.setdefault(start, []).append((count, mean(values)))
        style = {"fmt": "s" if variant.reference else "o", "capsize": 4, "zorder": 3}
        if len(values) > 1:
            style["yerr"] = stdev(values)
        axes.errorbar(count, mean(values), label=_label(variant, own, records), **style)
        axes.plot([count] * len(values), values, "_", color="0.4")
    for start, points in starts.items():
        if start is not None:
            axes.plot(*zip(*sorted(points), strict=True), color="0.7", zorder=1)
    axes.set(
        title="final top-1 (%), mean ± standard deviation",
        xlabel="trained parameters",
        xscale="log",
    )
    figure.legend(loc="outside right upper", fontsize="small")
    _save(figure, path)


def _aside(variant: Variant, done: Mapping[Variant, Sequence[Record]]) -> float:
    """Return a factor near 1 that sets points of the same FLOPs apart on a logarithmic axis."""
    flops = done[variant][0]["flops"]
    same = [
        other
        for other, own in done.items()
        if other.reference == variant.reference
        and math.isclose(own[0]["flops"], flops, rel_tol=0.03)
    ]
    return 1.015 ** (same.index(variant) - (len(same) - 1) / 2)


def _growths(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return the FLOPs before each growth, and the mean top-1 by then."""
    epochs, flops = ([0, *records[0]["validation"][key]] for key in ("epoch", "flops"))
    top1 = [
        mean(values) for values in zip(*(r["validation"]["top1"] for r in records), strict=True)
    ]
    per_epoch = records[0]["iterations"] / records[0]["epochs"]
    times = [growth["iteration"] / per_epoch for growth in records[0]["growth"]]
    return list(np.interp(times, epochs, flops)), list(np.interp(times, epochs[1:], top1))


def _name_flops(panels: Iterable[Axes], largest: float) -> None:
    """Count FLOPs in a round unit, on a logarithmic axis, too."""
    exponent = math.floor(math.log10(largest))
    unit = 10**exponent
    for axes in panels:
        if axes.get_xscale() == "log":
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}"))
        axes.set_xlabel(f"training FLOPs / {power_of_ten(exponent)}")


def _label(variant: Variant, own: Sequence[Record], records: Sequence[Record]) -> str:
    swept = len({record["lr"] for record in records}) > 1
    return f"{variant.label}, lr {own[0]['lr']:g}" if swept and own else variant.label


def _known(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _band(
    axes: Axes, records: Sequence[Record], curve: str, along: str, what: str, style: dict[str, Any]
) -> None:
    """Draw the mean of a curve over runs, and its deviation where there are several."""
    curves = [
        dict(zip(record[curve][along], _known(record[curve][what]), strict=True))
        for record in records
    ]
    points = sorted(set(curves[0]).intersection(*curves[1:]))
    means = [mean(curve[point] for curve in curves) for point in points]
    axes.plot(points, means, **style)
    if len(curves) > 1:
        spread = [stdev(curve[point] for curve in curves) for point in points]
        low = [value - width for value, width in zip(means, spread, strict=True)]
        high = [value + width for value, width in zip(means, spread, strict=True)]
        axes.fill_between(points, low, high, color=style["color"], alpha=0.2, linewidth=0)


def draw_diagnostics(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw the figures of every block over the epochs into a PNG file.

    A row for each figure, a column for each variant; the colour of a line is the depth of its
    block. Means over seeds, and in attention over q, k, v and o.
    """
    rows = {}
    for variant, own in at_best_lr(question, records).items():
        # Those of a failed run are drawn only where there are no others.
        own = finished(own) or own
        measured = [record["diagnostics"] for record in own if "diagnostics" in record]
        if measured:
            rows[variant] = _mean_diagnostics(measured)
    names = [name for name in FIGURES if any(name in lines for lines in rows.values())]
    figure = Figure(figsize=(1.2 + 3 * len(rows), 1 + 2.1 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(rows), squeeze=False, sharex=True, sharey="row")
    depth = 1 + max(
        block for lines in rows.values() for keys in lines.values() for block, _ in keys
    )
    for column, (variant, lines) in enumerate(rows.items()):
        panels[0, column].set_title(variant.label)
        panels[-1, column].set_xlabel("epoch")
        for row, name in enumerate(names):
            axes = panels[row, column]
            scale = _scale(name, rows.values())
            # Behind a head of zeros nothing has a gradient at the start.
            axes.set_yscale(scale, **({"nonpositive": "mask"} if scale == "log" else {}))
            if column == 0:
                axes.set_ylabel(FIGURES[name][0])
            for (block, part), values in lines.get(name, {}).items():
                colour = _colour(block, depth)
                line, _ = PARTS[part]
                axes.plot(list(values), list(values.values()), line, color=colour, linewidth=1)
    handles = [
        Line2D([], [], color="0.3", linestyle=line, label=text) for line, text in PARTS.values()
    ]
    for block, text in ((0, "first block"), (depth - 1, "last block")):
        handles.append(Line2D([], [], color=_colour(block, depth), label=text))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    _save(figure, path)


def _mean_diagnostics(
    measured: Sequence[dict[str, Any]],
) -> dict[str, dict[tuple[int, str], dict[int, float]]]:
    """Average over runs and over the layers of a part: by figure, block and part, and epoch."""
    seen: dict[str, dict[tuple[int, str], dict[int, list[float]]]] = {}
    for one in measured:
        for name in FIGURES.keys() & one.keys():
            for epoch, values in zip(one["epoch"], one[name], strict=True):
                for layer, value in zip(one["layers"], values, strict=True):
                    if value is None:
                        continue
                    _, block, part, *_ = layer.split(".")
                    line = seen.setdefault(name, {}).setdefault((int(block), part), {})
                    line.setdefault(epoch, []).append(value)
    return {
        name: {
            key: {epoch: mean(values) for epoch, values in sorted(line.items())}
            for key, line in lines.items()
        }
        for name, lines in seen.items()
    }


def _scale(name: str, variants: Iterable[dict[str, dict[Any, dict[int, float]]]]) -> str:
    """Choose the scale of a figure; a kurtosis can be small, of either sign, or huge."""
    values = [
        abs(value)
        for figures in variants
        for line in figures.get(name, {}).values()
        for value in line.values()
    ]
    return "symlog" if name == "kurtosis" and max(values) > 20 else FIGURES[name][1]


def _colour(block: int, depth: int) -> Any:
    return colormaps["viridis"](0.9 * block / max(depth - 1, 1))


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format="png", metadata={"Software": None})
    write_whole(path, picture.getvalue())
