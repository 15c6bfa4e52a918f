"""Run a script of timm, such as its train.py, with the TokenFormer models registered.

timm's wheel has no scripts: get them from https://github.com/huggingface/pytorch-image-models.
"""

import argparse
import runpy
import sys
from pathlib import Path

from .arguments import Parser


def main(argv: list[str]) -> None:
    """Run a script as ``python SCRIPT WORD...`` would."""
    parser = Parser(prog="tokenformer-vit timm", description=__doc__)
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="WORD")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    sys.argv = [str(args.script), *args.words]
    sys.path.insert(0, str(args.script.resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
