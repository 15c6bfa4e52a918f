"""Where images come from: parquet files of the Hugging Face hub, scikit-learn's digits."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokenformer_vit.errors import InputError

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
