"""Measure the accuracy of a trained TokenFormer with fewer pairs, without training it further.

Give an exported folder and the data that the model was trained on::

    tokenformer-vit compress work_dirs/run data/digits --method prune budget --keep 0.75 0.5 0.25

``prune`` removes the least used pairs of every layer, measured on training images. ``budget`` also
prunes as many weights, but chooses how many pairs each layer keeps by the loss on these images.
``nested`` keeps the first pairs of a nested model. ``top-k`` keeps all pairs, but every token reads
only the values of its strongest pairs; the gathers take longer than what they save.

Accuracy is top-1 on the validation split. "same" is the share of images that get the class which
the original model gives. FLOPs are counted, not timed. The command writes compression.json and
compression.png into --out, and with --save every smaller model, as folders that timm loads.
"""

import random
from pathlib import Path
from typing import Any

from tokenformer_vit.files import make_folder
from tokenformer_vit.growth import measure_usage, pattention_layers
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.records import environment, write_record
from tokenformer_vit.vision import compression
from tokenformer_vit.vision.drawing import draw_compression
from tokenformer_vit.vision.prediction import load_for_images

from .arguments import Parser, add_model, whole_number


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = Parser(prog="tokenformer-vit compress", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="exported folder, file, or model")
    add("data", metavar="DATA", help="data with a train and a val split, as for training")
    add("--method", nargs="+", choices=compression.METHODS, help="default: prune, nested; top-k")
    what = "shares of pairs; default: nested sizes, or 0.75 0.5 0.25"
    add("--keep", nargs="+", type=float, metavar="SHARE", help=what)
    kinds = compression.KINDS
    add("--kinds", nargs="+", choices=kinds, default=kinds, help="of layers; default: all")
    add("--measure-on", metavar="FOLDER", help="training images; default: those of DATA")
    add("--measure-images", type=whole_number(1), default=1000, metavar="N", help="default: 1000")
    add("--seed", type=whole_number(0), default=0, help="seed of the images; default: 0")
    add("--save", action="store_true", help="also write the smaller models")
    add("--out", type=Path, metavar="FOLDER", help="default: compression/ beside the checkpoint")
    args = parser.parse_args(argv)
    if wrong := [share for share in args.keep or () if not 0 < share <= 1]:
        parser.error(f"--keep: {wrong[0]} is not a share above 0 and at most 1")
    chosen, batches = [], []
    model: Any = load_for_images(args.model, args.checkpoint, **args.model_kwargs)
    pattention_layers(model.to(args.device))  # refuses a model without pairs
    methods = args.method or ["nested" if compression.is_nested(model) else "prune", "top-k"]
    trained = getattr(model, "sizes", ())
    tested = compression.open_matching(model, args.data, "val")
    if {"prune", "budget"} & {*methods}:
        if args.measure_on:
            compression.check_apart(args.measure_on, args.data)
        chosen = compression.open_matching(model, args.measure_on or args.data, "train")
        number = min(args.measure_images, len(chosen))
        chosen.keep(random.Random(args.seed).sample(range(len(chosen)), number))
        batches = [*compression.labelled_batches(model, chosen, args.batch_size, args.device)]
    beside = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or beside / "compression"
    make_folder(out, "--out")
    keeps = args.keep or trained[:-1] or (0.75, 0.5, 0.25)
    usage = measure_usage(model, batches) if batches else None
    made = compression.candidates(model, methods, keeps, usage, batches, args.kinds)
    test = compression.labelled_batches(model, tested, args.batch_size, args.device)
    record = {**environment(args.device.type), "checkpoint": str(args.checkpoint)}
    record |= {"data": args.data, "images": len(tested), "seed": args.seed}
    record["measured_on"] = (args.measure_on or args.data) if batches else None
    record |= {"measured_images": len(chosen), "points": compression.measure_top1(made, test)}
    write_record(out / "compression.json", record)
    draw_compression(record, out / "compression.png")
    for point in record["points"]:
        print("{method:<7} {keep:>5g} {parameters:>13,} parameters".format(**point), end="")
        flops = f"{point['flops_per_image'] / 1e9:.4g} GFLOPs"
        print(f"{flops:>14}, top-1 {point['top1']:.2f} %, same {point['agreement']:.2f} %")
    for each in made[1:] if args.save else ():
        if each.method != "top-k":
            save_model(each.model, out / f"{each.method}_{each.keep:g}")
    print(f"Done. In {out}: compression.json, compression.png" + ", models" * args.save)
