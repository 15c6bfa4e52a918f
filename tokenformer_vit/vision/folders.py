"""Write and check class folders of images. An interrupted write can be continued."""

import io
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from timm.utils.misc import natural_key
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole

from .images import FORMATS, IMAGE_SUFFIXES, read_image, say_left_out, scan_images
from .sources import Split

# The suffix follows from the content, not from the name in the source.
_SUFFIXES = {
    "BMP": ".bmp",
    "GIF": ".gif",
    "JPEG": ".jpg",
    "JPEG2000": ".jp2",
    "MPO": ".jpg",  # a JPEG that holds a second picture; readers see the first
    "PNG": ".png",
    "PPM": ".ppm",
    "TIFF": ".tif",
    "WEBP": ".webp",
}
# This package reads all of these. By default, timm and mmpretrain silently skip other suffixes.
_READ_BY_ALL = {".jpg", ".png"}


def folder_names(names: Sequence[str]) -> list[str]:
    """Name class folders so that every library gives each class the same index.

    Libraries number classes by sorting folder names. torchvision and mmpretrain sort them as text;
    timm ignores case and compares digits as numbers. If one of these orders differs from ``names``,
    or if two names would give the same folder, the index is put first: ``03_chain_saw``.

    Args:
        names: Class names in the order of their index.

    Returns:
        One folder name for each class.
    """
    shown = ["".join(c if c.isprintable() else "_" for c in name) for name in names]
    safe = [re.sub(r'[/\\:*?"<>|]', "_", name).strip(" .") for name in shown]
    plain = (
        sorted(safe) == safe
        and sorted(safe, key=_natural_key) == safe
        and len({name.casefold() for name in safe}) == len(safe)
        and all(safe)
    )
    if plain:
        return safe
    width = len(str(len(safe) - 1))
    return [f"{index:0{width}d}_{name}" for index, name in enumerate(safe)]


def _natural_key(name: str) -> tuple:
    # timm's key alternates text and numbers. A tuple, because the type checker rejects a list.
    return tuple(natural_key(name))


def unpack(splits: dict[str, Split], folders: Sequence[str], target: Path) -> None:
    """Write the missing images of all splits into the target, and print a summary.

    Args:
        splits: Splits by folder name, ``train`` and ``val``.
        folders: Folder name of every class.
        target: Folder for ``train`` and ``val``. It may hold part of the same result.

    Raises:
        InputError: If the target holds other images, or a row is not an image.
        OSError: If a file cannot be written; ``filename`` names the file.
    """
    missing = {name: _missing(split, folders, target / name) for name, split in splits.items()}
    suffixes: Counter[str] = Counter()
    for name, split in splits.items():
        # Every class, even without images in this split: mmpretrain numbers the folders.
        for class_folder in folders:
            (target / name / class_folder).mkdir(parents=True, exist_ok=True)
        rows = missing[name]
        with tqdm(
            total=len(split.labels), initial=len(split.labels) - len(rows), desc=name, unit="image"
        ) as bar:
            for row, data, where in split.read(rows):
                suffix = _suffix(data, where)
                suffixes[suffix] += 1
                class_folder = target / name / folders[int(split.labels[row])]
                write_whole(class_folder / (split.stem(row) + suffix), data, sync=False)
                bar.update()
    _report(splits, folders, target, suffixes)


def _missing(split: Split, folders: Sequence[str], root: Path) -> list[int]:
    """Return the rows that are not yet written; raise if the folder holds other images."""
    present: dict[str, set[str]] = {folder: set() for folder in folders}
    if root.is_dir():
        for folder in os.scandir(root):
            if not folder.is_dir():
                continue
            if folder.name not in present:
                raise InputError(
                    f"{root} already holds another data set (class {folder.name!r}); "
                    "choose an empty TARGET"
                )
            for file in os.scandir(folder.path):
                stem, suffix = os.path.splitext(file.name)
                if suffix.lower() in IMAGE_SUFFIXES:
                    present[folder.name].add(stem)
    rows = []
    for row, label in enumerate(split.labels):
        try:
            present[folders[int(label)]].remove(split.stem(row))
        except KeyError:
            rows.append(row)
    others = [f"{folder}/{stem}" for folder, stems in present.items() for stem in stems]
    if others:
        raise InputError(
            f"{root} holds {len(others)} images that this command would not write, such as "
            f"{min(others)}; choose an empty TARGET, or give the --limit of the earlier run"
        )
    return rows


def _suffix(data: bytes | None, where: str) -> str:
    if data is None:
        raise InputError(
            f"{where}: the row has the name of an image file but no bytes; use a data set that "
            "contains its images"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _SUFFIXES[image.format or ""]
    except Image.DecompressionBombError as error:
        raise InputError(f"{where}: the image is too large: {error}; remove the row") from error
    except UnidentifiedImageError as error:
        raise InputError(
            f"{where}: {len(data)} bytes are not a readable image ({', '.join(FORMATS)}); "
            "download the shard again, or remove the row"
        ) from error
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise InputError(
            f"{where}: {len(data)} bytes are not a readable image ({error}); download the shard "
            "again"
        ) from error


def _report(
    splits: dict[str, Split], folders: Sequence[str], target: Path, suffixes: Counter[str]
) -> None:
    complete = True
    for name, split in splits.items():
        used = len(np.unique(split.labels))
        complete &= used == len(folders)
        print(f"{name}: {len(split.labels)} images of {used} classes in {target / name}")
        if used < len(folders):
            print(
                f"warning: {len(folders) - used} of {len(folders)} classes have no image in "
                f"{name}, and training needs at least one each: give a larger --limit",
                file=sys.stderr,
            )
    for suffix in sorted(set(suffixes) - _READ_BY_ALL):
        print(
            f"warning: {suffixes[suffix]} files are {suffix}; mmpretrain and timm skip them unless "
            "you set extensions=... (mmpretrain) or add_img_extensions (timm)",
            file=sys.stderr,
        )
    print(f"classes: {len(folders)} ({folders[0]} ... {folders[-1]})")
    if complete:
        print(f"next: tokenformer-vit train CONFIG --data-root {shlex.quote(str(target))}")


def check_images(target: Path, workers: int) -> list[Path]:
    """Decode every image in a folder, in several processes, and print the unreadable ones.

    Args:
        target: Folder, searched at any depth; images are recognised by their suffix.
        workers: Number of processes.

    Returns:
        The unreadable files.

    Raises:
        InputError: If the folder does not exist or has no image, or if a process is killed.
    """
    if not target.is_dir():
        raise InputError(f"there is no folder {target}; --check takes a folder of images")
    left_out: Counter[str] = Counter()
    paths = [Path(entry.path) for entry in scan_images(target, left_out)]
    say_left_out(left_out, target)
    if not paths:
        raise InputError(f"there is no image in {target}; --check takes a folder of images")
    bad = []
    # Ctrl-C also reaches the workers, but only this process should handle it.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, initializer=signal.signal, initargs=ignore) as pool:
        reasons = pool.map(_why_unreadable, paths, chunksize=32)
        try:
            for path, reason in zip(tqdm(paths, desc="check", unit="image"), reasons, strict=True):
                if reason:
                    bad.append(path)
                    tqdm.write(f"unreadable: {reason}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except BrokenProcessPool as error:
            raise InputError(
                f"a process that decoded images of {target} was killed, perhaps for lack of "
                "memory; give fewer --workers"
            ) from error
    if bad:
        print(f"{len(bad)} of {len(paths)} images are unreadable: replace or delete them")
    else:
        print(f"all {len(paths)} images in {target} can be read")
    return bad


def _why_unreadable(path: Path) -> str | None:
    try:
        read_image(path)  # as in training; it decodes every pixel
    except InputError as error:
        return str(error)
    return None
