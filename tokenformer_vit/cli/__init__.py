"""The commands: ``tokenformer-vit train``, ``tokenformer-vit predict`` and so on.

Every module here but ``arguments``, ``tables`` and ``convert_vit`` is one command, with a function
``main``. In a clone, ``python tools/train.py`` is the same as ``tokenformer-vit train``.
"""

import argparse
import difflib
import sys
from importlib import import_module
from typing import NamedTuple

import tokenformer_vit
from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError

__all__ = ["COMMANDS", "main", "run"]


class Command(NamedTuple):
    """One command.

    Args:
        module: Name of its module in this package.
        help: One line for ``tokenformer-vit --help``.
        status: Exit status after an error.
    """

    module: str
    help: str
    status: int = 1


COMMANDS = {
    "train": Command("train", "train a model from a config, or from a folder of images"),
    "test": Command("test", "measure the accuracy of a trained classifier"),
    "predict": Command("predict", "classify images", status=2),
    "export": Command("export", "convert a checkpoint for timm, or for mmpretrain"),
    "grow": Command("grow", "append parameter tokens to a trained model"),
    "compress": Command("compress", "measure accuracy with fewer parameter tokens"),
    "inspect": Command("inspect_tokens", "draw what parameter tokens respond to"),
    "costs": Command("costs", "count parameters and FLOPs"),
    "benchmark": Command("benchmark", "measure speed and memory"),
    "prepare-data": Command("prepare_data", "unpack or check a data set of images"),
    "prepare-text": Command("prepare_text", "tokenize a text"),
    "generate": Command("generate", "continue a text with a language model"),
    "evaluate-lm": Command("evaluate_lm", "measure a language model"),
    "lm-eval": Command("harness", "run lm-evaluation-harness on TokenFormer models"),
    "convert": Command("convert_checkpoint", "convert a ViT, GPT-2, or released language models"),
    "timm": Command("timm_script", "run a script of timm with the TokenFormer models", 2),
}


def run(name: str) -> None:
    """Run a command with the arguments in ``sys.argv``; see :func:`run_tool` for how it ends.

    Args:
        name: A key of ``COMMANDS``.
    """
    command = COMMANDS[name]
    run_tool(lambda: import_module(f".{command.module}", __name__).main(), command.status)


def main() -> None:
    """Run the command that the first argument names."""
    listed = "\n".join(f"  {name:<14}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tokenformer-vit",
        usage="%(prog)s COMMAND ...",
        description=f"TokenFormer vision transformers and language models.\n\ncommands:\n{listed}",
        epilog="`tokenformer-vit COMMAND --help` explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"%(prog)s {tokenformer_vit.__version__}"
    parser.add_argument("--version", action="version", version=version)
    words = sys.argv[1:] or ["--help"]
    if words[0] in COMMANDS:
        sys.argv = [f"tokenformer-vit {words[0]}", *words[1:]]
        run(words[0])
    elif words[0].startswith("-"):
        parser.parse_args(words)
    else:
        run_tool(lambda: _refuse(words[0]), status=2)


def _refuse(word: str) -> None:
    close = difflib.get_close_matches(word, COMMANDS) or COMMANDS
    raise InputError(
        f"there is no command {word!r}; did you mean {', '.join(close)}? "
        "`tokenformer-vit --help` explains them"
    )
