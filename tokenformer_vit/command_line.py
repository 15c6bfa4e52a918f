"""What the command lines in tools/ share."""

import argparse
import sys
from collections.abc import Callable

from .errors import InputError

__all__ = ["printable", "run_tool", "whole_number"]


def printable(text: str) -> str:
    """Escape what a terminal would act on rather than show, such as a line break or a colour.

    Names of files, classes and columns come from others. Control characters in them could move the
    cursor, bidirectional ones swap letters, and undecodable bytes cannot be printed at all.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def run_tool(main: Callable[[], None], status: int = 1) -> None:
    """Run a tool's ``main``; what the user can put right, and Ctrl-C, end it in one line.

    Args:
        main: Takes its arguments from ``sys.argv``.
        status: Exit status after an error.

    Raises:
        SystemExit: With ``status`` after an InputError or an error of the file system that names
            its file, 130 after Ctrl-C.
    """
    try:
        main()
    except InputError as error:
        # A data loader's worker puts its traceback before the message; the last line is ours.
        line = str(error).splitlines()[-1].removeprefix(f"{InputError.__module__}.InputError: ")
        print(f"error: {line}", file=sys.stderr)
        sys.exit(status)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(status)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        sys.exit(130)


def whole_number(least: int) -> Callable[[str], int]:
    """Make an argparse type for whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse
