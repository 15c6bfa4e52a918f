"""Shared parts of the commands: errors and exit status, printed text, types of arguments."""

import argparse
import logging
import math
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from .errors import InputError
from .interrupts import INTERRUPTED, leave_on_interrupt

# Modules that the extras of setup.py install.
EXTRAS = {
    "train": (
        *("mmengine", "mmcv", "mmpretrain", "matplotlib", "pandas"),
        *("pyarrow", "sklearn"),  # sources of images
    ),
    "language": ("transformers", "tokenizers", "datasets", "zstandard"),
    "evaluation": ("lm_eval", "accelerate"),
}
# Characters that change the direction of the text after them; Python calls some printable.
_BIDI = set(map(chr, (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def run_tool(main: Callable[[], None], status: int = 1) -> None:
    """Run the ``main`` of a command.

    An error that the user can correct ends it in one line, any other with Python's traceback. A
    first Ctrl-C ends the command in one line, a second one ends it at once.

    Args:
        main: Takes its arguments from ``sys.argv``.
        status: Exit status after an error that the user can correct.

    Raises:
        SystemExit: With ``status`` after such an error, 130 after Ctrl-C, else as ``main`` does.
    """
    logging.raiseExceptions = False  # on a full disk, each log line would print a traceback
    if sys.stderr is None:  # closed, as by 2>&-, where progress bars and errors are written
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    try:
        # Python allows signal handlers only in the main thread.
        with suppress(ValueError):
            signal.signal(signal.SIGINT, _interrupt)
            sys.unraisablehook = _end_if_interrupted
        main()
    except (Exception, KeyboardInterrupt) as error:
        if _is_interrupt(error):
            with suppress(ValueError):
                signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
            _say(INTERRUPTED)
            sys.exit(130)
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            sys.exit(1)  # such as `head`, which has seen enough
        line = _explain(error)
        if line is None:
            raise
        _say(f"error: {line}")
        sys.exit(status)


def _is_interrupt(error: BaseException | None) -> bool:
    """Tell whether Ctrl-C caused an error: some libraries turn it into an error of their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None


def _reader_is_gone() -> bool:
    """Tell whether the reader of standard output is gone; if so, silence Python's last flush."""
    gone = False
    try:
        sys.stdout.flush()
        if hasattr(select, "poll"):  # Windows does not have it
            look = select.poll()  # under PYTHONUNBUFFERED=1 there is nothing to flush
            look.register(1, 0)
            gone = bool(look.poll(0))
    except BrokenPipeError:
        gone = True
    if gone:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _interrupt(number: int, frame: FrameType | None) -> None:
    if os.getpid() == _PROCESS:  # the parent ends a worker
        leave_on_interrupt()
    raise KeyboardInterrupt


def _end_if_interrupted(lost: Any) -> None:
    """Obey a Ctrl-C during a callback, such as one before a fork: Python drops the exception."""
    if lost.exc_type is KeyboardInterrupt and os.getpid() == _PROCESS:
        signal.raise_signal(signal.SIGINT)  # a second one ends the command at once
    sys.__unraisablehook__(lost)


_PROCESS = os.getpid()


def _explain(error: BaseException) -> str | None:
    """Say in one line what a user can correct, if anything."""
    if isinstance(error, InputError):
        # A data loader's worker puts its traceback before the message.
        return str(error).rpartition(f"{InputError.__module__}.InputError: ")[2].rstrip()
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        module = error.name.partition(".")[0]
        for extra, modules in EXTRAS.items():
            if module in modules:
                return f"{module} is not installed: in the clone, run pip install '.[{extra}]'"
    return None


def typed_command() -> str:
    """Return the command line of this process as a user types it, for a record."""
    first = sys.argv[0].split(" ") if sys.argv[0].startswith("tokenformer-vit ") else []
    return shlex.join([*(first or ["python", sys.argv[0]]), *sys.argv[1:]])


def _say(line: str) -> None:
    # A full or closed stderr must not change the exit status.
    with suppress(OSError, ValueError):
        print(printable(line), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""Escape the characters that a terminal would obey instead of showing, such as ``\x1b``.

    Args:
        text: A name or a message that may come from a file.

    Returns:
        The text in one line. Letters of every script stay as they are.
    """
    return "".join(
        char if char.isprintable() and char not in _BIDI else char.encode("unicode_escape").decode()
        for char in text
    )


def error_line(output: str, status: int) -> str:
    """Return the output line that says why a process failed; a signal gives a negative status."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # torchrun ends with its own error, which does not give the cause.
    raised = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
        and "ChildFailedError" not in line
    ]
    line = (ours or raised or lines or [f"exit status {status}, and no output"])[-1]
    return line.replace(f"{Path.cwd()}{os.sep}", "")


def command_parser(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make a parser whose ``--help`` prints ``text`` line by line, as it is written."""
    lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=lines, **options)


def number(allows: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """Make an argparse type for the numbers that ``allows`` accepts and ``words`` describes."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allows(value):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {words}")
        return value

    return parse


positive_number = number(lambda value: 0 < value < math.inf, "a finite number above 0")


def whole_number(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Make an argparse type for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        # Python refuses to read numbers of thousands of digits.
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            room = f" and at most {most}" if most < 2**63 - 1 else ""
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a whole number of at least {least}{room}"
            )
        return int(text)

    return parse
