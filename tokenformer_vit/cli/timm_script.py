"""Run one of timm's own scripts with the TokenFormer models registered.

timm finds only models that are imported, and its scripts have no option that imports a package::

    tokenformer-vit timm path/to/validate.py DATA --model tokenformer_base ...
    torchrun --nproc_per_node=8 -m tokenformer_vit timm path/to/train.py DATA ...

timm's wheel has no scripts: get them from https://github.com/huggingface/pytorch-image-models.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenformer_vit.models  # noqa: F401  # registers them
from tokenformer_vit.errors import InputError


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would, after our models are registered."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: tokenformer-vit timm SCRIPT [ARGS...]\n\n{__doc__}")
        return
    if not argv or not Path(argv[0]).is_file():
        raise InputError(f"there is no script {' '.join(argv[:1])}: give SCRIPT, a file of timm's")
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))  # as `python SCRIPT` does
    runpy.run_path(argv[0], run_name="__main__")
