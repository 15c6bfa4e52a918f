"""Unpack a data set into class folders, which mmpretrain, timm and torchvision read.

From the parquet files of a Hugging Face data set (ImageNet-1K, CIFAR-10, Imagenette, ...)::

    tokenformer-vit prepare-data SOURCE TARGET

From scikit-learn's handwritten digits, without a download::

    tokenformer-vit prepare-data --digits TARGET

The result is TARGET/train/<class>/<image> and TARGET/val/<class>/<image>, with the image bytes
unchanged. If interrupted, run the same command again: it writes the missing files and ends with the
same tree. Unpacking reads only the header of each image. To decode every image of an existing tree
and list the corrupt ones::

    tokenformer-vit prepare-data --check TARGET
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.folders import check_images, folder_names, unpack
from tokenformer_vit.vision.sources import digits_splits, parquet_splits

from .arguments import Parser, whole_number


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit with status 1 if ``--check`` finds an unreadable image."""
    args = _parse(argv)
    try:
        if args.check:
            if check_images(args.target, args.workers):
                sys.exit(1)
            return
        if args.digits:
            splits, names = digits_splits()
        else:
            splits, names = parquet_splits(
                args.source, dict(args.splits or []), args.image_column, args.label_column
            )
        for name, limit in (("train", args.limit), ("val", args.limit_val)):
            if limit is not None and name in splits:
                splits[name].labels = splits[name].labels[:limit]
        unpack(splits, folder_names(names), args.target)
    except OSError as error:
        resume = "" if args.check else "; to continue, run the same command again"
        raise InputError(
            f"{error.filename or args.target}: {error.strerror or error}{resume}"
        ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokenformer-vit prepare-data", description=__doc__)
    add = parser.add_argument
    add("source", type=Path, nargs="?", help="folder with *.parquet files at any depth")
    add("target", type=Path, help="folder for train/ and val/")
    add("--digits", action="store_true", help="unpack scikit-learn's digits")
    add("--check", action="store_true", help="decode every image in TARGET")
    add(
        "--limit",
        type=whole_number(1),
        metavar="N",
        help="take only the first N training images; if the rows are not shuffled, they may be of "
        "a few classes",
    )
    add("--limit-val", type=whole_number(1), metavar="N", help="the same for validation images")
    add(
        "--splits",
        type=_assignment,
        nargs="+",
        metavar="FOLDER=SPLIT",
        help="source of a folder, such as val=test; default: train=train val=validation, or test",
    )
    add("--image-column", metavar="NAME", help="default: image or img")
    add("--label-column", metavar="NAME", default="label", help="default: label")
    add(
        "--workers",
        type=whole_number(1),
        default=os.cpu_count(),
        help="number of processes for --check",
    )
    args = parser.parse_args(argv)
    if args.digits and args.check:
        parser.error("give --digits or --check, not both")
    if (args.digits or args.check) and args.source:
        parser.error("with --digits or --check, give only TARGET")
    if not (args.digits or args.check or args.source):
        parser.error("give SOURCE and TARGET, or --digits TARGET, or --check TARGET")
    return args


def _assignment(text: str) -> tuple[str, str]:
    folder, equals, split = text.partition("=")
    if folder not in ("train", "val") or not equals or not split:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form train=SPLIT or val=SPLIT")
    return folder, split
