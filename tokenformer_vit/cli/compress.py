"""Make a pretrained ViT or a TokenFormer smaller, without training it, and measure what is left.

MODEL is a timm name with its pretrained weights, hf-hub:USER/NAME, an exported folder, or a
checkpoint (with --model, if it was not trained here). IMAGES is a folder, or a data set as for
training; labels are used only to measure::

    tokenformer-vit compress vit_small_patch16_224 photos --flops 0.67 0.5 --save smaller
    tokenformer-vit compress work_dirs/run data/digits --keep 0.75 0.5

Pairs go where the outputs change least, and the values of the others are fitted to take over. A
model with nested sizes keeps its first pairs instead, unless --flops or --to-vit is given. --to-vit
leaves attention whole and makes a ViT that timm loads without this package.

Of the images, those of train, or a part, are fitted to, and those of val, or the rest, are measured
with: top-1 if their classes are the model's; the share that gets the same class as from the whole
model (the cosine of features, if it has no classifier); milliseconds for an image, in turns.
Parameters, FLOPs and milliseconds are those of the fused model (timm's --reparam).
"""

from functools import partial
from pathlib import Path
from typing import Any

from timm.utils import reparameterize_model

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder
from tokenformer_vit.growth import extract
from tokenformer_vit.models import TokenFormerViT, from_vit, to_vit
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.records import environment, write_record
from tokenformer_vit.vision import compression
from tokenformer_vit.vision.prediction import load_any

from .arguments import Parser, add_model, whole_number


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = Parser(prog="tokenformer-vit compress", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("source", metavar="MODEL", help="timm name, exported folder or checkpoint")
    add("images", metavar="IMAGES", help="folder of images, or data as for training")
    sizes = parser.add_mutually_exclusive_group()
    what = "of the FLOPs of the whole model; default: 0.67 0.5"
    sizes.add_argument("--flops", nargs="+", type=float, metavar="SHARE", help=what)
    what = "of the pairs of each layer, 1 to order them; default for a nested model: its sizes"
    sizes.add_argument("--keep", nargs="+", type=float, metavar="SHARE", help=what)
    add("--to-vit", action="store_true", help="make ViTs, with fewer hidden neurons")
    what = "images to fit to; default: 400"
    add("--fit-images", type=whole_number(1), default=400, metavar="N", help=what)
    what = "folder for the smaller models, the table and the picture"
    add("--save", type=Path, metavar="OUT", help=what)
    args = parser.parse_args(argv)
    shares = args.flops or args.keep or ()
    if wrong := [share for share in shares if not 0 < share <= 1]:
        parser.error(f"{wrong[0]} is not a share above 0 and at most 1")
    out = args.save or Path("compression")
    make_folder(out, "--save")
    whole = load_any(args.source, args.model, **dict(args.model_kwargs)).to(args.device)
    model: Any = whole if isinstance(whole, TokenFormerViT) else from_vit(whole)
    if args.to_vit:  # refused, before anything is computed, of what is no ViT
        model = from_vit(to_vit(model))
    nested = len(model.sizes) > 1 and not args.flops
    shares = shares or (model.sizes[:-1] if nested else (0.67, 0.5))
    fitted, measured = compression.divide_images(args.images, args.fit_images)
    how = {"batch_size": args.batch_size, "device": args.device}
    read = partial(compression.tensor_batches, whole, **how)
    if nested:
        fitted = []
        sizes = {share: extract(model, share) for share in shares}
    else:
        images = [*read(fitted)]
        sizes = compression.smaller_models(model, images, shares, bool(args.keep), args.to_vit)
    word = "keep" if nested or args.keep else "flops"
    made = {f"{word}_{share:g}": smaller for share, smaller in sizes.items()}
    if args.to_vit:
        made = {name: to_vit(smaller) for name, smaller in made.items()}
    for name, smaller in made.items() if args.save else ():
        facts = {"Model": args.source, "Images": f"{len(fitted)} of {args.images}"}
        save_model(smaller, out / name, facts={"Made smaller from": facts})
    labels = None
    try:
        labels = compression.find_labels(whole, measured)
    except InputError as error:
        print(f"Accuracy is not measured: {error}")
    models = {name: reparameterize_model(each) for name, each in {"whole": whole, **made}.items()}
    points = compression.measure(models, read(measured), labels)
    record = {**environment(args.device.type), "model": args.source, "data": args.images}
    record |= {"fit_images": len(fitted), "images": len(measured), "points": points}
    write_record(out / "compression.json", record)
    compression.draw_compression(record, out / "compression.png")
    print(f"{'':<12}{'parameters':>13}{'GFLOPs':>9}{'ms':>9}{'same, %':>9}{'top-1, %':>9}")
    for point in points:
        print("{name:<12}{parameters:>13,}".format(**point), end="")
        print(f"{point['flops_per_image'] / 1e9:>9.4g}{point['milliseconds']:>9.3g}", end="")
        print(f"{point['agreement']:>9.2f}{point.get('top1', ''):>9.4}")
    print(f"Done. In {out}: compression.json, compression.png" + ", models" * bool(args.save))
