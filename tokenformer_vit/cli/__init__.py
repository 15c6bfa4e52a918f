"""The commands: ``tokenformer-vit train``, ``tokenformer-vit predict`` and so on.

A command is a module in ``COMMANDS`` with a function ``main(argv)``. :func:`run` calls it, also
that of a script outside the package: an ``InputError`` becomes one line on stderr and status 2,
Ctrl-C status 130, and all else keeps its traceback. ``arguments`` has the shared options.
"""

import argparse
import difflib
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tokenformer_vit
from tokenformer_vit.errors import InputError

from .arguments import Parser

# Module and help by name.
COMMANDS = {
    "train": ("train", "train a model from a config, or from a folder of images"),
    "test": ("test", "measure the accuracy of a trained classifier"),
    "predict": ("predict", "classify images"),
    "export": ("export", "convert a checkpoint for timm, or for mmpretrain"),
    "grow": ("grow", "append parameter tokens to a trained model"),
    "compress": ("compress", "make a ViT or TokenFormer smaller, without training"),
    "costs": ("costs", "count parameters and FLOPs"),
    "benchmark": ("benchmark", "measure a TokenFormer beside a ViT"),
    "prepare-data": ("prepare_data", "unpack or check a data set of images"),
    "prepare-text": ("prepare_text", "tokenize a text"),
    "generate": ("generate", "continue a text with a language model"),
    "evaluate-lm": ("evaluate_lm", "measure a language model"),
    "lm-eval": ("harness", "run lm-evaluation-harness on TokenFormer models"),
    "convert": ("convert", "convert a ViT, GPT-2, or released language models"),
    "timm": ("timm_script", "run a script of timm with the TokenFormer models"),
}
# Packages of the extras in setup.py.
_EXTRAS = ("mmengine", "mmcv", "mmpretrain", "cv2", "matplotlib", "pandas", "sklearn")
_EXTRAS += ("pyarrow", "datasets", "huggingface_hub", "transformers", "tokenizers", "lm_eval")


def run(main: Callable[[list[str]], Any], argv: Sequence[str] | None = None) -> None:
    """Run the ``main`` of a command with the words ``argv``, by default those of this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may be in ASCII, unlike names of files
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except InputError as error:
        # A data loading worker puts its traceback before the message.
        print("error:", str(error).rpartition("InputError: ")[2].strip(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names."""
    run(_main, argv)


def _main(words: list[str]) -> None:
    listed = "\n".join(f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items())
    what = f"TokenFormer vision transformers and language models.\n\ncommands:\n{listed}"
    parser = Parser(prog="tokenformer-vit", description=what)
    parser.add_argument("--version", action="version", version=tokenformer_vit.__version__)
    parser.add_argument("command", metavar="COMMAND")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="see `COMMAND --help`")
    args = parser.parse_args(words or ["--help"])
    if args.command not in COMMANDS:
        close = ", ".join(difflib.get_close_matches(args.command, COMMANDS))
        way = f"did you mean {close}?" if close else "see --help"
        raise InputError(f"there is no command {args.command!r}; {way}")
    try:  # a command imports what it needs when its words are right
        import_module(f".{COMMANDS[args.command][0]}", __name__).main(args.words)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _EXTRAS:
            raise
        way = "in the clone, run pip install '.[train]', or '.[evaluation]' for language models"
        raise InputError(f"{error}: {way}") from error
