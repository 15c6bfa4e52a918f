"""Turn a data set into the folders that mmpretrain, timm and torchvision read.

From a Hugging Face image data set in parquet files (ImageNet-1K, CIFAR-10, Imagenette, ...)::

    python tools/prepare_data.py SOURCE TARGET

From scikit-learn's handwritten digits, which need no download::

    python tools/prepare_data.py --digits TARGET

The result is TARGET/train/<class>/<image> and TARGET/val/<class>/<image>. Image bytes are written
as they are. Each file appears whole or not at all, under a name that follows from its shard and
row: after an interruption, the same command continues and ends with the same tree. Unpacking
reads each image's header only; this decodes every image of an existing tree and lists bad ones::

    python tools/prepare_data.py --check TARGET
"""

import argparse
import io
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from timm.utils.misc import natural_key
from tqdm import tqdm

from tokenformer_vit.errors import InputError

# Suffix by what the bytes are, not by what a name claims.
_SUFFIXES = {
    "BMP": ".bmp",
    "GIF": ".gif",
    "JPEG": ".jpg",
    "MPO": ".jpg",  # a JPEG with a second picture behind it; readers see the first
    "PNG": ".png",
    "PPM": ".ppm",
    "TIFF": ".tif",
    "WEBP": ".webp",
}
# The readers skip other suffixes in silence (mmpretrain: CustomDataset, timm: ImageDataset).
_READ_BY_ALL = {".jpg", ".png"}
_IMAGE_SUFFIXES = {*_SUFFIXES.values(), ".jpeg", ".tiff"}
_VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")  # best first
_BATCH_ROWS = 64  # images in memory at a time


@dataclass
class Split:
    """One folder of the result: train or val.

    Attributes:
        labels: Class index of every row, in order; (rows,), int64.
        stem: Gives a row's file name without suffix.
        read: Yields (row, bytes, where it came from) of the rows asked for, given in order.
    """

    labels: np.ndarray
    stem: Callable[[int], str]
    read: Callable[[Sequence[int]], Iterator[tuple[int, bytes, str]]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: With one line for people on stderr, if something cannot be done.
    """
    args = _parse(argv)
    resume = "" if args.check else "; nothing is half-written, the same command continues from here"
    try:
        if args.check:
            if check(args.target, args.workers):
                sys.exit(1)
            return
        if args.digits:
            splits, names = digits_splits()
        else:
            splits, names = parquet_splits(
                args.source, dict(args.splits or []), args.image_column, args.label_column
            )
        for name, limit in (("train", args.limit), ("val", args.limit_val)):
            if limit is not None and name in splits:
                splits[name].labels = splits[name].labels[:limit]
        unpack(splits, class_folders(names), args.target)
    except InputError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or args.target}: {error.strerror or error}{resume}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted{resume}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="folder with *.parquet, any depth")
    parser.add_argument("target", type=Path, help="folder that gets (or has) train/ and val/")
    parser.add_argument("--digits", action="store_true", help="unpack scikit-learn's digits")
    parser.add_argument("--check", action="store_true", help="decode every image below TARGET")
    parser.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help="only the first N training images; a fair slice where rows are shuffled, as on the "
        "Hub they mostly are, else perhaps of a few classes",
    )
    parser.add_argument("--limit-val", type=_positive, metavar="N", help="same, validation images")
    parser.add_argument(
        "--splits",
        type=_assignment,
        nargs="+",
        metavar="FOLDER=SPLIT",
        help="which split goes where, if not train=train and val=validation (or else test)",
    )
    parser.add_argument("--image-column", metavar="NAME", help="default: image or img")
    parser.add_argument("--label-column", metavar="NAME", default="label", help="default: label")
    parser.add_argument(
        "--workers", type=_positive, default=os.cpu_count(), help="processes of --check"
    )
    args = parser.parse_args(argv)
    if args.digits and args.check:
        parser.error("--digits and --check do different things; give one of them")
    if (args.digits or args.check) and args.source:
        parser.error("--digits and --check take TARGET alone")
    if not (args.digits or args.check or args.source):
        parser.error("give SOURCE and TARGET, or --digits TARGET, or --check TARGET")
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    folder, equals, split = text.partition("=")
    if folder not in ("train", "val") or not equals or not split:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form train=SPLIT or val=SPLIT")
    return folder, split


# ------------------------------------------------------------------------------------ sources


def parquet_splits(
    source: Path, wanted: dict[str, str], image_column: str | None, label_column: str
) -> tuple[dict[str, Split], list[str]]:
    """Open a Hugging Face image data set; labels are read and checked, images are not yet.

    Args:
        source: Folder in which parquet files are looked for at any depth.
        wanted: Source split of ``train`` and ``val``, where it is not the usual one.
        image_column: Column of {bytes, path}; None for ``image`` or ``img``.
        label_column: Column of class indices.

    Returns:
        The splits by folder name, and the class names in order of their index: those of the
        ``huggingface`` metadata, or the indices as text of equal length.

    Raises:
        InputError: If anything of that is missing or not as it should be.
    """
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise InputError(
            "reading parquet files needs pyarrow: pip install 'tokenformer-vit[data]'"
        ) from error

    if not source.is_dir():
        raise InputError(f"there is no folder {source}; SOURCE is a folder with *.parquet files")
    shards: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.parquet")):
        shards.setdefault(_split_of(path), []).append(path)
    if not shards:
        raise InputError(f"there is no *.parquet file in {source} or below")
    chosen = _choose_splits(shards, wanted, source)

    splits: dict[str, Split] = {}
    names: list[str] | None = None
    for folder, split in chosen.items():
        files, labels = [], []
        for path in shards[split]:
            try:
                file = parquet.ParquetFile(path)
                image = _image_column(file.schema_arrow, image_column, path)
                labels.append(_labels(file, label_column, path))
            except (ArrowException, OSError) as error:
                raise InputError(f"{path} is not a readable parquet file: {error}") from error
            names = names or _class_names(file.schema_arrow, label_column)
            files.append((path, image, file.metadata.num_rows))
            file.close()
        splits[folder] = Split(
            np.concatenate(labels), *_parquet_rows(parquet, ArrowException, split, files)
        )
        _check_labels(labels, names, label_column, shards[split])
    count = max(int(split.labels.max(initial=-1)) for split in splits.values()) + 1
    if count == 0:
        raise InputError(f"the parquet files in {source} have no rows")
    return splits, names or [str(i).zfill(len(str(count - 1))) for i in range(count)]


def _split_of(path: Path) -> str:
    """Split of a shard: of train-00000-of-00001.parquet, train.parquet or train/0000.parquet."""
    name = path.stem.split("-")[0]
    return path.parent.name if name.isdecimal() else name


def _choose_splits(
    shards: dict[str, list[Path]], wanted: dict[str, str], source: Path
) -> dict[str, str]:
    found = ", ".join(shards)
    chosen = {}
    if "train" in shards:
        chosen["train"] = "train"
    validation = [name for name in _VALIDATION_SPLITS if name in shards]
    if validation:
        chosen["val"] = validation[0]
    for folder, split in wanted.items():
        if split not in shards:
            raise InputError(f"{source} has no split {split!r}; it has: {found}")
        chosen[folder] = split
    if not chosen:
        raise InputError(
            f"no parquet file in {source} is named train-*, validation-* or test-*; found the "
            f"splits {found}: say which is which with --splits train=... val=..."
        )
    for split in chosen.values():
        folders = sorted({str(path.parent) for path in shards[split]})
        if len(folders) > 1:
            raise InputError(
                f"{split} shards are in several folders ({', '.join(folders)}), which may be "
                "different data sets; give the right one as SOURCE"
            )
    return chosen


def _image_column(schema: Any, name: str | None, path: Path) -> str:
    for candidate in [name] if name else ["image", "img"]:
        if candidate in schema.names:
            kind = schema.field(candidate).type
            fields = [kind.field(i).name for i in range(kind.num_fields)]
            if "bytes" not in fields:
                raise InputError(
                    f"{path}: column {candidate!r} is {kind}, not an image of {{bytes, path}}; "
                    f"name the right one with --image-column: {', '.join(schema.names)}"
                )
            return candidate
    raise InputError(
        f"{path} has no column {name or 'image or img'!r}; name the image column with "
        f"--image-column: {', '.join(schema.names)}"
    )


def _labels(file: Any, column: str, path: Path) -> np.ndarray:
    if column not in file.schema_arrow.names:
        raise InputError(
            f"{path} has no column {column!r}; name the label column with --label-column: "
            f"{', '.join(file.schema_arrow.names)}"
        )
    values = file.read(columns=[column]).column(column)
    if values.null_count:
        row = values.to_pylist().index(None)
        raise InputError(f"{path}, row {row}: the label is missing; remove the row or label it")
    labels = values.to_numpy()
    if labels.size and labels.dtype.kind not in "iu":
        raise InputError(f"{path}: column {column!r} holds {values.type}, not class indices")
    return labels.astype(np.int64)


def _check_labels(
    labels: list[np.ndarray], names: list[str] | None, column: str, paths: list[Path]
) -> None:
    for shard, path in zip(labels, paths, strict=True):
        bad = (shard < 0) | (shard >= len(names) if names else False)
        if bad.any():
            row = int(bad.argmax())
            allowed = f"0 to {len(names) - 1}" if names else "0 or more"
            raise InputError(
                f"{path}, row {row}: {column} is {shard[row]}, but must be {allowed}; a split "
                "whose labels are withheld cannot be used"
            )


def _class_names(schema: Any, column: str) -> list[str] | None:
    metadata = (schema.metadata or {}).get(b"huggingface")
    if metadata is None:
        return None
    feature = json.loads(metadata).get("info", {}).get("features", {}).get(column, {})
    return feature.get("names") or None


def _parquet_rows(
    parquet: Any, arrow_exception: type[Exception], split: str, files: list[tuple[Path, str, int]]
) -> tuple[Callable[[int], str], Callable[[Sequence[int]], Iterator[tuple[int, bytes, str]]]]:
    """Make a split's ``stem`` and ``read``; files are (path, image column, rows), in order."""
    starts = np.cumsum([0, *(rows for _, _, rows in files)])

    def stem(row: int) -> str:
        shard = int(np.searchsorted(starts, row, side="right")) - 1
        path = files[shard][0]
        prefix = path.stem if path.stem.startswith(split) else f"{split}-{path.stem}"
        return f"{prefix}_{row - starts[shard]:07d}"

    def read(wanted: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
        rows = np.asarray(wanted)
        for start, (path, column, _) in zip(starts, files, strict=False):
            first = int(start)
            try:
                with parquet.ParquetFile(path) as file:
                    for group in range(file.num_row_groups):
                        last = first + file.metadata.row_group(group).num_rows
                        here = set(rows[(rows >= first) & (rows < last)].tolist())
                        if here:
                            batches = file.iter_batches(
                                _BATCH_ROWS, row_groups=[group], columns=[f"{column}.bytes"]
                            )
                            row = first
                            for batch in batches:
                                for image in batch.column(0).field("bytes"):
                                    if row in here:
                                        where = f"{path}, row {row - start}"
                                        yield row, image.as_py(), where
                                    row += 1
                        first = last
            except (arrow_exception, OSError) as error:
                raise InputError(f"{path} is damaged ({error}); download it again") from error

    return stem, read


def digits_splits(val_fraction: float = 0.2) -> tuple[dict[str, Split], list[str]]:
    """Make splits of scikit-learn's 1,797 handwritten digits, (8, 8) grey, as PNG.

    Args:
        val_fraction: Part of every class that goes to val, drawn with a fixed seed.

    Returns:
        As :func:`parquet_splits`; the classes are the digits "0" to "9".

    Raises:
        InputError: If scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise InputError(
            "the digits come with scikit-learn: pip install 'tokenformer-vit[demo]'"
        ) from error
    digits: Any = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), 0..16 -> 0..255
    train, val = train_test_split(
        np.arange(len(pixels)), test_size=val_fraction, stratify=digits.target, random_state=0
    )

    def split_of(indices: Any) -> Split:
        def read(wanted: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
            for row in wanted:
                buffer = io.BytesIO()
                Image.fromarray(pixels[indices[row]]).save(buffer, format="PNG")
                yield row, buffer.getvalue(), f"digit {indices[row]}"

        return Split(digits.target[indices], lambda row: f"digit_{indices[row]:04d}", read)

    splits = {"train": split_of(train), "val": split_of(val)}
    return splits, [str(name) for name in digits.target_names]


# ------------------------------------------------------------------------------------ the tree


def class_folders(names: Sequence[str]) -> list[str]:
    """Name the class folders so that every reader gives each class its index.

    Readers number classes by sorting folder names, torchvision and mmpretrain as text, timm with
    digits as numbers and case ignored. Where either order is not that of ``names``, or two names
    would meet in one folder, the index goes in front: ``03_chain_saw``.

    Args:
        names: Class names in order of their index.

    Returns:
        One folder name a class.
    """
    safe = [re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name).strip(" .") for name in names]
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
    # timm's key alternates text and numbers and so compares; a tuple because types are checked.
    return tuple(natural_key(name))


def unpack(splits: dict[str, Split], folders: Sequence[str], target: Path) -> None:
    """Write what is missing of the splits, and say what there is now.

    Args:
        splits: By folder name, ``train`` and ``val``.
        folders: Folder of every class.
        target: Folder above ``train`` and ``val``; may hold part of the same result.

    Raises:
        InputError: If the target holds other images, or a row is no image.
        OSError: If a file cannot be written; its ``filename`` says which.
    """
    missing = {name: _missing(split, folders, target / name) for name, split in splits.items()}
    suffixes: Counter[str] = Counter()
    for name, split in splits.items():
        # All classes, also those of which a slice has no image: mmpretrain numbers the folders.
        for class_folder in folders:
            (target / name / class_folder).mkdir(parents=True, exist_ok=True)
        rows = missing[name]
        with tqdm(
            total=len(split.labels),
            initial=len(split.labels) - len(rows),
            desc=name,
            unit="image",
        ) as bar:
            for row, data, where in split.read(rows):
                suffix = _suffix(data, where)
                suffixes[suffix] += 1
                class_folder = target / name / folders[int(split.labels[row])]
                _write(class_folder / (split.stem(row) + suffix), data)
                bar.update()
    _report(splits, folders, target, suffixes)


def _missing(split: Split, folders: Sequence[str], root: Path) -> list[int]:
    """Rows that are not yet written, after looking that the folder holds nothing else."""
    present: dict[str, set[str]] = {folder: set() for folder in folders}
    if root.is_dir():
        for folder in os.scandir(root):
            if not folder.is_dir():
                continue
            if folder.name not in present:
                raise InputError(
                    f"{root} holds another data set already (class {folder.name!r}); "
                    "choose an empty TARGET"
                )
            for file in os.scandir(folder.path):
                stem, suffix = os.path.splitext(file.name)
                if suffix == ".partial":
                    os.unlink(file.path)  # left by a run that was killed while writing it
                elif suffix.lower() in _IMAGE_SUFFIXES:
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
            f"{min(others)}; choose an empty TARGET, or the --limit that was used before"
        )
    return rows


def _suffix(data: bytes | None, where: str) -> str:
    if data is None:
        raise InputError(f"{where}: the row names an image file but does not contain it")
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _SUFFIXES[image.format or ""]
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise InputError(
            f"{where}: {len(data)} bytes that are no readable image; download the shard again"
        ) from error
    except KeyError as error:
        raise InputError(
            f"{where}: an image in the format {error}; known are {', '.join(_SUFFIXES)}"
        ) from error


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: beside its place first, then renamed."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # A full disk is reported without the file's name.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _report(
    splits: dict[str, Split], folders: Sequence[str], target: Path, suffixes: Counter[str]
) -> None:
    for name, split in splits.items():
        used = len(np.unique(split.labels))
        print(f"{name}: {len(split.labels)} images of {used} classes in {target / name}")
        if used < len(folders):
            print(
                f"warning: {len(folders) - used} of {len(folders)} classes have no image in "
                f"{name}; mmpretrain keeps their numbers, timm and torchvision do not",
                file=sys.stderr,
            )
    for suffix in sorted(set(suffixes) - _READ_BY_ALL):
        print(
            f"warning: {suffixes[suffix]} files are {suffix}, which a reader skips unless it is "
            "told of it (mmpretrain: extensions=..., timm: add_img_extensions)",
            file=sys.stderr,
        )
    print(f"classes: {len(folders)} ({folders[0]} ... {folders[-1]})")
    print(f"next: python tools/train.py CONFIG --data-root {shlex.quote(str(target))}")


# ------------------------------------------------------------------------------------ --check


def check(target: Path, workers: int) -> list[Path]:
    """Decode every image below a folder, in several processes, and print those that fail.

    Args:
        target: Folder; images are told by suffix, at any depth.
        workers: Number of processes.

    Returns:
        The unreadable files.

    Raises:
        InputError: If there is no such folder, or no image in it.
    """
    if not target.is_dir():
        raise InputError(f"there is no folder {target}; --check takes a folder of images")
    paths = sorted(path for path in target.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES)
    if not paths:
        raise InputError(f"there is no image in {target} or below")
    bad = []
    # Ctrl-C reaches the workers too; only this process shall answer it.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, initializer=signal.signal, initargs=ignore) as pool:
        reasons = pool.map(_why_unreadable, paths, chunksize=32)
        try:
            for path, reason in zip(tqdm(paths, desc="check", unit="image"), reasons, strict=True):
                if reason:
                    bad.append(path)
                    tqdm.write(f"unreadable: {path}: {reason}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if bad:
        print(f"{len(bad)} of {len(paths)} images are unreadable: replace or delete them")
    else:
        print(f"all {len(paths)} images in {target} can be read")
    return bad


def _why_unreadable(path: Path) -> str | None:
    try:
        with Image.open(path) as image:
            image.convert("RGB")  # as training does; it decodes every pixel
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        return " ".join(str(error).split()) or type(error).__name__
    return None


if __name__ == "__main__":
    main()
