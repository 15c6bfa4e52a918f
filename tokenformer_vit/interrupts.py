"""What a command sets before anything that takes time to import; imported first.

Importing PyTorch takes seconds. In a program of other people's, an interrupt there has its usual
traceback. In this project's own commands it ends the process in one line.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

__all__ = ["INTERRUPTED", "leave_on_interrupt"]

INTERRUPTED = "interrupted; what was finished is kept"
_ROOT = Path(__file__).resolve().parents[1]


def leave_on_interrupt() -> None:
    """From now on, end the process at Ctrl-C at once, in one line and with status 130."""
    signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # Whatever Python is doing, an import above all, must not turn this into another error.
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


def _is_command() -> bool:
    """Tell whether the running program is one of this project's."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:  # `python -m`, which imports the package first
        return sys.argv[:1] == ["-m"] and "tokenformer_vit" in sys.orig_argv
    path = Path(file).resolve()
    return path.stem == "tokenformer-vit" or path.parent in (_ROOT / "tools", _ROOT / "ablations")


if _is_command():
    leave_on_interrupt()
    # OpenMP's threads spin while they wait. Where data loading workers share the cores, as on a
    # CPU, that costs more time than the training itself. PyTorch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
