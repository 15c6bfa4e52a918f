"""Set up a command before its slow imports; the package imports this module first.

Importing PyTorch takes seconds. Ctrl-C during that time ends a command of this project in one line.
Other programs keep Python's traceback.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = "interrupted; finished results are kept"
_ROOT = Path(__file__).resolve().parents[1]


def leave_on_interrupt() -> None:
    """Let Ctrl-C end the process at once, in one line and with status 130."""
    signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # Imported libraries may turn an exception into another error.
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat a scheduler's SIGTERM, and a terminal that is closed, like Ctrl-C.

    A shell starts background commands with SIGINT ignored, and their child processes would ignore
    it, too. Inside this context they do not.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _is_command() -> bool:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:  # `python -m` imports the package before it knows the file
        return sys.argv[:1] == ["-m"] and "tokenformer_vit" in sys.orig_argv
    path = Path(file).resolve()
    # On Windows the console command is an archive that contains __main__.py.
    installed = path.name == "tokenformer-vit" or path.parent.name == "tokenformer-vit.exe"
    return installed or path.parent in (_ROOT / "tools", _ROOT / "ablations")


# Is the running program a command of this project?
IS_COMMAND = _is_command()

if IS_COMMAND:
    leave_on_interrupt()
    # OpenMP's threads spin while they wait. That takes the CPU from data loading workers, and more
    # time than the training itself. PyTorch reads this variable when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
