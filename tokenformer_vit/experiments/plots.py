"""Charts of a sweep: results and curves of every variant, and what happened in its layers."""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from tokenformer_vit.files import write_whole

from .compute_tables import Scratch, power_of_ten
from .fields import Field, Measure
from .questions import Question, Variant
from .rows import Record, at_best_lr, finished

# Colours of variants, in turn: whether they are there for comparison, and whether they grow.
COLOURS = {
    (False, False): ["#9ecae1", "#4292c6", "#08306b", "#6a51a3", "#737373", "#c7a252"],
    (False, True): ["#d7301f", "#fd8d3c", "#ce1256"],
    (True, False): ["#006d2c"],
    (True, True): ["#41ab5d", "#a1a118"],
}


def draw_results(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw the results with their deviation, training loss and validation into a PNG file.

    Curves are the mean over seeds, with a band of one standard deviation; the loss of a run that
    failed is dotted up to its end. Every variant is shown at its best learning rate.
    """
    field, measure = question.field, question.field.measure
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    result, loss, validation = figure.subplots(1, 3)
    for index, (variant, own) in enumerate(at_best_lr(question, records).items()):
        style = {"color": f"C{index}", "label": label(variant, own, records)}
        values = [record["final"][measure.name] for record in finished(own)]
        if values:
            deviation = stdev(values) if len(values) > 1 else None
            result.errorbar(index, mean(values), deviation, fmt="o", capsize=4, **style)
            result.plot([index] * len(values), values, "_", color="0.4")
            band(loss, finished(own), "loss", "iteration", "loss", style)
            band(validation, finished(own), "validation", field.unit, measure.name, style)
        for record in own:
            points = record["loss"]["iteration"]
            if "failed" in record and points:
                loss.plot(points, _known(record["loss"]["loss"]), ":", color=f"C{index}")
                loss.plot(points[-1], _known(record["loss"]["loss"])[-1], "x", color=f"C{index}")
    labels = [variant.label for variant in question.variants]
    result.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    result.set(title=f"{measure.axis}, mean ± standard deviation", xlim=(-0.5, len(labels) - 0.5))
    loss.set(title="training loss", xlabel="iteration")
    validation.set(title=f"validation {measure.axis}", xlabel=field.unit)
    scale(validation, measure)
    if loss.get_legend_handles_labels()[0]:
        loss.legend(fontsize="small")
    save(figure, path)


def draw_costs(question: Question, records: Sequence[Record], path: Path) -> None:
    """Draw results over training FLOPs, in the course of training and at its end, into a PNG file.

    Curves are the mean over seeds, with a band of one standard deviation; a triangle is where a
    model grew. Every variant is shown at its best learning rate. In the end, points of the same
    FLOPs are set side by side.
    """
    measure = question.field.measure
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
            "label": label(variant, own, records),
        }
        band(curves, own, "validation", "flops", measure.name, {**style, "linestyle": line})
        if variant.grown:
            curves.plot(
                *_growths(question.field, own),
                "^",
                color=style["color"],
                markeredgecolor="0.2",
                zorder=4,
            )
        flops, values = own[0]["flops"], [record["final"][measure.name] for record in own]
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
        flops, scores = zip(*scratch.envelope(scratch.seeds()), strict=True)
        style = {"color": "0.5", "linestyle": ":", "label": "envelope of TokenFormers from scratch"}
        ends.plot(flops, list(map(measure.value, scores)), zorder=1, **style)
        handles.append(Line2D([], [], **style))
    curves.set(title=f"validation {measure.axis} in the course of training")
    ends.set(title=f"final {measure.axis}, mean ± standard deviation", xscale="log")
    scale(curves, measure)
    scale(ends, measure)
    _name_flops((curves, ends), max((own[0]["flops"] for own in done.values()), default=1))
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    save(figure, path)


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
        axes.errorbar(count, mean(values), label=label(variant, own, records), **style)
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
    save(figure, path)


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


def _growths(field: Field, records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return the FLOPs before each growth, and the mean result by then."""
    measured = records[0]["validation"]
    units, flops = ([0, *measured[key]] for key in (field.unit, "flops"))
    results = [
        mean(values)
        for values in zip(*(r["validation"][field.measure.name] for r in records), strict=True)
    ]
    per_unit = records[0]["iterations"] / records[0][field.length]
    times = [growth["iteration"] / per_unit for growth in records[0]["growth"]]
    return list(np.interp(times, units, flops)), list(np.interp(times, units[1:], results))


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


def scale(axes: Axes, measure: Measure) -> None:
    """Give a vertical axis with something on it the scale of a measure, numbers written out."""
    if measure.logarithmic:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        wide = high > 4 * low
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)) if wide else MaxNLocator(7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def label(variant: Variant, own: Sequence[Record], records: Sequence[Record]) -> str:
    """Name a variant in a chart, with its learning rate where there are several."""
    swept = len({record["lr"] for record in records}) > 1
    return f"{variant.label}, lr {own[0]['lr']:g}" if swept and own else variant.label


def _known(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def band(
    axes: Axes,
    records: Sequence[Record],
    curve: str,
    along: str,
    what: str,
    style: dict[str, Any],
    after: float = 0,
) -> None:
    """Draw the mean of a curve over runs, and its deviation where there are several.

    Args:
        axes: Where.
        records: Of the runs.
        curve: Which of their curves.
        along: Its horizontal axis.
        what: Its vertical axis.
        style: Of the line; ``color`` is that of the band, too.
        after: Where on the horizontal axis the runs begin.
    """
    curves = [
        dict(
            zip(
                (after + point for point in record[curve][along]),
                _known(record[curve][what]),
                strict=True,
            )
        )
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


def save(figure: Figure, path: Path) -> None:
    """Write a figure into a PNG file, at once."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format="png", metadata={"Software": None})
    write_whole(path, picture.getvalue())
