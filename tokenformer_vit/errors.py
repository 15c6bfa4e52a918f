"""The error for mistakes that a user can correct."""


class InputError(ValueError):
    """An input cannot be used; a command prints the message, one line, and ends with status 2."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's message in one line, cut to ``limit`` characters unless it is our own."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, InputError) or len(text) <= limit else f"{text[:limit]}..."
