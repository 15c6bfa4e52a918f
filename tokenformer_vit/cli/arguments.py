"""The parser of the commands, and options that several of them share."""

import argparse
import ast
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tokenformer_vit.errors import InputError


class Parser(argparse.ArgumentParser):
    """Prints a description as it is written, and refuses a wrong option in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise InputError(f"{message} (see {self.prog} --help)")


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")

    return parse


def device(name: str) -> torch.device:
    """Return the device that ``--device`` names: a type for argparse, with "auto" as default."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"PyTorch sees no {name} here; use cpu")
    return torch.device(name.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))


def key_value(text: str) -> tuple[str, Any]:
    """Read K=V, where V is a literal of Python such as ``[1, 2]`` or ``None``, else a text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError) as error:
        if value.startswith(("[", "(", "{")):
            what = f"{text} is no literal of Python: quote texts, ['a', 'b']"
            raise argparse.ArgumentTypeError(what) from error
        return key, value


# How words such as img_size=32 become a list of pairs, to which each use of the option adds.
KEY_VALUES: Any = {"nargs": "+", "type": key_value, "action": "extend", "default": []}
KEY_VALUES["metavar"] = "KEY=VALUE"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model and its device."""
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help="timm model name, or local-dir:FOLDER")
    add("--model-kwargs", **KEY_VALUES, help="its arguments, such as img_size=32 num_classes=9")
    add("--batch-size", type=whole_number(1), default=32, metavar="B", help="default: 32")
    add("--device", type=device, default="auto", help="cpu or cuda; default: cuda if it is there")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that training and testing share."""
    add = parser.add_argument
    add("--data-root", help="folder that holds train/ and val/, parquet files or tokens")
    add("--batch-size", type=whole_number(1), help="per process and step; not for validation")
    add("--cfg-options", **KEY_VALUES, help="its keys, such as optim_wrapper.optimizer.lr=1e-3")
    add("--compile", action="store_true", help="compile each block: faster after a first minute")
    add("--launcher", choices=("none", "pytorch", "slurm", "mpi"), default="none")
