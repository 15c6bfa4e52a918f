"""The error for mistakes that a user can correct."""


class InputError(ValueError):
    """An input cannot be used; the message is one line that says why and what to do.

    A command ends with ``error: <message>`` on stderr and exit status 2, without a traceback.
    """


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's message in one line, cut to ``limit`` characters unless it is our own."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, InputError) or len(text) <= limit else f"{text[:limit]}..."
