"""Measure how accuracy falls when a trained TokenFormer keeps or reads fewer pairs.

With the folder that training exported, and the data that it was trained on::

    python tools/compress.py work_dirs/run data/digits --keep 0.75 0.5 0.25

Methods (``--method``): ``prune`` takes away the least used pairs of every layer, as measured on
training images; ``random`` takes any, to compare with; ``top-k`` keeps all and lets every token
read the values of its strongest pairs. Nothing is trained afterwards. Accuracy is top-1 on
DATA/val, class folders whose sorted positions are the labels, with the model's own preprocessing;
the images that usage is measured on are others. FLOPs are counted, not timed: the gathers of
``top-k`` take longer than a dense product of as many FLOPs.

Writes compression.json and compression.png into ``--out``; with ``--save`` also every pruned model,
as a folder that timm and the other tools load.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from tokenformer_vit.command_line import typed_command, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.growth.prune import measure_usage
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.records import environment, write_record
from tokenformer_vit.vision.compression import (
    KINDS,
    METHODS,
    candidates,
    draw,
    labelled_images,
    measure_top1,
    sample_images,
    table,
    tensor_batches,
)
from tokenformer_vit.vision.prediction import choose_device, model_arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        InputError: If the model, the data or the folder for the results cannot be used.
    """
    args = parse(argv)
    device, val = choose_device(args.device), args.data / "val"
    model = load_model(args.model, args.checkpoint, args.num_classes, **args.model_kwargs).to(
        device
    )
    pattention_layers(model)  # asked before images are read: has it parameter tokens at all?
    samples = labelled_images(val, model.num_classes)  # type: ignore[arg-type]
    prunes = [method for method in args.method if method != "top-k"]
    measured_on = args.measure_on or args.data / "train"
    chosen = sample_images(measured_on, args.measure_images, args.seed, val) if prunes else []
    beside = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or beside / "compression"
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise InputError(f"the folder {out} cannot be written into; choose another --out")

    usage = None
    if prunes:
        tqdm.write(f"usage, on {len(chosen)} images of {measured_on}", file=sys.stderr)
        usage = measure_usage(model, tensor_batches(model, chosen, args.batch_size, device))
    made = candidates(model, dict.fromkeys(args.method), args.keep, usage, args.kinds, args.seed)
    tqdm.write(f"accuracy, on {len(samples)} images of {val}", file=sys.stderr)
    points = measure_top1(made, samples, args.batch_size, device)
    record = {
        "command": typed_command(),
        **environment(("torch", "torchvision", "timm"), device.type),
        "checkpoint": str(args.checkpoint),
        "data": str(val),
        "images": len(samples),
        "measured_on": str(measured_on) if prunes else None,
        "measured_images": len(chosen),
        "seed": args.seed,
        "kinds": list(args.kinds),
        "points": points,
    }
    write_record(out / "compression.json", record)
    draw(record, out / "compression.png")
    Console().print(table(record))
    saved = []
    for candidate in made:
        if args.save and candidate.method == "prune":
            saved.append(f"prune_{candidate.keep:g}/")
            save_model(candidate.model, out / saved[-1])
    print(f"Done. In {out}: {', '.join(('compression.json', 'compression.png', *saved))}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[model_arguments()],
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="exported folder, .safetensors or .pth")
    add("data", type=Path, metavar="DATA", help="folder with train/ and val/, of class folders")
    add(
        "--method",
        nargs="+",
        choices=METHODS,
        default=["prune", "top-k"],
        help="default: prune and top-k",
    )
    add(
        "--keep",
        nargs="+",
        type=share,
        default=[0.75, 0.5, 0.25],
        metavar="SHARE",
        help="of the pairs, that are kept or read; default: 0.75 0.5 0.25",
    )
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="layers; default: all")
    add("--measure-on", type=Path, metavar="FOLDER", help="training images; default: DATA/train")
    add("--measure-images", type=whole_number(1), default=1000, metavar="N", help="default: 1000")
    add("--seed", type=whole_number(0), default=0, help="of all random choices; default: 0")
    add("--save", action="store_true", help="write the models of the method prune, too")
    add("--out", type=Path, metavar="FOLDER", help="default: compression/ beside the checkpoint")
    return parser.parse_args(argv)


def share(text: str) -> float:
    """Read a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return value
