"""Unpack a data set into class folders, which timm, torchvision and mmpretrain read.

The source is a folder of parquet files or of `save_to_disk`, or hf://datasets/OWNER/NAME. The
images go to TARGET/train/CLASS and TARGET/val/CLASS, with unchanged bytes; if it was interrupted,
the same command writes the missing ones. --digits unpacks scikit-learn's, --check decodes a folder.
"""

import sys
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import locked_folder, make_folder
from tokenformer_vit.vision import datasets
from tokenformer_vit.vision.images import check_images

from .arguments import KEY_VALUES, Parser, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit prepare-data", description=__doc__)
    add = parser.add_argument
    add("source", nargs="?", help="data set")
    add("target", type=Path, help="folder for train/ and val/")
    add("--digits", action="store_true", help="unpack scikit-learn's handwritten digits")
    add("--check", action="store_true", help="list the images in TARGET that are corrupt")
    number: Any = {"type": whole_number(1), "default": sys.maxsize, "metavar": "N"}
    add("--limit", **number, help="only the first N training images, perhaps of few classes")
    add("--limit-val", **number, help="only the first N of val/")
    add("--splits", **KEY_VALUES, help="such as val=test, if they have other names")
    add("--image-column", metavar="NAME", help="default: image, img, or the only one")
    add("--label-column", metavar="NAME", help="default: label, labels, ..., or the only one")
    args = parser.parse_args(argv)
    if (args.source is None) != (args.digits or args.check) or (args.digits and args.check):
        parser.error("give SOURCE and TARGET, or --digits TARGET, or --check TARGET")
    named = dict(args.splits)
    if unknown := named.keys() - {"train", "val"}:
        parser.error(f"--splits names train and val, not {min(unknown)}")
    if args.check:
        sys.exit(check_images(args.target))
    found = datasets.digits() if args.digits else {}
    if args.source:
        splits, columns = datasets.find_splits(args.source), (args.image_column, args.label_column)
        for name, split in ({"train": "train", "val": "val"} | named).items():
            if name in named or split in splits:
                found[name] = datasets.open_images(args.source, split, *columns)
        if not found or len({images.classes for images in found.values()}) > 1:
            there = ", ".join(splits)
            raise InputError(f"name --splits train=... val=... of one data set: {there}")
    make_folder(args.target, "TARGET")
    with locked_folder(args.target):
        for name, images in found.items():
            images.keep(images.rows < (args.limit if name == "train" else args.limit_val))
            datasets.unpack(images, args.target / name, name)
