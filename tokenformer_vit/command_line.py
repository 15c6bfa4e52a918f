"""What the command lines in tools/ share."""

import argparse
import sys
from collections.abc import Callable

from .errors import InputError

__all__ = ["printable", "run_tool", "whole_number"]


def printable(text: str) -> str:
    r"""Escape what a terminal would act on rather than show, such as ``\x1b`` or a line break.

    Names of files, classes and columns come from others. Control characters in them could move the
    cursor, bidirectional ones swap letters, and undecodable bytes cannot be printed at all.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool's ``main``; what the user can put right, and Ctrl-C, end it in one line.

    Args:
        main: Takes its arguments from ``sys.argv``.

    Raises:
        SystemExit: With status 1 after an InputError or an error of the file system that names
            its file, 130 after Ctrl-C.
    """
    try:
        main()
    except InputError as error:
        # A data loader's worker puts its traceback before the message.
        line = str(error).rpartition(f"{InputError.__module__}.InputError: ")[2].strip()
        print(f"error: {printable(line)}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {printable(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        sys.exit(130)


def whole_number(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Make an argparse type for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        # int() of more digits raises an error of its own.
        number = int(text) if text.isdecimal() and len(text) < 1000 else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        if number > most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {most}, the largest possible")
        return number

    return parse
