"""Show what the parameter tokens (key-value pairs) of a trained TokenFormer respond to.

Where in a few images the pairs of a layer fire, a row for each image and a map for each pair::

    python tools/inspect_tokens.py work_dirs/run/model.safetensors cat.jpg dog.jpg --out inspection

Which images of a data set excite them most, a row for each pair, the patch in a frame::

    python tools/inspect_tokens.py work_dirs/run/model.safetensors data/val --exemplars 9 \
--layer blocks.3.mlp --out inspection

Writes tokens.png and its numbers, tokens.json, into the folder --out. CHECKPOINT is the
model.safetensors of an exported folder, that folder, or any checkpoint of the --model.

Files that are no readable images are named on stderr and skipped. Exit status: 0 if every image
was read, 1 if some were skipped or after an error, 130 after Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.records import write_record
from tokenformer_vit.vision.drawing import draw_exemplars, draw_maps
from tokenformer_vit.vision.images import find_images, say_skipped
from tokenformer_vit.vision.inspection import MOST, find_exemplars, map_tokens
from tokenformer_vit.vision.prediction import (
    choose_device,
    model_arguments,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        InputError: If nothing can be shown; the message says why.
        OSError: If the folder cannot be written into.
        SystemExit: With 1 if images were skipped.
    """
    args = parse(argv)
    device = choose_device(args.device)
    paths = find_images(args.images)
    # Tried first: a data set may take hours.
    args.out.mkdir(parents=True, exist_ok=True)
    if not os.access(args.out, os.W_OK):
        raise InputError(f"the folder {args.out} cannot be written into; choose another --out")
    model = load_model(args.model, args.checkpoint, args.num_classes, **args.model_kwargs)

    skipped: list[Path] = []

    def skip(path: Path, error: Exception) -> None:
        skipped.append(path)
        say_skipped(path, error)

    wanted = {
        **{"layer": args.layer, "tokens": args.tokens, "top": args.top, "skipped": skip},
        **{"batch_size": args.batch_size, "device": device},
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
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[model_arguments()],
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=".safetensors or .pth")
    add("images", type=Path, nargs="+", metavar="IMAGE", help="image file, or folder of them")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the two files go")
    add(
        "--layer",
        metavar="NAME",
        help="such as blocks.3.mlp or blocks.0.attn.query; default: the mlp of the middle block",
    )
    add(
        "--exemplars",
        type=whole_number(1),
        metavar="N",
        help=f"show the N images (at most {MOST}) that excite each pair most, rather than maps",
    )
    add(
        "--tokens",
        type=numbers,
        metavar="5,17",
        help="numbers of the pairs; default: those with the largest weights or, with --exemplars, "
        "the most selective of those that add most to the output",
    )
    add("--top", type=whole_number(1), default=8, metavar="K", help="how many pairs; default: 8")
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    """Read whole numbers between commas."""
    return [whole_number(0)(part.strip()) for part in text.split(",")]
