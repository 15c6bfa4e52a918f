"""Take the records of ``benchmark --all`` into the repository."""

import json
import shutil
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenformer_vit.errors import InputError

from .records import read_record

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
            self.path.unlink()
        else:
            self.path.write_bytes(self.before)


def unpacked(source: Path, results: Path) -> Path:
    """Return the folder of a device; an archive is unpacked into ``results`` first.

    Raises:
        InputError: If there is no such folder or archive.
    """
    folder = source
    if source.is_file():
        folder = results / source.stem
        try:
            shutil.unpack_archive(source, folder, "zip")
        except shutil.ReadError as error:
            raise InputError(f"{source} is no archive of `benchmark --all`: {error}") from error
    if not (folder / "records").is_dir():
        raise InputError(f"{source} is no result of `benchmark --all`: give its folder or archive")
    return folder


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
    for each, path in taken:
        each.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, each.path)
    return [each for each, _ in taken], lines


def _read(path: Path, name: Path) -> dict[str, Any]:
    """Read and check a record.

    Raises:
        InputError: If the file is not a record, or not where records are.
    """
    if not name.as_posix().startswith(tuple(f"{place}/" for place in _PLACES)):
        raise InputError(f"{path} is in none of the folders {', '.join(_PLACES)}; delete it")
    if name.name.startswith("speed_"):
        read_record(path)
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
    if lost := _contents(old) - _contents(new):
        some = ", ".join(sorted(" ".join(map(str, each)) for each in lost)[:3])
        raise InputError(
            f"{target} has {len(lost)} measurements that {path} lacks, such as {some}: measure "
            "them too, or give --replace"
        )


def _contents(record: Mapping[str, Any]) -> set[tuple[Hashable, ...]]:
    """Return what a record has measured; a failed run has nothing."""
    if "groups" in record:
        return {
            (group["mode"], group["dtype"], f"batch {group['batch_size']}", row["variant"])
            for group in record["groups"]
            for row in group["variants"]
        }
    if "runs" in record:
        return {(run["data"], "data") for run in record["runs"]}
    if "profiles" in record:
        return {(each["variant"],) for each in record["profiles"]}
    if "failed" in record:
        return set()
    record["seconds"]  # of a training
    return {("a finished training",)}
