"""The error for mistakes a user can correct, and one-line messages for other libraries' errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class InputError(ValueError):
    """An input cannot be used; the message is one line that says why and what to do.

    Commands catch it in ``main`` and end with ``error: <message>`` on stderr and a non-zero status,
    without a traceback. Every other exception is a defect of this package and keeps its traceback.
    """


# pydantic's names of types, in words.
_TYPES = {
    "bool_type": "True or False",
    "dict_type": "a dict",
    "float_type": "a number",
    "list_type": "a list",
    "model_type": "a dict",
    "string_type": "a text",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory was missing; that of a CPU is a plain RuntimeError of PyTorch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # PyTorch's
        return True
    said = ("DefaultCPUAllocator: ", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in said)


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the message of an error in one line, or the name of its type if it has none.

    Args:
        error: Error of another library. The message of an :class:`InputError` is not cut.
        limit: Number of characters to keep.
    """
    text = " ".join(str(error).split())
    if isinstance(error, InputError) or len(text) <= limit:
        return text or type(error).__name__
    return f"{text[:limit]}..."


def first_fault(error: ValidationError, key: str | None = None) -> str:
    """Return the first fault that pydantic found, such as "lr is -1, but must be positive".

    Args:
        error: Error of pydantic.
        key: Name of the value; default: its keys in the checked data, joined by dots.
    """
    fault = error.errors(include_url=False)[0]
    kind, message = fault["type"], fault["msg"].removeprefix("Value error, ")
    if key is None:
        key = ".".join(map(str, fault["loc"]))
    if kind == "json_invalid":
        return message
    if kind == "missing":
        return f"{key} is missing"
    value = repr(fault["input"])
    value = value if len(value) <= 80 else f"{value[:80]}..."
    if kind in _TYPES:
        message = f"Input should be {_TYPES[kind]}"
    need = re.sub("^[A-Z][a-z]+ should ", "", message)
    return f"{key or 'it'} is {value}" + (f": {need}" if need == message else f", but must {need}")
