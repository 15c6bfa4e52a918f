"""Draw what the parameter tokens (key-value pairs) of a trained TokenFormer respond to.

Maps of a few images: one row for each image, one map of weights for each pair::

    tokenformer-vit inspect work_dirs/run cat.jpg dog.jpg --out inspection

Exemplars from a data set: one row for each pair, with the images for which its weight is largest
and a frame around the patch::

    tokenformer-vit inspect work_dirs/run data/val --exemplars 9 --out inspection

The command writes tokens.png and its numbers, tokens.json, into the folder --out. CHECKPOINT is an
exported folder, or any checkpoint of the model that --model names. A file that is not a readable
image is printed on stderr and skipped; the exit status is then 1.
"""

import sys
from pathlib import Path

from tokenformer_vit.files import make_folder
from tokenformer_vit.records import environment, write_record
from tokenformer_vit.vision.drawing import draw_exemplars, draw_maps
from tokenformer_vit.vision.images import list_images
from tokenformer_vit.vision.inspection import MOST, inspect_pairs
from tokenformer_vit.vision.prediction import load_for_images

from .arguments import Parser, add_model, whole_number


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = Parser(prog="tokenformer-vit inspect", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="exported folder, file, or model")
    add("images", type=Path, nargs="+", metavar="IMAGE", help="image file, or folder of images")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the two files")
    add("--layer", metavar="NAME", help="such as blocks.0.attn.query; default: mlp in the middle")
    number, what = whole_number(1), f"images of each pair, at most {MOST}, in place of maps"
    add("--exemplars", type=number, default=0, metavar="N", help=what)
    add("--tokens", nargs="+", type=whole_number(0), default=(), metavar="P", help="pairs")
    add("--top", type=number, default=8, metavar="K", help="or the K strongest pairs; default: 8")
    args = parser.parse_args(argv)
    make_folder(args.out, "--out")
    model = load_for_images(args.model, args.checkpoint, **args.model_kwargs)
    chosen = (args.layer, args.tokens, args.top, args.exemplars, args.batch_size, args.device)
    record = inspect_pairs(model, list_images(args.images), *chosen)
    draw = draw_exemplars if args.exemplars else draw_maps
    draw(record, model, args.out / "tokens.png")
    about = {**environment(args.device.type), "checkpoint": str(args.checkpoint)}
    write_record(args.out / "tokens.json", {**about, **record})
    print(f"Done. {record['layer']}: {args.out / 'tokens.png'}, {args.out / 'tokens.json'}")
    if record["skipped"]:
        sys.exit(1)
