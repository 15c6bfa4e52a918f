"""Draw the images, and the places in them, to which pairs of parameter tokens respond most.

A row is a pair of a layer. It shows the images in which the pair has its largest weights Θ(X Kᵀ),
with a map of the weights of all patches. Needs matplotlib, a trained model and images::

    python examples/inspect_tokens.py work_dirs/digits_demo data/digits/val
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from timm.data import resolve_input_data_config
from torch import Tensor

from tokenformer_vit.vision.images import list_images, read_images
from tokenformer_vit.vision.prediction import load_any


def read(model: Any, paths: Sequence[Any]) -> Iterator[tuple[list[Path], Tensor]]:
    """Yield batches of paths and images (B, 3, H, W) as the model sees them."""
    for found, images in read_images(paths, resolve_input_data_config(model), 64):
        for error in (error for _, error in found if error):
            print(f"skipped: {error}")
        if len(images):
            yield [path for path, error in found if not error], images


@torch.no_grad()
def weights_of(model: Any, images: Tensor, layer: str) -> Tensor:
    """Return the weights (B, N, P) of a layer's P pairs for the N patches of images."""
    inputs: list[Tensor] = []
    module = model.get_submodule(layer)
    with module.register_forward_pre_hook(lambda _, given: inputs.append(given[0])):
        model(images)
    return module.weights(inputs[0][:, model.num_prefix_tokens :])


def draw(model: Any, layer: str, best: dict[int, list[Path]], out: str) -> None:
    """Draw a row for each pair: its best images, red where the weight is large."""
    columns = max(map(len, best.values()))
    figure = Figure(figsize=(1.5 * columns, 1.6 * len(best)), layout="constrained")
    figure.suptitle(f"{layer}: the images with the largest weights of a pair", fontsize=10)
    axes = figure.subplots(len(best), columns, squeeze=False)
    config = resolve_input_data_config(model)
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    for row, (pair, paths) in zip(axes, best.items(), strict=True):
        _, images = next(read(model, paths))
        maps = weights_of(model, images, layer)[..., pair]
        maps = maps.unflatten(1, model.patch_embed.grid_size)  # (B, rows, columns)
        limit = maps.abs().max().item()
        for axis, image, weights in zip(row, images, maps, strict=False):
            picture = (image * std + mean).clamp(0, 1).mean(dim=0)
            height, width = picture.shape
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1, extent=(0, width, height, 0))
            # By the square root: in proportion to the weight, small weights would be invisible.
            alpha = 0.5 * (weights.abs() / limit).sqrt()
            extent = (0, width, height, 0)
            axis.imshow(weights, cmap="bwr", vmin=-limit, vmax=limit, alpha=alpha, extent=extent)
            axis.set_title(f"{weights.max():.3g}", fontsize=8)
        for axis in row:
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"pair {pair}")
    figure.savefig(out, dpi=100)


def main() -> None:
    """Find the images with the largest weights, print and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="exported folder, checkpoint, or timm name")
    parser.add_argument("images", nargs="+", help="image files, or folders of images")
    parser.add_argument("--layer", help="such as blocks.0.attn.query; default: mlp in the middle")
    parser.add_argument("--pairs", type=int, nargs="+", help="default: four of the largest weights")
    parser.add_argument("--columns", type=int, default=9, help="images of a pair; default: 9")
    parser.add_argument("--out", default="tokens.png", help="picture; default: tokens.png")
    args = parser.parse_args()
    model: Any = load_any(args.model)
    layer = args.layer or f"blocks.{len(model.blocks) // 2}.mlp"
    files, largest = [], []
    for paths, images in read(model, list_images(args.images)):
        files += paths
        largest.append(weights_of(model, images, layer).amax(dim=1))
    peaks = torch.cat(largest)  # (images, P)
    best = {}
    for pair in args.pairs or peaks.amax(dim=0).topk(4).indices.tolist():
        order = peaks[:, pair].argsort(descending=True)[: args.columns].tolist()
        best[pair] = [files[index] for index in order]
        print(f"pair {pair}: {peaks[order[0], pair]:.3g} in {best[pair][0]}")
    draw(model, layer, best, args.out)
    print(f"Done. Picture: {args.out}")


if __name__ == "__main__":
    main()
