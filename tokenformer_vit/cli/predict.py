"""Classify images by an exported folder, a checkpoint of a timm model, or a model by its name.

    tokenformer-vit predict cat.jpg photos/ --checkpoint work_dirs/run
    tokenformer-vit predict cat.jpg --model tokenformer_base --checkpoint weights.safetensors
    tokenformer-vit predict cat.jpg --model tokenformer_cifar10_micro

A file that cannot be read is named on standard error, and the exit status is then 1.
"""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.models.checkpoints import find_weights
from tokenformer_vit.vision.images import list_images
from tokenformer_vit.vision.prediction import load_for_images, predict

from .arguments import Parser, add_model, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit predict", description=__doc__)
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="image file, or folder of images at any depth")
    add("--checkpoint", type=Path, metavar="FILE", help="exported folder, .safetensors or .pth")
    add("--topk", type=whole_number(1), default=5, metavar="K", help="default: 5")
    add("--json", action="store_true", help="print a JSON object for each image")
    add("--out", type=Path, metavar="FILE.csv", help="also write a table")
    add("--compile", action="store_true", help="faster for thousands of images")
    add_model(parser)
    args = parser.parse_args(argv)
    images, checkpoint = list_images(args.images), args.checkpoint
    if args.out:
        make_folder(args.out.parent, "--out")
    if checkpoint is None and args.model and find_weights(Path(args.model)).is_file():
        checkpoint = Path(args.model)
    model = load_for_images(args.model, checkpoint, **dict(args.model_kwargs))
    if checkpoint is None and not args.model.startswith("local-dir:"):
        print(f"warning: {args.model} has random weights: no --checkpoint", file=sys.stderr)
    if args.compile:
        compile_blocks(model)
    unreadable = 0
    text: Any = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
    with open(args.out or os.devnull, "w", buffering=1, **text) as file:
        table = csv.writer(file)
        table.writerow(["file", "rank", "class", "index", "probability"])
        for path, top in predict(model, images, args.topk, args.batch_size, args.device):
            if isinstance(top, InputError):
                unreadable += 1
                tqdm.write(f"skipped: {top}", file=sys.stderr)
                continue
            line = json.dumps({"file": str(path), "top": top})
            if not args.json:
                classes = (f"{each['label']} {each['probability']:.2%}" for each in top)
                line = "\t".join((str(path), *classes))
            tqdm.write(line, file=sys.stdout)  # above the progress bar
            sys.stdout.flush()
            table.writerows([path, rank, *each.values()] for rank, each in enumerate(top, 1))
    if unreadable:
        sys.exit(1)
