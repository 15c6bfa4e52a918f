"""The one error that is meant for the person at the keyboard."""

import sys
from collections.abc import Callable

__all__ = ["InputError", "run_tool"]


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line that says what to do.

    Tools catch it in ``main`` and end with ``error: <message>`` on stderr and a non-zero status,
    never with a traceback; every other exception is a defect of ours and keeps its traceback.
    """


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool's ``main``; an :class:`InputError` or Ctrl-C ends it in one line.

    Args:
        main: Takes its arguments from ``sys.argv``.

    Raises:
        SystemExit: With status 1 after an InputError, 130 after Ctrl-C.
    """
    try:
        main()
    except InputError as error:
        # A data loader's worker puts its traceback before the message; the last line is ours.
        line = str(error).splitlines()[-1].removeprefix(f"{__name__}.InputError: ")
        print(f"error: {line}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        sys.exit(130)
