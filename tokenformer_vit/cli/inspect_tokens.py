"""Draw what the parameter tokens (key-value pairs) of a trained TokenFormer respond to.

Maps of a few images: one row for each image, one map of weights for each pair::

    tokenformer-vit inspect work_dirs/run/model.safetensors cat.jpg dog.jpg --out inspection

Exemplars from a data set: one row for each pair, with the images for which its weight is largest
and a frame around the patch::

    tokenformer-vit inspect work_dirs/run/model.safetensors data/val --exemplars 9 \
--layer blocks.3.mlp --out inspection

The command writes tokens.png and its numbers, tokens.json, into the folder --out. CHECKPOINT is an
exported folder, the model.safetensors in it, or any checkpoint of the model that --model names.

A file that is not a readable image is printed on stderr and skipped. Exit status: 0 if every image
was read, 1 if an image was skipped or after an error, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenformer_vit.files import make_folder
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.records import write_record
from tokenformer_vit.vision.drawing import draw_exemplars, draw_maps
from tokenformer_vit.vision.images import list_images
from tokenformer_vit.vision.inspection import MOST, find_exemplars, map_tokens

from .arguments import Parser, add_model, whole_number


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse(argv)
    paths = [Path(path) for path in list_images(args.images)]
    make_folder(args.out, "--out")
    model = load_model(args.model, args.checkpoint, args.num_classes, **args.model_kwargs)

    skipped: list[Path] = []

    def skip(path: Path, error: Exception) -> None:
        skipped.append(path)
        print(f"skipped: {error}", file=sys.stderr)

    wanted = {
        **{"layer": args.layer, "tokens": args.tokens, "top": args.top, "skipped": skip},
        **{"batch_size": args.batch_size, "device": args.device},
    }
    if args.exemplars:
        record = find_exemplars(model, paths, number=args.exemplars, **wanted)
    else:
        record = map_tokens(model, paths, **wanted)
    draw = draw_exemplars if args.exemplars else draw_maps
    draw(record, model, args.out / "tokens.png")
    write_record(args.out / "tokens.json", {"checkpoint": str(args.checkpoint), **record})
    print(f"Done. {record['layer']}: {args.out / 'tokens.png'}, {args.out / 'tokens.json'}")
    if skipped:
        sys.exit(1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="tokenformer-vit inspect", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=".safetensors or .pth")
    add("images", type=Path, nargs="+", metavar="IMAGE", help="image file, or folder of images")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the two files")
    add(
        "--layer",
        metavar="NAME",
        help="layer, such as blocks.3.mlp or blocks.0.attn.query; default: mlp of the middle block",
    )
    add(
        "--exemplars",
        type=whole_number(1),
        metavar="N",
        help=f"draw the N images (at most {MOST}) with the largest weights of each pair, not maps",
    )
    add(
        "--tokens",
        type=numbers,
        metavar="5,17",
        help="numbers of the pairs; default: the pairs with the largest weights or, with "
        "--exemplars, the most selective among the pairs that add most to the output",
    )
    add("--top", type=whole_number(1), default=8, metavar="K", help="number of pairs; default: 8")
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    """Read whole numbers that are separated by commas."""
    return [whole_number(0)(part.strip()) for part in text.split(",")]
