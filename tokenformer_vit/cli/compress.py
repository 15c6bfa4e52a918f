"""Measure the accuracy of a trained TokenFormer with fewer pairs.

Give an exported folder and the data that the model was trained on::

    tokenformer-vit compress work_dirs/run data/digits --keep 0.75 0.5 0.25

Methods (``--method``): ``prune`` removes the least used pairs of every layer, measured on training
images. ``random`` removes random pairs, for comparison. ``nested`` keeps the first pairs of a
nested model. ``top-k`` keeps all pairs, but every token reads only the values of its strongest
pairs. Nothing is trained afterwards. Accuracy is top-1 on DATA/val, with the model's own
preprocessing; the label of a class folder is its position among the sorted folders. The last column
is the share of images that get the class which the original model gives. Usage is never measured on
these images. FLOPs are counted, not timed: the gathers of ``top-k`` take longer than a dense
product with as many FLOPs.

``--budget`` also chooses how many pairs each layer keeps, for a share of the FLOPs of the
Pattention layers: ``by-usage`` chooses by usage, ``by-loss`` by the loss on held-out images. Equal
shares for all layers are measured beside them. With ``--early``, a small size classifies every
image, and a larger size those for which the confidence is low. Sizes and confidence are chosen on
the held-out images, to cost as much as each fixed size.

The command writes compression.json and compression.png into ``--out``. With ``--save`` it also
writes every smaller model, as a folder that timm and the other commands load.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder
from tokenformer_vit.growth import measure_usage, pattention_layers
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.records import environment, write_record
from tokenformer_vit.vision.compression import (
    KINDS,
    METHODS,
    budget_candidates,
    candidates,
    check_apart,
    labelled_batches,
    labelled_images,
    measure_top1,
    sample_images,
    tensor_batches,
    uniform_method,
)
from tokenformer_vit.vision.drawing import draw_compression
from tokenformer_vit.vision.early import early_candidates

from .arguments import Parser, add_model, whole_number

# Methods whose models --save writes. Of the others, top-k reads the original model, and random is
# only for comparison.
_SAVED = ("prune", "nested", "by-usage", "by-loss")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse(argv)
    device, val = args.device, args.data / "val"
    model = load_model(args.model, args.checkpoint, args.num_classes, **args.model_kwargs)
    model.to(device, getattr(torch, args.dtype))
    pattention_layers(model)  # before images are read: raises if the model has no parameter tokens
    samples = labelled_images(val, model.num_classes)  # type: ignore[arg-type]
    choosing, samples = _choosing(args, val, samples)
    uniform = uniform_method(model)
    methods, keeps = _methods_and_shares(args, model, uniform)
    prunes = args.budget or not {"prune", "random"}.isdisjoint(methods)
    measured_on = args.measure_on or args.data / "train"
    chosen = sample_images(measured_on, args.measure_images, args.seed, val) if prunes else []
    beside = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or beside / "compression"
    make_folder(out, "--out")
    usage = None
    if prunes:
        tqdm.write(f"measuring usage on {len(chosen)} images of {measured_on}", file=sys.stderr)
        usage = measure_usage(model, tensor_batches(model, chosen, args.batch_size, device))
    made = candidates(model, methods, keeps, usage, args.kinds, args.seed)
    if choosing:
        tqdm.write(f"choosing on {len(choosing)} held-out images", file=sys.stderr)
        held_out = [*labelled_batches(model, choosing, args.batch_size, device)]
        fixed = [each for each in made if each.method in ("dense", uniform)]
        made += budget_candidates(model, args.budget or (), usage or {}, held_out, args.kinds)
        made += early_candidates(fixed, held_out) if args.early else []
    tqdm.write(f"measuring accuracy on {len(samples)} images of {val}", file=sys.stderr)
    points = measure_top1(made, samples, args.batch_size, device)
    record = {
        **environment(device.type),
        "checkpoint": str(args.checkpoint),
        "dtype": args.dtype,
        "data": str(val),
        "images": len(samples),
        "measured_on": str(measured_on) if prunes else None,
        "measured_images": len(chosen),
        "chosen_on": str(args.choose_on or val) if choosing else None,
        "choosing_images": len(choosing),
        "seed": args.seed,
        "kinds": list(args.kinds),
        "points": points,
    }
    write_record(out / "compression.json", record)
    draw_compression(record, out / "compression.png")
    print(table(record))
    saved = {
        f"{each.method}_{each.keep:g}/": each.model
        for each in made
        if args.save and each.method in _SAVED
    }
    for name, smaller in saved.items():
        save_model(smaller, out / name)
    print(f"Done. In {out}: {', '.join(('compression.json', 'compression.png', *saved))}")


def table(record: Mapping[str, Any]) -> str:
    """Lay out the points of a record as a table."""
    data = record["data"]
    pairs, costs = ("q, k, v", "output", "FFN"), ("params", "MB", "GFLOPs")
    columns = ("keep", *pairs, *costs, "top-1 %", "same %")
    lines = [
        f"top-1 accuracy on {record['images']} images of {data}",
        f"{'method':12}" + "".join(f"{name:>13}" for name in columns),
    ]
    for point in record["points"]:
        cells = (
            f"{point['keep']:g}",
            *(_span(point["pairs"][kind]) for kind in KINDS),
            f"{point['parameters']:,}",
            f"{point['bytes'] / 1e6:.4g}",
            f"{point['flops_per_image'] / 1e9:.4g}",
            f"{point['top1']:.2f}",
            f"{point['agreement']:.2f}",
        )
        lines.append(f"{point['method']:12}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def _span(counts: int | list[int]) -> str:
    """Return a number of pairs, or its range over the blocks."""
    if isinstance(counts, int):
        return str(counts)
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least}–{most}"


def _methods_and_shares(
    args: argparse.Namespace, model: Any, uniform: str
) -> tuple[list[str], list[float]]:
    """Return the methods and the shares of pairs to measure, with their defaults."""
    methods, keeps = args.method or [], [*(args.keep or ()), *(args.budget or ())]
    if args.budget or args.early:
        methods = [uniform, *methods]
    if not args.keep and (args.early or not args.budget):
        trained = [size for size in getattr(model, "sizes", ()) if isinstance(size, float)]
        keeps += trained[:-1] or (0.75, 0.5, 0.25)
    return [*dict.fromkeys(methods or (uniform, "top-k"))], keeps


def _choosing(
    args: argparse.Namespace, val: Path, samples: Sequence[tuple[Path, int]]
) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Return samples to choose on, for ``--budget`` and ``--early``, and samples to test with."""
    if not (args.budget or args.early):
        return [], [*samples]
    drawn = random.Random(args.seed)
    if args.choose_on is None:
        if len(samples) < 2:
            raise InputError(
                f"{val} has 1 image, and --budget and --early need one to choose on and one to "
                "test with: give held-out images with --choose-on"
            )
        shuffled = drawn.sample(samples, len(samples))
        half = min(len(samples) // 2, args.measure_images)
        return shuffled[:half], shuffled[half:]
    check_apart(args.choose_on, val, "held-out images with --choose-on")
    others = labelled_images(args.choose_on, len({label for _, label in samples}))
    return drawn.sample(others, min(len(others), args.measure_images)), [*samples]


def _share(text: str) -> float:
    if 0 < float(text) <= 1:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a share above 0 and at most 1")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="tokenformer-vit compress", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="exported folder, .safetensors or .pth")
    add(
        "data",
        type=Path,
        metavar="DATA",
        help="folder with train/ and val/, both with a folder per class",
    )
    add(
        "--method",
        nargs="+",
        choices=METHODS,
        help="default: prune (nested for a nested model), and top-k without --budget and --early",
    )
    shares: Any = {"nargs": "+", "type": _share, "metavar": "SHARE"}
    add(
        "--keep",
        **shares,
        help="shares of the pairs to keep or read; default: the sizes of a nested model, or 0.75 "
        "0.5 0.25",
    )
    add(
        "--budget",
        **shares,
        help="also choose the pairs of each layer, for shares of the FLOPs of these layers",
    )
    add("--early", action="store_true", help="also classify easy images with the smaller sizes")
    add(
        "--choose-on",
        type=Path,
        metavar="FOLDER",
        help="held-out images for --budget and --early; default: half of DATA/val, drawn at random "
        "and then not used for the accuracy",
    )
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of layers; default: all")
    add("--measure-on", type=Path, metavar="FOLDER", help="training images; default: DATA/train")
    add("--measure-images", type=whole_number(1), default=1000, metavar="N", help="default: 1000")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    add("--seed", type=whole_number(0), default=0, help="seed of random choices; default: 0")
    add("--save", action="store_true", help="also write the models of prune, nested and --budget")
    add("--out", type=Path, metavar="FOLDER", help="default: compression/ beside the checkpoint")
    args = parser.parse_args(argv)
    # --budget and --early add a method that can be saved.
    if args.save and args.method and not (args.budget or args.early or {*_SAVED} & {*args.method}):
        parser.error(
            f"--save writes the models of prune and nested, not of {', '.join(args.method)}: add "
            "one of them to --method, or leave out --save"
        )
    return args
