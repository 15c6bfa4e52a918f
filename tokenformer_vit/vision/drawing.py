"""Pictures of what the pairs of a layer fire for."""

import io
import warnings
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from torch import nn

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.models.description import data_config
from tokenformer_vit.vision.images import read_images

from .inspection import MOST


def draw_maps(record: dict[str, Any], model: nn.Module, path: Path) -> None:
    """Draw a row for each image: what the model sees of it, then the map of each pair.

    Args:
        record: What :func:`map_tokens` returned.
        model: The model it was made with.
        path: The PNG file. A pair has one colour scale for all images, symmetric around zero; the
            smaller a weight, the more of the image shows through.

    Raises:
        InputError: If an image cannot be read any more.
        OSError: If the file cannot be written; ``filename`` is ``path``.
    """
    pictures = _pictures(record["images"], model)
    tokens = record["tokens"]
    title = f"{record['layer']}: weights of pairs, the largest above each map"
    # Below the images, a narrow row of colour scales.
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
            # The colour fades with the weight as well: in proportion, faint ones would be lost.
            alpha = 0.85 * (weight.abs() / limit).sqrt()
            axis.imshow(weight, scale.cmap, scale.norm, extent=edges, alpha=alpha)
            axis.set(xlim=(-0.5, picture.shape[1] - 0.5), ylim=(picture.shape[0] - 0.5, -0.5))
            axis.set_title(f"pair {entry['token']}: {peak:.3g}", fontsize=8)
        bar = figure.colorbar(scale, cax=bottom, orientation="horizontal")
        bar.set_ticks([-limit, 0, limit], labels=[f"{tick:.2g}" for tick in (-limit, 0, limit)])
        bar.ax.tick_params(labelsize=7)
    _save(figure, path)


def draw_exemplars(record: dict[str, Any], model: nn.Module, path: Path) -> None:
    """Draw a row for each pair: its exemplars, with their weight and a frame around the patch.

    Args:
        record: What :func:`find_exemplars` returned.
        model: The model it was made with.
        path: The PNG file.

    Raises:
        InputError: If an image cannot be read any more.
        OSError: If the file cannot be written; ``filename`` is ``path``.
    """
    entries = record["tokens"]
    shown = {item["file"]: None for entry in entries for item in entry["exemplars"]}
    pictures = _pictures(shown, model)
    figure, axes = _grid(
        [1.0] * len(entries),
        len(entries[0]["exemplars"]),
        f"{record['layer']}: where pairs fire most, of {record['images']} images",
    )
    height, width = record["patch_size"]
    for row, entry in enumerate(entries):
        _label(axes[row, 0], f"pair {entry['token']}\n{entry['selectivity']:.3g} × its mean")
        for axis, item in zip(axes[row], entry["exemplars"], strict=True):
            axis.imshow(pictures[item["file"]])
            axis.set_title(f"{item['weight']:.3g}", fontsize=8)
            corner = (item["patch"][1] * width - 0.5, item["patch"][0] * height - 0.5)
            for colour, line in (("black", 3), ("yellow", 1.5)):  # seen on any ground
                frame = Rectangle(corner, width, height, fill=False, color=colour, linewidth=line)
                frame.set(zorder=3, clip_on=False)  # whole at the edge of an image, too
                axis.add_patch(frame)
    _save(figure, path)


def _pictures(names: Iterable[str], model: nn.Module) -> dict[str, Any]:
    """Read images as the model sees them, as (H, W, 3) arrays of bytes."""
    config, pictures = data_config(model), {}
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    with closing(read_images([Path(name) for name in names], config, MOST)) as batches:
        for path, image in (pair for batch in batches for pair in batch):
            if isinstance(image, Exception):
                raise InputError(f"{image}; it could be read before")
            pixels = ((image * std + mean) * 255).round().clamp(0, 255).byte()
            pictures[str(path)] = pixels.permute(1, 2, 0).numpy()
    return pictures


def _grid(heights: list[float], columns: int, title: str) -> tuple[Figure, Any]:
    layout = ConstrainedLayoutEngine(w_pad=0.1)  # room for the last number of a colour scale
    figure = Figure(figsize=(1.5 + 1.7 * columns, 0.7 + 1.7 * sum(heights)), layout=layout)
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle(title, fontsize=10)
    return figure, axes


def _label(axis: Any, text: str) -> None:
    # A file's name may look like a formula.
    axis.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8, parse_math=False)


def _shorten(name: str, most: int = 22) -> str:
    name = printable(name)
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a box stands for what the font lacks
        figure.savefig(picture, dpi=100, format="png")
    write_whole(path, picture.getvalue())
