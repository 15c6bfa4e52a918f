"""Write files and folders as a whole.

A killed process leaves a `.NAME.XXXXXXXX.partial`; in a locked folder, the next owner removes it.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from .errors import InputError


@contextmanager
def whole_file(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing; an old file stays until the new one is complete and on disk.

    Of several writers, the last to end leaves its file. Without ``sync``, for thousands of small
    files, a crash of the machine may leave empty ones.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    file = partial.open("xb")  # with the permissions of umask, unlike tempfile's
    try:
        with file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes, sync: bool = True) -> None:
    """Write a file as :func:`whole_file` does."""
    with whole_file(path, sync) as file:
        file.write(data)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files get into ``folder`` if the block ends without an error.

    Of several writers, the last to end leaves its files, as one set.
    """
    # An old folder may be on another disk than its parent.
    partial = _partial(folder / folder.name if folder.is_dir() else folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # libraries may write files as 0600
        try:
            partial.rename(folder)
        except OSError:  # it is there, perhaps by another writer
            if not folder.is_dir():
                raise
            with _locked(folder, seconds=60):
                for file in partial.iterdir():
                    os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(path: Path) -> Path:
    """Return a new name beside a path, at which no link or folder can wait."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


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
    """Keep other processes out of a folder of results until the block, or the process, ends."""
    with _locked(folder):
        for left in folder.glob(".*.????????.partial"):  # by a killed owner
            if left.is_file():
                left.unlink()
        yield


def _locked(folder: Path, seconds: float = 0) -> AbstractContextManager:
    try:  # one lock a process, which may take it again
        return FileLock(folder.resolve() / ".lock", is_singleton=True).acquire(timeout=seconds)
    except Timeout as error:
        raise InputError(f"{folder} is in use: wait, or choose another folder") from error
