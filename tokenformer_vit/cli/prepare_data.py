"""Turn a data set into the folders that mmpretrain, timm and torchvision read.

From a Hugging Face image data set in parquet files (ImageNet-1K, CIFAR-10, Imagenette, ...)::

    python tools/prepare_data.py SOURCE TARGET

From scikit-learn's handwritten digits, which need no download::

    python tools/prepare_data.py --digits TARGET

The result is TARGET/train/<class>/<image> and TARGET/val/<class>/<image>. Image bytes are written
as they are. Each file appears whole or not at all, under a name that follows from its shard and
row: after an interruption, the same command continues and ends with the same tree. Unpacking
reads each image's header only; this decodes every image of an existing tree and lists bad ones::

    python tools/prepare_data.py --check TARGET
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.folders import check, folder_names, unpack
from tokenformer_vit.vision.sources import digits_splits, parquet_splits


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        InputError: If something cannot be done; the message says what.
        SystemExit: With 1 if ``--check`` found images that cannot be read.
    """
    args = _parse(argv)
    try:
        if args.check:
            if check(args.target, args.workers):
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
        resume = "" if args.check else "; nothing is half-written, the same command continues"
        raise InputError(
            f"{error.filename or args.target}: {error.strerror or error}{resume}"
        ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="folder with *.parquet, any depth")
    parser.add_argument("target", type=Path, help="folder that gets (or has) train/ and val/")
    parser.add_argument("--digits", action="store_true", help="unpack scikit-learn's digits")
    parser.add_argument("--check", action="store_true", help="decode every image below TARGET")
    parser.add_argument(
        "--limit",
        type=whole_number(1),
        metavar="N",
        help="only the first N training images; a fair slice where rows are shuffled, as on the "
        "Hub they mostly are, else perhaps of a few classes",
    )
    parser.add_argument(
        "--limit-val", type=whole_number(1), metavar="N", help="same, validation images"
    )
    parser.add_argument(
        "--splits",
        type=_assignment,
        nargs="+",
        metavar="FOLDER=SPLIT",
        help="which split goes where, if not train=train and val=validation (or else test)",
    )
    parser.add_argument("--image-column", metavar="NAME", help="default: image or img")
    parser.add_argument("--label-column", metavar="NAME", default="label", help="default: label")
    parser.add_argument(
        "--workers", type=whole_number(1), default=os.cpu_count(), help="processes of --check"
    )
    args = parser.parse_args(argv)
    if args.digits and args.check:
        parser.error("--digits and --check do different things; give one of them")
    if (args.digits or args.check) and args.source:
        parser.error("--digits and --check take TARGET alone")
    if not (args.digits or args.check or args.source):
        parser.error("give SOURCE and TARGET, or --digits TARGET, or --check TARGET")
    return args


def _assignment(text: str) -> tuple[str, str]:
    folder, equals, split = text.partition("=")
    if folder not in ("train", "val") or not equals or not split:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form train=SPLIT or val=SPLIT")
    return folder, split
