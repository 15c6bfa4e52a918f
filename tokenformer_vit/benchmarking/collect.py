"""Take the records of ``benchmark --all`` into the repository."""

import json
import shutil
import zipfile
import zlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import new_folder, write_whole

from .records import read_benchmark

# Folders of the repository that have records.
_PLACES = ("configs/results", "tokenformer_vit/benchmarking/results", "ablations/results")
_COMMON = ("command", "commit", "date", "hardware", "versions")


class Taken(NamedTuple):
    """A record that is new or changed.

    Args:
        path: File in the repository.
        record: Its content.
        before: The bytes that the file had, or None.
    """

    path: Path
    record: dict[str, Any]
    before: bytes | None

    def put_back(self) -> None:
        """Restore the file as it was."""
        if self.before is None:
            self.path.unlink(missing_ok=True)
        else:
            write_whole(self.path, self.before)


def unpacked(source: Path, results: Path) -> Path:
    """Return the folder of a device; an archive is unpacked into ``results`` first.

    Raises:
        InputError: If there is no such folder or archive.
    """
    if not source.is_file():
        _check_result(source, source)
        return source
    folder = results / source.stem
    with new_folder(folder) as partial:
        try:
            shutil.unpack_archive(source, partial, "zip")
        except (shutil.ReadError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise InputError(
                f"{source} is damaged or no archive ({error}): copy it again from the machine that "
                "made it"
            ) from error
        _check_result(partial, source)
    return folder


def _check_result(folder: Path, source: Path) -> None:
    """Check that a folder from ``source`` has records.

    Raises:
        InputError: If it has not.
    """
    if not (folder / "records").is_dir():
        raise InputError(f"{source} is no result of `benchmark --all`: give its folder or archive")


def take(folder: Path, root: Path, replace: bool) -> tuple[list[Taken], list[str]]:
    """Copy the records of a device to where the repository has its records.

    Args:
        folder: Folder of the device.
        root: The repository.
        replace: Also replace records of other devices, and records that have more.

    Returns:
        The records that are new or changed, and a line for each record.

    Raises:
        InputError: If a file is not a record, or would replace one of another device or one that
            has more; then nothing is copied.
        OSError: If a file cannot be written; then the records are as before.
    """
    records = folder / "records"
    taken, lines = [], []
    for path in sorted(records.rglob("*.json")):
        name = path.relative_to(records)
        new, target = _read(path, name), root / name
        before = target.read_bytes() if target.is_file() else None
        if before == path.read_bytes():
            lines.append(f"unchanged  {name}")
            continue
        if before is not None and not replace:
            _check_replaced(path, new, target, json.loads(before))
        lines.append(f"{'new' if before is None else 'replaced':9}  {name}")
        taken.append((Taken(target, new, before), path))
    try:
        for each, path in taken:
            each.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(each.path, path.read_bytes())
    except BaseException:
        for each, _ in taken:
            each.put_back()
        raise
    return [each for each, _ in taken], lines


def _read(path: Path, name: Path) -> dict[str, Any]:
    """Read and check a record.

    Raises:
        InputError: If the file is not a record, or not where records are.
    """
    if not name.as_posix().startswith(tuple(f"{place}/" for place in _PLACES)):
        raise InputError(f"{path} is in none of the folders {', '.join(_PLACES)}; delete it")
    if name.name.startswith("speed_"):
        read_benchmark(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in _COMMON if not record[key]]
        _contents(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a record ({error!r}); delete it") from error
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}; delete it")
    return record


def _check_replaced(
    path: Path, new: Mapping[str, Any], target: Path, old: Mapping[str, Any]
) -> None:
    """Refuse to lose what an older record has.

    Raises:
        InputError: If it is of another device, or has more.
    """
    if old["hardware"] != new["hardware"]:
        raise InputError(
            f"{target} is of {old['hardware']}, and {path} is of {new['hardware']}: rename one of "
            "them, or give --replace"
        )
    if old.get("n", 0) > new.get("n", 0):
        raise InputError(
            f"{target} has {old['n']} rounds or steps, and {path} has {new['n']}: measure more, or "
            "give --replace"
        )
    if old.get("epochs", 0) > new.get("epochs", 0):
        raise InputError(
            f"{target} has {old['epochs']} epochs, and {path} has {new.get('epochs', 0)}: train "
            "longer, or give --replace"
        )
    if lost := _contents(old) - _contents(new):
        some = ", ".join(sorted(" ".join(map(str, each)) for each in lost)[:3])
        raise InputError(
            f"{target} has {len(lost)} measurements that {path} lacks, such as {some}: measure "
            "them too, or give --replace"
        )


def _contents(record: Mapping[str, Any]) -> set[tuple[Hashable, ...]]:
    """Return what a record has measured; what failed is left out."""
    if "groups" in record:
        return {
            (group["mode"], group["dtype"], f"batch {group['batch_size']}", row["variant"])
            for group in record["groups"]
            for row in group["variants"]
            if "failed" not in row
        }
    if "runs" in record:
        return {(run["data"], "data") for run in record["runs"]}
    if "profiles" in record:
        group = (record["mode"], record["dtype"], f"batch {record['batch_size']}")
        return {(*group, each["variant"]) for each in record["profiles"]}
    if "failed" in record:
        return set()
    record["seconds"]  # of a training
    return {("a finished training",)}
