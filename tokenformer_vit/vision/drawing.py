"""The picture of what is left of a model that was made smaller."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tokenformer_vit.files import whole_file


def draw_compression(record: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy, or agreement with the whole model, over FLOPs and milliseconds."""
    points = sorted(record["points"], key=lambda point: point["flops_per_image"])
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    key = "top1" if "top1" in points[0] else "agreement"
    labels = {"top1": "top-1 (%)", "agreement": "agreement with the whole model (%)"}
    places = {"flops_per_image": "forward FLOPs for an image", "milliseconds": "ms for an image"}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (place, label) in zip(axes, places.items(), strict=True):
        axis.plot([p[place] for p in points], [p[key] for p in points], marker="o")
        for point in points:
            where, text = (point[place], point[key]), point["name"]
            axis.annotate(text, where, (0, -12), textcoords="offset points", ha="right", fontsize=8)
        axis.axhline(record["points"][0][key], color="0.6", linestyle=":")
        axis.set(xlabel=label, xlim=(0, None))
    axes[0].set_ylabel(f"{labels[key]}, {record['images']} images")
    axes[0].xaxis.set_major_formatter(EngFormatter())
    with whole_file(path) as file:
        figure.savefig(file, dpi=100, format="png")
