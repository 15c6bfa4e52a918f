"""Files and folders that appear whole under their name or not at all, and locks on folders."""

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import InputError

__all__ = ["locked_folder", "new_folder", "remove_leftovers", "temporary_name", "write_whole"]

# host, process and a random part: nobody can guess the name, and a later run can tell whether its
# writer still lives.
_PARTIAL = re.compile(r"\.tokenformer-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}\.partial")
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
# A leftover of another machine on a shared disk counts as one after a day.
_OLD_SECONDS = 24 * 3600

_log = logging.getLogger("tokenformer_vit")


def temporary_name(path: Path) -> Path:
    """Name a place beside ``path`` where it can be written until it is complete."""
    random = secrets.token_hex(8)
    return path.parent / f".tokenformer-{_HOST}-{os.getpid()}-{random}.partial"


def write_whole(path: Path, data: bytes, sync: bool = True) -> None:
    """Write a file beside its place, then rename it.

    Two writers of the same file do not disturb each other: the last one wins. The file gets the
    mode that the umask allows. A symbolic link at ``path`` is replaced; its target stays.

    Args:
        path: The file; what stands there before stays until the new one is complete.
        data: All of its content.
        sync: Wait until file and folder are on the disk, to survive a loss of power.

    Raises:
        OSError: If it cannot be written; ``filename`` is ``path``, and nothing half-written stays.
    """
    partial = temporary_name(path)
    try:
        with partial.open("xb") as file:  # "x" fails on any existing name, links included
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if sync:
            _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk is reported without the file's name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write into, and put its content in place at the end.

    Where ``folder`` does not exist, it appears whole. Else each file replaces the one of its name,
    one after the other, and other files stay. All files get the mode that the umask allows. A link
    in place of a file is replaced, and one in place of the folder is followed. Leftovers of killed
    writers are removed.

    Args:
        folder: The folder; its parents are made.

    Yields:
        An empty folder on the same disk. If an error occurs, it is removed.

    Raises:
        OSError: If something cannot be written; ``filename`` names it, or else ``folder``.
    """
    there = folder.is_dir()
    try:
        if not there:
            folder.parent.mkdir(parents=True, exist_ok=True)
        # Within a folder that is there: it may be a link to, or the root of, another disk.
        place = folder if there else folder.parent
        remove_leftovers(place)
        partial = temporary_name(place / "partial")
        partial.mkdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error
    try:
        yield partial
        mode = partial.stat().st_mode & 0o666  # libraries may write files as 0600
        files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        for file in files:
            file.chmod(mode)
            _sync_file(file)
        if there:
            for file in files:
                target = folder / file.relative_to(partial)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        else:
            partial.rename(folder)
        _sync_folder(place)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, reason, error.filename or str(folder)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder.

    Only names that this module makes are touched, links are not followed, and what a process that
    still runs is writing stays. On a shared disk, leftovers of other machines stay for a day.

    Args:
        folder: The folder; its subfolders are left alone.
    """
    for entry in os.scandir(folder):
        match = _PARTIAL.fullmatch(entry.name)
        if match is None or not _is_left(entry, match[1], int(match[2])):
            continue
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _is_left(entry: os.DirEntry, host: str, process: int) -> bool:
    if host == _HOST and sys.platform != "win32":  # there, signal 0 is Ctrl-C
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass  # it runs under another user
        return False
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_SECONDS
    except OSError:
        return False


@contextmanager
def locked_folder(folder: Path, way_out: str = "choose another --work-dir") -> Iterator[None]:
    """Keep other processes from writing into a folder while a ``with`` block runs.

    A file system that knows no locks is no reason to refuse; a line on the log says so.

    Args:
        folder: Gets a file ``.lock`` that says who holds the lock. The file stays; the lock ends
            with the process, even if it is killed.
        way_out: What to do if another process holds it, besides to wait for it or to stop it.

    Raises:
        InputError: If another process holds the lock; the message names it.
        OSError: If the file cannot be written.
    """
    # Not through a link, which would give somebody's file this content.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(folder / ".lock", flags, 0o666), "r+b") as file:
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                file.seek(0)
                holder = file.read(200).decode(errors="replace").strip() or "another process"
                raise InputError(
                    f"{folder} is in use by {holder}: wait for it, stop it, or {way_out}"
                ) from error
            _log.warning(
                "%s is on a file system without locks (%s): take care that no other process "
                "writes into it.",
                folder,
                error.strerror,
            )
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
        yield


def _lock(file: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, 1 << 30, os.SEEK_SET)  # a byte that nobody reads: readers must see the text
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        # Not flock: data loading workers inherit that one and may outlive a killed process.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return  # a folder cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
