"""Write files and folders completely or not at all, and lock folders."""

import errno
import hashlib
import io
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import InputError

# Host, process and a random part. Nobody can guess the name, and a later run can tell whether the
# writer still runs.
_PARTIAL = re.compile(r"\.tokenformer-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}\.partial")
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
# On a shared disk, a partial file of another machine is left over if it is a day old.
_OLD_SECONDS = 24 * 3600

# In the error about a locked folder; a sweep finds it in the output of a training.
IN_USE = " is in use by "

_log = logging.getLogger("tokenformer_vit")


def temporary_name(path: Path) -> Path:
    """Return a name beside ``path`` for writing the file before it is complete."""
    random = secrets.token_hex(8)
    return path.parent / f".tokenformer-{_HOST}-{os.getpid()}-{random}.partial"


def write_whole(path: Path, data: bytes, sync: bool = True) -> None:
    """Write a file as :func:`whole_file` does.

    Args:
        path: File to write.
        data: Complete content.
        sync: As for :func:`whole_file`.

    Raises:
        OSError: If the file cannot be written.
    """
    with whole_file(path, sync) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Write a file under a temporary name, then rename it.

    If two processes write the same file, the last one wins. The umask sets the mode. A symbolic
    link at ``path`` is replaced; its target stays.

    Args:
        path: File to write. An old file stays until the new one is complete.
        sync: Wait until file and folder are on the disk, to survive a loss of power.

    Yields:
        The temporary file, to write to.

    Raises:
        OSError: If the file cannot be written; ``filename`` is ``path``, and no partial file stays.
    """
    partial = temporary_name(path)
    try:
        with partial.open("xb") as file:  # "x" fails if the name exists, even as a link
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if sync:
            _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):  # for a full disk, Python does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def content_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the content of files, one after another, in hexadecimal.

    Raises:
        OSError: If a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def make_folder(folder: Path, option: str) -> None:
    """Make a folder for results, unless it exists.

    Args:
        folder: The folder; missing parents are made.
        option: Option of the command that names the folder, for errors.

    Raises:
        InputError: If the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {error.filename or folder} ({error.strerror}): choose another "
            f"{option}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write to the folder {folder}; choose another {option}")


@contextmanager
def results_folder(folder: Path, option: str) -> Iterator[None]:
    """Make a folder for results, and remove it after an error if nothing was written to it.

    Hours of work must not end in a folder that cannot be made, so it is made first.

    Args:
        folder: As for :func:`make_folder`; parents that are made are also removed.
        option: As for :func:`make_folder`.

    Raises:
        InputError: If the folder cannot be made or written to.
    """
    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        make_folder(folder, option)
        yield
    except BaseException:
        with suppress(OSError):  # one that is not empty stays
            for each in made:
                each.rmdir()
        raise


def write_figure(path: Path, figure: Any, **options: Any) -> None:
    """Write a figure of matplotlib as a PNG file, with ``options`` of its ``savefig``."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    write_whole(path, picture.getvalue())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, then rename it.

    A new folder appears complete. In an existing folder, files of the same name are replaced one
    after the other, and other files stay. The umask sets the modes. A link at the place of a file
    is replaced; a link at the place of the folder is followed. Partial files of killed processes
    are removed.

    Args:
        folder: Folder to write; missing parents are made.

    Yields:
        Empty temporary folder on the same disk. After an error it is removed.

    Raises:
        OSError: If a file cannot be written; ``filename`` names it, or ``folder``.
    """
    there = folder.is_dir()
    # Inside an existing folder: it may be a link to another disk, or the root of a disk.
    place = folder if there else folder.parent
    partial = temporary_name(place / "partial")
    try:
        if not there and os.path.lexists(folder):  # the rename would name the partial folder
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if not there:
            folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(place)
        partial.mkdir()
    except OSError as error:
        named = _final_name(error, partial, folder)
        raise OSError(error.errno, error.strerror, named) from error
    try:
        yield partial
        mode = partial.stat().st_mode & 0o666  # libraries may write files as 0600
        files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        for file in files:
            file.chmod(mode)
            with file.open("rb+") as written:
                os.fsync(written.fileno())
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
        raise OSError(error.errno, reason, _final_name(error, partial, folder)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _final_name(error: OSError, partial: Path, folder: Path) -> str:
    """Return the name that the user knows: a partial folder is gone after the error."""
    if not isinstance(error.filename, str):
        return str(folder)
    named = Path(error.filename)
    return str(folder / named.relative_to(partial)) if named.is_relative_to(partial) else str(named)


def remove_leftovers(folder: Path) -> None:
    """Remove the partial files of killed processes from a folder.

    Only names that this module makes are removed, and links are not followed. Partial files of
    running processes stay. On a shared disk, partial files of other machines stay for a day.

    Args:
        folder: Folder to clean; its subfolders are not searched.
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
    """Lock a folder against other processes while a ``with`` block runs.

    On a file system without locks, a warning is logged and the block runs.

    Args:
        folder: Folder for the file ``.lock``, which names the process with the lock. The file
            stays; the lock ends with the process, even if it is killed.
        way_out: What the user can do, other than wait or stop the process that has the lock.

    Raises:
        InputError: If another process has the lock; the message names it.
        OSError: If the file cannot be written.
    """
    # Following a link would overwrite the file of somebody else.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(folder / ".lock", flags, 0o666), "r+b") as file:
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                file.seek(0)
                holder = file.read(200).decode(errors="replace").strip() or "another process"
                raise InputError(
                    f"{folder}{IN_USE}{holder}: wait for it, stop it, or {way_out}"
                ) from error
            _log.warning(
                "%s is on a file system without locks (%s): make sure that no other process "
                "writes there.",
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

        os.lseek(file, 1 << 30, os.SEEK_SET)  # beyond the text, which others must be able to read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        # Data loading workers inherit an flock, and may outlive a killed process.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return  # a folder cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
