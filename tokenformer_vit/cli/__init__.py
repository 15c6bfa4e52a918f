"""The commands: ``tokenformer-vit train``, ``tokenformer-vit predict`` and so on.

Each other module but ``arguments`` is one command, with a function ``main``. In a clone,
``python tools/train.py`` is the same as ``tokenformer-vit train``.
"""

import argparse
import sys
from importlib import import_module
from typing import NamedTuple

from tokenformer_vit.command_line import run_tool

__all__ = ["COMMANDS", "main", "run"]


class Command(NamedTuple):
    """One command.

    Args:
        module: Name of its module in this package, and of its file in ``tools/``.
        help: One line for ``tokenformer-vit --help``.
        status: Exit status after an error.
    """

    module: str
    help: str
    status: int = 1


COMMANDS = {
    "train": Command("train", "train an image classifier or a language model from a config"),
    "test": Command("test", "measure a trained classifier on a config's validation images"),
    "predict": Command("predict", "classify images", status=2),
    "export": Command("export", "turn a checkpoint of a run into model.safetensors"),
    "grow": Command("grow", "append pairs to a trained model"),
    "compress": Command("compress", "measure accuracy against the pairs kept or read"),
    "inspect": Command("inspect_tokens", "draw what parameter tokens respond to"),
    "costs": Command("costs", "count parameters and FLOPs"),
    "benchmark": Command("benchmark", "measure speed and memory"),
    "prepare-data": Command("prepare_data", "unpack or check a data set of images"),
    "prepare-text": Command("prepare_text", "turn text into rows of tokens"),
    "generate": Command("generate", "continue a text with a language model"),
    "evaluate-lm": Command("evaluate_lm", "measure a language model"),
    "convert": Command("convert_checkpoint", "convert released language models, and back"),
    "timm": Command("timm_script", "run one of timm's own scripts with our models"),
}


def run(name: str) -> None:
    """Run a command with the arguments of ``sys.argv``, and end it in one line.

    Args:
        name: A key of ``COMMANDS``.
    """
    command = COMMANDS[name]
    run_tool(lambda: import_module(f".{command.module}", __name__).main(), command.status)


def main() -> None:
    """Run the command that the first argument names."""
    parser = argparse.ArgumentParser(prog="tokenformer-vit", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"tokenformer-vit {name}", *sys.argv[2:]]
    run(name)
