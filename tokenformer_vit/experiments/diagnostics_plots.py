"""Charts of what happened in the layers of every variant of a sweep."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .plots import save
from .questions import Question
from .rows import Record, at_best_lr, finished

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
    save(figure, path)


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
