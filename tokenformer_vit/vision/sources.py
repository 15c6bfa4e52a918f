"""Sources of images: parquet files from the Hugging Face hub, and scikit-learn's digits."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokenformer_vit.errors import InputError, one_line

_VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")  # best first
_BATCH_ROWS = 64  # images in memory at a time
# For a data set without class names. Each class is a folder, and one wrong label could make many.
MOST_CLASSES = 100_000


@dataclass
class Split:
    """The rows of one folder, train or val.

    Attributes:
        labels: (rows,) int64 class index of every row.
        stem: Function that returns the file name of a row, without suffix.
        read: Function that yields (row, bytes, source) for the given rows, which are in order.
    """

    labels: np.ndarray
    stem: Callable[[int], str]
    read: Callable[[Sequence[int]], Iterator[tuple[int, bytes, str]]]


def parquet_splits(
    source: Path, wanted: dict[str, str], image_column: str | None, label_column: str
) -> tuple[dict[str, Split], list[str]]:
    """Open a Hugging Face image data set. Labels are read and checked; images are not read yet.

    Args:
        source: Folder that is searched for parquet files, at any depth.
        wanted: Source split for ``train`` and ``val``, if it has an unusual name.
        image_column: Name of the column of {bytes, path}; None for ``image`` or ``img``.
        label_column: Name of the column of class indices.

    Returns:
        The splits by folder name, and the class names in the order of their index. The names come
        from the ``huggingface`` metadata; without it, they are the indices as text, padded with
        zeros.

    Raises:
        InputError: If files, splits, columns or labels are missing or wrong.
    """
    import pyarrow.parquet as parquet  # of the extra [train]

    shards = find_shards(source)
    chosen = _choose_splits(shards, wanted, source)

    splits: dict[str, Split] = {}
    names: list[str] | None = None
    found: dict[Path, np.ndarray] = {}
    for folder, split in chosen.items():
        files = []
        for path in shards[split]:
            with opened(parquet, path) as file:
                image = _image_column(file.schema_arrow, image_column, path)
                found[path] = _labels(file, label_column, path)
                own = _class_names(file.schema_arrow, label_column, path)
            if names and own and names != own:
                raise InputError(
                    f"{path} has the classes {_few(own)}, but other files have {_few(names)}: they "
                    "belong to different data sets; give one data set as SOURCE"
                )
            names = names or own
            files.append((path, image, len(found[path])))
        labels = np.concatenate([found[path] for path, _, _ in files])
        splits[folder] = Split(labels, *_parquet_rows(parquet, split, files))
    _check_labels(found, names, label_column)
    count = max(int(split.labels.max(initial=-1)) for split in splits.values()) + 1
    if count == 0:
        raise InputError(f"the parquet files in {source} have no rows; download them again")
    return splits, names or numbered(count)


def numbered(count: int) -> list[str]:
    """Return names of classes that have none: their indices, padded with zeros."""
    return [str(index).zfill(len(str(count - 1))) for index in range(count)]


def find_shards(source: Path) -> dict[str, list[Path]]:
    """Find the parquet files in a folder, at any depth.

    Returns:
        The files by split, sorted. The split is the beginning of a file's name.

    Raises:
        InputError: If there is no such folder, or no such file in it.
    """
    if not source.is_dir():
        raise InputError(f"there is no folder {source}; give a folder with *.parquet files")
    shards: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.parquet")):
        shards.setdefault(_split_of(path), []).append(path)
    if not shards:
        raise InputError(
            f"there is no *.parquet file in {source}; give a folder with *.parquet files"
        )
    return shards


def one_folder(split: str, paths: list[Path]) -> list[Path]:
    """Return the files of a split, which must be in the same folder."""
    folders = sorted({str(path.parent) for path in paths})
    if len(folders) > 1:
        raise InputError(
            f"{split} shards are in several folders ({', '.join(folders)}), perhaps of "
            "different data sets; give one of the folders"
        )
    return paths


def _split_of(path: Path) -> str:
    """Return the split: train-00000-of-00001.parquet, train.parquet or train/0000.parquet."""
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
            raise InputError(f"{source} has no split {split!r}; choose one of {found}")
        chosen[folder] = split
    if not chosen:
        raise InputError(
            f"no parquet file in {source} is named train-*, validation-* or test-*; found the "
            f"splits {found}: assign them with --splits train=... val=..."
        )
    for split in chosen.values():
        one_folder(split, shards[split])
    return chosen


def _image_column(schema: Any, name: str | None, path: Path) -> str:
    from pyarrow import types

    for candidate in [name] if name else ["image", "img"]:
        if candidate in schema.names:
            kind = schema.field(candidate).type
            at = kind.get_field_index("bytes") if types.is_struct(kind) else -1
            if at < 0 or not (
                types.is_binary(kind.field(at).type) or types.is_large_binary(kind.field(at).type)
            ):
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
        raise InputError(
            f"{path}: column {column!r} holds {values.type}, not class indices; name the label "
            "column with --label-column"
        )
    if len(labels) != file.metadata.num_rows:
        raise InputError(
            f"{path} is damaged: it should have {file.metadata.num_rows} rows, but column "
            f"{column!r} has {len(labels)}; download it again"
        )
    return labels.astype(np.int64)


def _check_labels(labels: dict[Path, np.ndarray], names: list[str] | None, column: str) -> None:
    count = len(names) if names else MOST_CLASSES
    for path, shard in labels.items():
        bad = (shard < 0) | (shard >= count)
        if bad.any():
            row = int(bad.argmax())
            raise InputError(
                f"{path}, row {row}: {column} is {shard[row]}, but must be 0 to {count - 1}"
                f"{'' if names else ' if classes have no names'}; use a split with labels"
            )


def _class_names(schema: Any, column: str, path: Path) -> list[str] | None:
    """Read the class names that the library datasets writes into the metadata, if any."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    if metadata is None:
        return None
    try:
        feature = json.loads(metadata)["info"]["features"][column]
        names = feature.get("names")
    except KeyError:
        return None
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: its `huggingface` metadata cannot be read ({error}); write the file again "
            "with the library datasets, or without metadata"
        ) from error
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise InputError(
            f"{path}: the class names in its `huggingface` metadata must be a list of strings, but "
            f"are {names!r:.100}; write the file again with the library datasets"
        )
    return names or None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")


@contextmanager
def opened(parquet: Any, path: Path) -> Iterator[Any]:
    """Open a parquet file; turn errors of pyarrow in the ``with`` block into an InputError.

    Args:
        parquet: The module ``pyarrow.parquet``.
        path: The file.

    Yields:
        Its ``ParquetFile``.
    """
    try:
        if not path.is_file():  # a named pipe would be waited for
            raise OSError("it is not a regular file")
        with parquet.ParquetFile(path) as file:
            yield file
    except InputError:
        raise
    except Exception as error:  # on damaged data, pyarrow raises more than its own errors
        raise InputError(
            f"{path} is not a readable parquet file: {one_line(error)}; download it again"
        ) from error


def _parquet_rows(
    parquet: Any, split: str, files: list[tuple[Path, str, int]]
) -> tuple[Callable[[int], str], Callable[[Sequence[int]], Iterator[tuple[int, bytes, str]]]]:
    """Return ``stem`` and ``read`` of a split; ``files`` are (path, image column, rows)."""
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
            with opened(parquet, path) as file:
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
                                    yield row, image.as_py(), f"{path}, row {row - start}"
                                row += 1
                        if row != last:
                            raise OSError(f"row group {group} lacks {last - row} images")
                    first = last

    return stem, read


def digits_splits() -> tuple[dict[str, Split], list[str]]:
    """Make splits from scikit-learn's 1,797 handwritten digits, 8 × 8 grey pixels, as PNG.

    Returns:
        The splits by folder name, and the class names "0" to "9". A fifth of every class goes to
        val, drawn with a fixed seed.
    """
    from sklearn.datasets import load_digits  # of the extra [train]
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), 0..16 -> 0..255
    train, val = train_test_split(
        np.arange(len(pixels)), test_size=0.2, stratify=digits.target, random_state=0
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
