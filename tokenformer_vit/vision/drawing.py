"""Pictures of what pairs respond to, and of accuracy against pairs."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter
from timm.data import create_transform, resolve_input_data_config
from torch import nn

from .images import read_image


def draw_maps(record: dict[str, Any], model: nn.Module, path: Path) -> None:
    """Draw one row for each image: the image as the model sees it, then the map of each pair.

    A pair has one colour scale for all images, symmetric around zero. Where a weight is small, the
    image shows through.
    """
    pictures = _pictures(record["images"], model)
    tokens = record["tokens"]
    title = f"Weights of pairs in {record['layer']}; above each map, the largest weight"
    # The last, narrow row holds the colour scales.
    figure, axes = _grid([1.0] * len(pictures) + [0.07], 1 + len(tokens), title)
    *below, corner = axes[:, 0]
    corner.set_axis_off()
    for axis, (name, picture) in zip(below, pictures.items(), strict=True):
        axis.imshow(picture)
        axis.set_title("image", fontsize=8)
        _label(axis, _shorten(Path(name).name))
    (rows, columns), (height, width) = record["grid"], record["patch_size"]
    edges = (-0.5, columns * width - 0.5, rows * height - 0.5, -0.5)
    for (*column, bottom), entry in zip(axes[:, 1:].T, tokens, strict=True):
        weights = torch.tensor(entry["weights"])  # (images, rows, columns)
        limit = weights.abs().max().item() or 1.0
        scale = ScalarMappable(Normalize(-limit, limit), "RdBu_r")
        for axis, picture, weight, peak in zip(
            column, pictures.values(), weights, entry["peaks"], strict=True
        ):
            axis.imshow(picture.mean(axis=-1), cmap="gray", vmin=0, vmax=255)
            # By the square root: in proportion to the weight, small weights would be invisible.
            alpha = 0.85 * (weight.abs() / limit).sqrt()
            axis.imshow(weight, scale.cmap, scale.norm, extent=edges, alpha=alpha)
            axis.set(xlim=(-0.5, picture.shape[1] - 0.5), ylim=(picture.shape[0] - 0.5, -0.5))
            axis.set_title(f"pair {entry['token']}: {peak:.3g}", fontsize=8)
        bar = figure.colorbar(scale, cax=bottom, orientation="horizontal")
        bar.set_ticks([-limit, 0, limit], labels=[f"{tick:.2g}" for tick in (-limit, 0, limit)])
        bar.ax.tick_params(labelsize=7)
    _save(figure, path)


def draw_exemplars(record: dict[str, Any], model: nn.Module, path: Path) -> None:
    """Draw one row for each pair: its exemplars, with their weight and a frame around the patch."""
    entries = record["tokens"]
    shown = {item["file"]: None for entry in entries for item in entry["exemplars"]}
    pictures = _pictures(shown, model)
    which = f"the images, of {record['images']}, with the largest weight of each pair"
    title = f"{record['layer']}: {which}; frame: the patch"
    figure, axes = _grid([1.0] * len(entries), len(entries[0]["exemplars"]), title)
    height, width = record["patch_size"]
    for row, entry in enumerate(entries):
        _label(axes[row, 0], f"pair {entry['token']}\n{entry['selectivity']:.2g} × mean")
        for axis, item in zip(axes[row], entry["exemplars"], strict=True):
            axis.imshow(pictures[item["file"]])
            axis.set_title(f"weight {item['weight']:.2f}", fontsize=8)
            corner = (item["patch"][1] * width - 0.5, item["patch"][0] * height - 0.5)
            for colour, line in (("black", 3), ("yellow", 1.5)):  # visible on any background
                frame = Rectangle(corner, width, height, fill=False, color=colour, linewidth=line)
                frame.set(zorder=3, clip_on=False)  # also at the edge of an image
                axis.add_patch(frame)
    _save(figure, path)


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
    _save(figure, path)


def _pictures(names: Iterable[str], model: nn.Module) -> dict[str, Any]:
    """Read images as the model sees them; return (H, W, 3) uint8 arrays."""
    config, pictures = resolve_input_data_config(model), {}
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    transform: Any = create_transform(**config)
    for name in names:
        pixels = ((transform(read_image(Path(name))) * std + mean) * 255).round().clamp(0, 255)
        pictures[name] = pixels.byte().permute(1, 2, 0).numpy()
    return pictures


def _grid(heights: list[float], columns: int, title: str) -> tuple[Figure, Any]:
    layout = ConstrainedLayoutEngine(w_pad=0.1)  # space for the last number of a colour scale
    figure = Figure(figsize=(1.5 + 1.7 * columns, 0.7 + 1.7 * sum(heights)), layout=layout)
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle(title, fontsize=10)
    return figure, axes


def _label(axis: Any, text: str) -> None:
    # A file name may look like a formula.
    axis.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8, parse_math=False)


def _shorten(name: str, most: int = 22) -> str:
    name = name.encode(errors="backslashreplace").decode()  # of a name that is no Unicode
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _save(figure: Figure, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a character that the font lacks
        figure.savefig(path, dpi=100)
