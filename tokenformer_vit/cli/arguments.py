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


def key_value(text: str) -> str:
    """Check a word that ``Options`` splits next."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return text


class Options(argparse.Action):
    """Collects words K=V: a literal of Python such as ``[1, 2]`` or ``None``, else a text."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Add the words to those of earlier uses of the option."""
        found, bools = dict(getattr(namespace, self.dest)), {"true": "True", "false": "False"}
        for key, _, value in (word.partition("=") for word in values):
            try:
                found[key] = ast.literal_eval(bools.get(value) or value)
            except (ValueError, SyntaxError):
                if value.startswith(("[", "(", "{")):
                    parser.error(f"{key}={value} is no literal of Python: quote texts, ['a', 'b']")
                found[key] = value
        setattr(namespace, self.dest, found)


# How words such as img_size=32 are read.
KEY_VALUES: Any = {"nargs": "+", "type": key_value, "action": Options, "default": {}}
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
