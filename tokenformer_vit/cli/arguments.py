"""Options that several commands share."""

import argparse
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
