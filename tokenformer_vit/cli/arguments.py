"""Options that several commands share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.utils import ParseKwargs

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError

# A folder with one of these suffixes would look like a file.
_OF_FILES = (
    *(".safetensors", ".pth", ".pt", ".pt2", ".ckpt", ".bin", ".pkl", ".onnx", ".npz", ".gguf"),
    *(".zip", ".tar", ".gz", ".json", ".txt"),
)


class KeyValues(ParseKwargs):
    """Argparse action that reads ``KEY=VALUE`` pairs of Python literals into a dict."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Parse the pairs of one option."""
        try:
            super().__call__(parser, namespace, values, option_string)
        except ValueError as error:  # timm splits at "=" and does not check that there is one
            raise argparse.ArgumentError(self, "takes KEY=VALUE") from error


# How --model-kwargs is read.
MODEL_KWARGS: dict[str, Any] = {
    "nargs": "+",
    "action": KeyValues,
    "default": {},
    "metavar": "KEY=VALUE",
    "help": "arguments of the model, such as img_size=32 patch_size=4",
}


def model_arguments() -> argparse.ArgumentParser:
    """Define the options for the model and the device.

    Returns:
        A parser for the ``parents`` of another parser, with ``--model``, ``--model-kwargs``,
        ``--num-classes``, ``--batch-size`` and ``--device``.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help="timm model name, or local-dir:FOLDER")
    add("--model-kwargs", **MODEL_KWARGS)
    add(
        "--num-classes",
        type=whole_number(1),
        metavar="N",
        help="default: the number of classes in the checkpoint's head",
    )
    add("--batch-size", type=whole_number(1), default=32, metavar="B", help="default: 32")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that training and testing share."""
    from mmengine.config import DictAction  # only training has it

    add = parser.add_argument
    add("--data-root", help="folder that holds train/ and val/, parquet files or tokens")
    add(
        "--batch-size",
        type=whole_number(1),
        help="images, or sequences of tokens, per process and iteration of training or, in "
        "`tokenformer-vit test`, of the test; validation keeps the batch size of its config",
    )
    add(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="override keys that the config has, such as train_cfg.max_epochs=100",
    )
    add(
        "--compile",
        action="store_true",
        help="compile each block with torch.compile: faster after a first minute",
    )
    add("--launcher", choices=("none", "pytorch", "slurm", "mpi"), default="none")


def parse_run_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line that has the options of :func:`add_run_arguments`."""
    try:
        return parser.parse_args(argv)
    except (ValueError, AssertionError, RecursionError):  # DictAction trusts what it splits
        parser.error(
            "--cfg-options must be KEY=VALUE, with numbers, words and lists of them; put dicts "
            "into a config file"
        )


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add the images that a command reads, files or folders."""
    what = "image file, or folder of images"
    parser.add_argument("images", type=_image_path, nargs="+", metavar="IMAGE", help=what)


def _image_path(text: str) -> Path:
    if not text:  # Path("") is the current folder
        raise argparse.ArgumentTypeError(
            "a name is empty; give a file or a folder, or . for the current folder"
        )
    return Path(text)


def is_file_name(target: Path, suffix: str) -> bool:
    """Return whether OUT names the kind of file that a command writes, and not a folder.

    Args:
        target: OUT.
        suffix: Suffix of the file; "" if the command writes only folders.

    Raises:
        InputError: If it has the suffix of another kind of file.
    """
    if target.suffix != suffix and target.suffix.lower() in _OF_FILES:
        way = f"give a folder, or a file *{suffix}" if suffix else "give a folder"
        raise InputError(f"OUT is {target}, but this command writes no {target.suffix} file: {way}")
    return target.suffix == suffix


def choose_device(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    Args:
        name: ``cpu``, ``cuda``, or ``auto`` for CUDA if PyTorch sees a CUDA device, else the CPU.

    Raises:
        InputError: If ``name`` is ``cuda`` and PyTorch sees no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but this PyTorch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
