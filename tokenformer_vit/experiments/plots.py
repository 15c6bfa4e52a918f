"""Parts of all charts, and the chart of the measurements in the layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .fields import Field, Measure
from .rows import Record, at_best_lr, finished
from .variants import Variant

# Axis title and scale of each figure of DiagnosticsHook.
FIGURES = {
    "key_grad_norm": ("gradient of keys", "log"),
    "value_grad_norm": ("gradient of values", "log"),
    "entropy": ("entropy of |Θ| / ln P", "linear"),
    "kurtosis": ("kurtosis of scores", "linear"),
    "tau": ("τ", "linear"),
}
# Line and name of each part of a block.
_PARTS: dict[str, tuple[Any, str]] = {
    "attn": ("-", "attention, mean of q, k, v, o"),
    "mlp": ("--", "feed-forward"),
}


def draw_diagnostics(
    field: Field, variants: Sequence[Variant], records: Sequence[Record]
) -> Figure:
    """Draw the figures of every block over the run.

    There is a row for each figure and a column for each variant. The colour of a line shows the
    depth of its block. Lines are means over seeds and, in attention, over q, k, v and o.
    """
    lines = {}
    for variant, runs in at_best_lr(field.measure, variants, records).items():
        # Failed runs are drawn only where there are no others.
        measured = [run["diagnostics"] for run in finished(runs) or runs if "diagnostics" in run]
        if measured:
            lines[variant] = mean_diagnostics(measured)
    names = [name for name in FIGURES if any(name in each.columns for each in lines.values())]
    figure = Figure(figsize=(1.2 + 3 * len(lines), 1 + 2.1 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(lines), squeeze=False, sharex=True, sharey="row")
    every = pd.concat(lines.values())
    depth = 1 + max(every.index.get_level_values("block"))
    for column, (variant, means) in enumerate(lines.items()):
        panels[0, column].set_title(variant.label)
        panels[-1, column].set_xlabel(field.unit)
        for axes, name in zip(panels[:, column], names, strict=True):
            title, kind = FIGURES[name]
            if name == "kurtosis" and every[name].abs().max() > 20:
                kind = "symlog"  # a kurtosis can be small, of either sign, or huge
            # At the start the head is zero, so no layer before it has a gradient.
            axes.set_yscale(kind, **({"nonpositive": "mask"} if kind == "log" else {}))
            if column == 0:
                axes.set_ylabel(title)
            if name not in means.columns:
                continue
            for (block, part), curve in means[name].dropna().groupby(["block", "part"]):
                curve = curve.droplevel(["block", "part"])
                axes.plot(curve, _PARTS[part][0], color=_colour(block, depth), linewidth=1)
    handles = [
        Line2D([], [], color="0.3", linestyle=line, label=text) for line, text in _PARTS.values()
    ]
    for block, text in ((0, "first block"), (depth - 1, "last block")):
        handles.append(Line2D([], [], color=_colour(block, depth), label=text))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def mean_diagnostics(measured: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Average diagnostics over runs, and over the layers of each part of a block.

    Args:
        measured: The diagnostics of some records.

    Returns:
        A column for each figure, indexed by block, part and time, in epochs or iterations.
    """
    frames = []
    for one in measured:
        keys = [layer.split(".")[1:3] for layer in one["layers"]]
        times = one["epoch"] if "epoch" in one else one["iteration"]
        index = pd.MultiIndex.from_tuples(
            [(time, int(block), part) for time in times for block, part in keys],
            names=["time", "block", "part"],
        )
        figures = {
            name: [value for row in one[name] for value in row] for name in FIGURES if name in one
        }
        frames.append(pd.DataFrame(figures, index=index, dtype=float))
    means: Any = pd.concat(frames).groupby(["block", "part", "time"]).mean()
    return means


def _colour(block: int, depth: int) -> Any:
    return colormaps["viridis"](0.9 * block / max(depth - 1, 1))


def curves_of(records: Sequence[Record], curve: str, along: str, what: str) -> pd.DataFrame:
    """Return a curve with a column for each run, at the points that all runs have."""
    columns = [
        # A run shorter than the interval of logging has no points, and no axis draws an empty index
        # of objects.
        pd.Series(run[curve][what], pd.Index(run[curve][along], dtype=float), dtype=float)
        for run in records
    ]
    return pd.concat(columns, axis=1, join="inner")


def band(axes: Axes, curves: pd.DataFrame, **style: Any) -> None:
    """Draw the mean of some curves, and a band of one standard deviation."""
    means, spread = curves.mean(axis=1, skipna=False), curves.std(axis=1)
    axes.plot(means, **style)
    low, high = means - spread, means + spread
    axes.fill_between(means.index, low, high, color=style["color"], alpha=0.2, linewidth=0)


def points(axes: Axes, x: float, results: pd.Series, each: bool = True, **style: Any) -> None:
    """Draw the mean and standard deviation of some results, and each result as a dash."""
    deviation = results.std() if len(results) > 1 else None
    axes.errorbar(x, results.mean(), deviation, capsize=4, **style)
    if each:
        axes.plot([x] * len(results), results, "_", color="0.4")


def scale(axes: Axes, measure: Measure) -> None:
    """Set the vertical axis to the scale of a measure, with plain numbers."""
    if measure.logarithmic:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        wide = high > 4 * low
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)) if wide else MaxNLocator(7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def name_of(variant: Variant, runs: Sequence[Record], records: Sequence[Record]) -> str:
    """Name a variant in a chart, with its learning rate if the table has several."""
    swept = len({record["lr"] for record in records}) > 1
    shown = (finished(runs) or runs)[:1]  # failed runs may have other rates
    return f"{variant.label}, lr {shown[0]['lr']:g}" if swept and shown else variant.label
