"""Charts of a sweep: accuracy and curves of every variant, and what happened in its layers."""

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from questions import Question, Variant
from tables import Record, at_best_lr, finished

from tokenformer_vit.files import write_whole

# Figure of the layers: title and scale of its axis.
FIGURES = {
    "key_grad_norm": ("gradient of keys", "log"),
    "value_grad_norm": ("gradient of values", "log"),
    "entropy": ("entropy of |Θ| / ln P", "linear"),
    "kurtosis": ("kurtosis of scores", "linear"),
    "tau": ("τ", "linear"),
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
