"""Classify images with a trained model.

With an exported folder (config.json beside model.safetensors)::

    tokenformer-vit predict cat.jpg photos/ --checkpoint work_dirs/run/model.safetensors

With any timm model and a checkpoint of it::

    tokenformer-vit predict cat.jpg --model tokenformer_base --checkpoint weights.safetensors

With the small model of CIFAR-10's ten classes, whose weights are in this package::

    tokenformer-vit predict cat.jpg --model tokenformer_cifar10_micro

A file that is not a readable image is printed on stderr and skipped. Exit status: 0 if every image
was classified, 1 if some were skipped, 2 if none was classified, 130 after Ctrl-C.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import timm
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.vision.images import find_images, say_skipped
from tokenformer_vit.vision.prediction import predict

from .arguments import Parser, add_model, whole_number


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    paths = find_images(args.images)
    checkpoint = args.checkpoint or _weights_in_package(args.model)
    model = load_model(args.model, checkpoint, args.num_classes, **args.model_kwargs)
    if args.compile:
        compile_blocks(model)
    if checkpoint is None and not args.model.startswith("local-dir:"):
        warning = f"{args.model} has random weights, so its answers are random"
        tqdm.write(f"warning: no --checkpoint: {warning}", file=sys.stderr)
    results = predict(model, paths, args.topk, args.batch_size, args.device)
    done = _print_json(results) if args.json else _print_table(results)
    if done == 0:
        raise InputError("none of the images could be read; the lines above say why")
    if done < len(paths):
        sys.exit(1)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokenformer-vit predict", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("images", type=Path, nargs="+", metavar="IMAGE", help="image file, or folder of images")
    add("--checkpoint", type=Path, metavar="FILE", help=".safetensors or .pth")
    add("--topk", type=whole_number(1), default=5, metavar="K", help="default: 5")
    add(
        "--compile",
        action="store_true",
        help="compile each block with torch.compile: faster for thousands of images",
    )
    add("--json", action="store_true", help="print one JSON object for each image")
    return parser.parse_args(argv)


def _weights_in_package(name: str | None) -> Path | None:
    """Return the file of the weights with which this package registered a model."""
    registered = name is not None and timm.is_model_pretrained(name)
    file = timm.get_pretrained_cfg(name).file if registered else None  # type: ignore
    return Path(file) if file else None


def _print_json(results: Iterable[tuple[Path, Any]]) -> int:
    """Print each answer as soon as it is known; return the number of answers."""
    done = 0
    for path, top in results:
        if isinstance(top, Exception):
            say_skipped(path, top)
            continue
        tqdm.write(json.dumps({"file": str(path), "top": top}), file=sys.stdout)
        sys.stdout.flush()
        done += 1
    return done


def _print_table(results: Iterable[tuple[Path, Any]]) -> int:
    table = Table("image", "class", "index", "probability")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    table.columns[2].justify = table.columns[3].justify = "right"
    done = 0
    for path, top in results:
        if isinstance(top, Exception):
            say_skipped(path, top)
            continue
        for rank, guess in enumerate(top):
            table.add_row(
                # Text: names may look like rich's markup.
                Text(str(path) if rank == 0 else ""),
                Text(guess["label"]),
                str(guess["index"]),
                f"{guess['probability']:.2%}",
                end_section=rank == len(top) - 1,
            )
        done += 1
    if done:
        Console().print(table)
    return done
