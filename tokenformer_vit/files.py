"""Files that appear whole under their name, or not at all."""

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, data: bytes, sync: bool = True) -> None:
    """Write a file beside its place, then rename it.

    Args:
        path: The file; what stands there before stays until the new one is complete.
        data: All of its content.
        sync: Wait until it is on the disk, so that it also survives a loss of power.

    Raises:
        OSError: If it cannot be written; ``filename`` is ``path``, and nothing half-written stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk is reported without the file's name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
