"""Write files and folders as a whole; a `.NAME.partial` of a killed process is replaced later."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from .errors import InputError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; an old file stays until the new one is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file as :func:`whole_file` does."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files get into ``folder`` if the block ends without an error."""
    there = folder.is_dir()
    # An old folder may be on another disk than its parent.
    partial = (folder if there else folder.parent) / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in list(partial.iterdir()):
            file.chmod(partial.stat().st_mode & 0o666)  # libraries may write files as 0600
            if there:
                os.replace(file, folder / file.name)
        if not there:
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_folder(folder: Path, option: str) -> None:
    """Make a folder for results before hours of work; refuse the ``option`` that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        raise InputError(f"cannot make {folder} ({error}): choose another {option}") from error


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a work directory until the block, or the process, ends."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise InputError(f"{folder} is in use: wait, or choose another --work-dir") from error
