"""Run one of timm's own scripts with the TokenFormer models registered.

timm finds models by what has been imported, and its scripts other than ``train.py`` have no
option for importing a package first::

    python -m tokenformer_vit.cli.timm_script path/to/validate.py DATA --model tokenformer_base ...

Several processes: ``torchrun --nproc_per_node=8 -m tokenformer_vit.cli.timm_script train.py ...``.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# `python -m` has imported the package by now; this line also serves whoever calls main().
import tokenformer_vit  # noqa: F401

__all__ = ["main"]

_USAGE = "python -m tokenformer_vit.cli.timm_script SCRIPT [ARGS...]"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would, after our models are registered.

    Args:
        argv: The script's path and its arguments; default ``sys.argv[1:]``. Options before the
            path are ours (``--help`` alone), all after it are the script's.

    Raises:
        SystemExit: With status 2 if there is no such script; else as the script exits.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: {_USAGE}\n\n{__doc__}")
        return
    if not argv:
        _fail(f"no script given; usage: {_USAGE}")
    script = Path(argv[0])
    if not script.is_file():
        _fail(
            f"there is no script {script}; timm's are not in its wheel, take them from the tag of "
            "your timm version at https://github.com/huggingface/pytorch-image-models"
        )
    sys.argv = [str(script), *argv[1:]]
    # As `python SCRIPT` does, so that a script finds the modules beside it.
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
