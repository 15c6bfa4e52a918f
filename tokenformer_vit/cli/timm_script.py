"""Run one of timm's own scripts with the TokenFormer models registered.

timm finds only models that are imported, and its scripts have no option that imports a package::

    tokenformer-vit timm path/to/validate.py DATA --model tokenformer_base ...

In several processes::

    torchrun --nproc_per_node=8 -m tokenformer_vit timm path/to/train.py DATA ...
"""

import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import tokenformer_vit.models  # noqa: F401  # registers them
from tokenformer_vit.errors import InputError

_USAGE = "tokenformer-vit timm SCRIPT [ARGS...]"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would, after our models are registered.

    Args:
        argv: Path of the script and its arguments; default ``sys.argv[1:]``. ``--help`` before the
            path explains this command; everything after the path belongs to the script.

    Raises:
        InputError: If there is no such script.
        SystemExit: With the script's exit status.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: {_USAGE}\n\n{__doc__}")
        return
    if not argv:
        raise InputError(f"no script is given; usage: {_USAGE}")
    script = Path(argv[0])
    if not script.is_file():
        raise InputError(
            f"there is no script {script}; timm's wheel contains no scripts: download them for "
            "your version of timm from https://github.com/huggingface/pytorch-image-models"
        )
    sys.argv = [str(script), *argv[1:]]
    # As `python SCRIPT` does, so that a script finds the modules beside it.
    sys.path.insert(0, str(script.resolve().parent))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # timm's train.py catches it
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:  # an error of the script: print it as Python does
        traceback.print_exc()
        sys.exit(1)
