"""The one error that is meant for the person at the keyboard."""

__all__ = ["InputError"]


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line that says what to do.

    Tools catch it in ``main`` and end with ``error: <message>`` on stderr and a non-zero status,
    never with a traceback; every other exception is a defect of ours and keeps its traceback.
    """
