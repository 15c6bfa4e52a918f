"""Images in the rows of Hugging Face data sets: memory-mapped, without unpacking."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from tokenformer_vit.errors import InputError, one_line

from .sources import MOST_CLASSES, find_shards, numbered, one_folder, opened

if TYPE_CHECKING:
    from datasets import Dataset, Features

# hf://datasets/OWNER/NAME, then perhaps @REVISION, then perhaps /FOLDER, as huggingface_hub has it.
_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/\w+/\w+|[^/]+))?(?:/(.+))?")
_BATCH = 100  # rows that are copied at a time; by default a row group, of which there may be none
_HUB_FORM = "hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@REVISION/FOLDER"


class ImageRows:
    """The images of a split, in the order of the folders that ``prepare-data`` unpacks them into.

    They are sorted by label, and within a label they keep the order of the rows. An image is
    read only when it is used. Workers get the names of the files, and the order in shared memory.

    Args:
        rows: Data set with a column ``image`` of files.
        labels: (N,) int64 label of each row.
        classes: Class names, in the order of the labels.
        where: Returns what a message calls a row.

    Attributes:
        labels: (N,) int64 label of each image, in this order.
        classes: Class names.
    """

    def __init__(
        self,
        rows: "Dataset",
        labels: np.ndarray,
        classes: Sequence[str],
        where: Callable[[int], str],
    ) -> None:
        self.classes = tuple(classes)
        self._rows, self._where = rows, where
        # As tensors, which the processes of a data loader share.
        self._order = torch.from_numpy(np.argsort(labels, kind="stable"))
        self.labels = torch.from_numpy(labels)[self._order]

    def keep(self, indices: int | Sequence[int]) -> None:
        """Keep the first ``indices`` images, the last ones if negative, or those of a sequence."""
        kept: Any = indices
        if isinstance(indices, int):
            kept = slice(indices) if indices >= 0 else slice(indices, None)
        self._order, self.labels = self._order[kept], self.labels[kept]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._order)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return an image in mmpretrain's words.

        Returns:
            ``img_path``, its file and row; ``img_bytes``, the content of an image file; and
            ``gt_label``.
        """
        row = int(self._order[index])
        return {
            "img_path": self._where(row),
            # To index the data set itself takes ten times as long.
            "img_bytes": self._rows.data.column("image")[row]["bytes"].as_py(),
            "gt_label": int(self.labels[index]),
        }


def _contents(rows: "Dataset") -> Any:
    """Return the content of the image files of all rows, memory-mapped."""
    from pyarrow.compute import struct_field  # type: ignore[attr-defined]

    return struct_field(rows.data.column("image"), "bytes")


def open_images(
    source: str | Path,
    split: str,
    image_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
) -> ImageRows:
    """Open the images of a data set in one of Hugging Face's forms.

    Images are read from Arrow files, because a single row of a parquet file costs the decompression
    of its whole row group. The library ``datasets`` copies the rows of parquet files into Arrow
    files when they are first opened. It keeps them in ``HF_DATASETS_CACHE``
    (``~/.cache/huggingface/datasets``) and needs as much room there as the parquet files take.
    Nothing is written beside the data. The rows are copied again when the path, the time, the size
    or the footer of a parquet file changes.

    A folder that ``save_to_disk`` wrote must come from someone you trust. Its columns are checked
    before they are used, but a damaged Arrow file may still crash the process.

    Args:
        source: Folder with parquet files, whose names begin with the split; a folder that
            ``save_to_disk`` wrote; or ``hf://datasets/OWNER/NAME`` on the Hugging Face hub, where
            ``@REVISION`` and ``/FOLDER`` may follow. Of the hub, only parquet files of the split
            are downloaded.
        split: Name of the split, such as ``train`` or ``validation``.
        image_column: Name of the column of images. Default: ``image`` or ``img``, or the only one
            of the type ``Image``.
        label_column: Name of the column of labels. Default: ``label``, ``labels`` or
            ``fine_label``, or the only one of the type ``ClassLabel``.
        classes: Class names. Default: the names of the ``ClassLabel``, or else the numbers.

    Returns:
        The images, sorted by label.

    Raises:
        InputError: If ``datasets`` is not installed; the source, the split or a column is missing;
            the split has no rows; a file cannot be read or downloaded, or the copy not be written;
            a copy has another number of rows; two files have other classes; an image is missing;
            or a label is missing or out of range.
    """
    folder, is_saved = _find(source, split)
    find_columns = partial(_find_columns, image_column, label_column)
    rows, columns, where = (_open_saved if is_saved else _open_parquet)(folder, split, find_columns)
    rows = rows.with_format(None).select_columns(columns)
    rows = rows.rename_columns(dict(zip(columns, ("image", "label"), strict=True)))
    names = classes or _names(rows.features["label"])
    labels = _read_labels(rows, names, where)
    _check_contents(rows, where)
    return ImageRows(rows, labels, names or numbered(int(labels.max()) + 1), where)


def _find(source: str | Path, split: str) -> tuple[Path, bool]:
    """Return the folder of a source, and whether ``save_to_disk`` wrote it."""
    try:
        from datasets import logging
    except ImportError as error:
        raise InputError(
            "reading these images needs Hugging Face's datasets: in the clone, run "
            "pip install '.[train]'"
        ) from error
    logging.set_verbosity(logging.CRITICAL)  # an error that it logs is also raised
    is_on_hub = str(source).startswith("hf:")
    folder = _download(str(source), split) if is_on_hub else Path(source).expanduser()
    return folder, any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def hub_name(source: str) -> str | None:
    """Return OWNER/NAME of a data set on the hub, or None if it is elsewhere."""
    found = _HUB.fullmatch(source.rstrip("/"))
    return found and found[1]


class _Where:
    """Names a row by its file and its number there.

    Args:
        files: Files of the rows, in order.
        starts: Number of rows before each file.
    """

    def __init__(self, files: Sequence[Path], starts: Sequence[int]) -> None:
        self._files, self._starts = files, np.array(starts)

    def __call__(self, row: int) -> str:
        file = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._files[file]}, row {row - self._starts[file]}"


@contextmanager
def _explained(what: str, way_out: str):
    """Report any error of the libraries in one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the libraries of the hub and of Arrow raise errors of many types
        reason = one_line(error.__cause__ or error)
        raise InputError(f"{what} ({reason}); {way_out}") from error


def _download(source: str, split: str) -> Path:
    """Download the parquet files of a split into the cache of the hub, and return their folder."""
    found = _HUB.fullmatch(source.rstrip("/"))
    if found is None:
        raise InputError(f"{source} is not a data set of the hub: write {_HUB_FORM}")
    from huggingface_hub import snapshot_download

    name, revision, inside = found.groups()
    pattern = f"{inside}/*{split}*.parquet" if inside else f"*{split}*.parquet"
    way_out = (
        "check the name and the revision; for a gated data set, accept its terms on "
        f"https://huggingface.co/datasets/{name} and run `hf auth login`"
    )
    with _explained(f"{source} cannot be downloaded", way_out):
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=[pattern]
        )
    if not any(Path(folder).rglob("*.parquet")):
        raise InputError(
            f"{source} has no parquet file of the split {split!r} (its files: "
            f"https://huggingface.co/datasets/{name}/tree/{revision or 'main'}); the hub may have "
            f"made a copy: hf://datasets/{name}@refs/convert/parquet"
        )
    return Path(folder, inside or "")


def _open_saved(folder: Path, split: str, find_columns: Any) -> tuple["Dataset", list[str], _Where]:
    """Open a folder of ``save_to_disk``; return also the columns of images and labels."""
    saved, place = _load_saved(folder, split)
    _check_any(len(saved), split, folder)
    columns = find_columns(saved.features, place)
    with _explained(f"{place} is damaged", "save it again"):
        # Reads where each image begins, but no image: 0.04 s for 1.3 million.
        saved.data.select(columns).validate(full=True)
    return saved, columns, _Where([place], [0])


def _load_saved(folder: Path, split: str) -> tuple["Dataset", Path]:
    """Map a split of a folder of ``save_to_disk`` into memory; return also its folder."""
    from datasets import DatasetDict, load_from_disk

    with _explained(f"{folder} is damaged", "save it again"):
        saved = load_from_disk(str(folder))
    if isinstance(saved, DatasetDict):
        return saved[_check_split(split, saved, folder)], folder / split
    if saved.split is not None:
        _check_split(split, [str(saved.split)], folder)
    return saved, folder


def _open_parquet(
    folder: Path, split: str, find_columns: Any
) -> tuple["Dataset", list[str], _Where]:
    """Open the parquet files of a split as Arrow files; return also the columns."""
    import pyarrow.parquet as parquet
    from datasets import Dataset, Features, NamedSplit, config

    shards = find_shards(folder)
    paths = one_folder(split, shards[_check_split(split, shards, folder)])
    starts, names, columns, metadata, digest = [0], None, [], None, sha256()
    for path in paths:
        with opened(parquet, path) as file:
            starts.append(starts[-1] + file.metadata.num_rows)
            digest.update(_identity(path, file.metadata.serialized_size))
            if columns and file.schema_arrow.metadata == metadata:
                continue  # to read thousands of class names again would take long
            metadata = file.schema_arrow.metadata
            features = Features.from_arrow_schema(file.schema_arrow)
        own = find_columns(features, path)
        if columns and (own, _names(features[own[1]])) != (columns, names):
            raise InputError(
                f"{path} has other columns or class names than {paths[0]}: they belong to "
                "different data sets; give the folder of one"
            )
        columns, names = own, _names(features[own[1]])
    expected = re.search(r"-of-(\d+)$", paths[0].stem)
    if expected and int(expected[1]) != len(paths) and os.environ.get("RANK", "0") == "0":
        tqdm.write(f"{folder} has {len(paths)} of {expected[1]} files of {split}", file=sys.stderr)
    _check_any(starts[-1], split, folder)
    way_out = "make room, set HF_DATASETS_CACHE to another folder, or download damaged files again"
    copy = f"the rows of {split} in {folder} cannot be copied to {config.HF_DATASETS_CACHE}"
    with _explained(copy, way_out):
        patterns: Any = [escape(str(path)) for path in paths]  # datasets takes paths as patterns
        # datasets compares only the path and the time of a file; `cp -p` keeps the time.
        name: Any = digest.hexdigest()[:16]  # begins the name of the copy's folder
        rows: Any = Dataset.from_parquet(
            patterns, NamedSplit(split), columns=columns, batch_size=_BATCH, config_name=name
        )
    if len(rows) != starts[-1]:
        raise InputError(
            f"{config.HF_DATASETS_CACHE}/parquet/{name}-* has {len(rows)} rows of {split}, but the "
            f"files in {folder} have {starts[-1]}; delete this copy, it is then made again"
        )
    return rows, columns, _Where(paths, starts)


def _identity(path: Path, footer: int) -> bytes:
    """Return the size of a parquet file and its footer, with the size and place of each column."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - footer - 8)  # the footer, its length, and b"PAR1"
        return b"%d " % size + file.read()


def _check_any(number: int, split: str, folder: Path) -> None:
    if number == 0:
        raise InputError(
            f"{folder} has no data of {split}: its files have no rows; use another split, or "
            "download the files again"
        )


def _names(feature: Any) -> list[str] | None:
    return getattr(feature, "names", None)


def _check_split(split: str, splits: Any, folder: Path) -> str:
    if split not in splits:
        raise InputError(
            f"{folder} has no split {split!r}: set split to one of {', '.join(map(str, splits))}"
        )
    return split


def _find_columns(
    image: str | None, label: str | None, features: "Features", place: Path
) -> list[str]:
    """Return the columns of images and labels; both may be given."""
    from datasets import ClassLabel, Image
    from pyarrow import types

    def find(key: str, given: str | None, usual: Sequence[str], kind: type, fits: Any) -> str:
        what = key.replace("_column", "s")
        possible = [field.name for field in features.arrow_schema if fits(field.type)]
        if not possible:
            raise InputError(
                f"{place} has no column of {what}, only {', '.join(features)}; give other data"
            )
        if given is not None and given in possible:
            return given
        typed = [name for name in possible if isinstance(features[name], kind)]
        known = [name for name in usual if name in possible] or (typed if len(typed) == 1 else [])
        if given is None and known:
            return known[0]
        problem = f"column {given!r} has no {what}" if given else f"several may have {what}"
        raise InputError(f"{place}: {problem}; set {key} to one of {', '.join(possible)}")

    usual = ("label", "labels", "fine_label")
    return [
        find("image_column", image, ("image", "img"), Image, _is_image),
        find("label_column", label, usual, ClassLabel, types.is_integer),
    ]


def _is_image(kind: Any) -> bool:
    """Tell whether a type of Arrow holds the content and the path of a file."""
    from pyarrow import types

    return types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}


def _read_labels(rows: "Dataset", names: Sequence[str] | None, where: _Where) -> np.ndarray:
    """Read and check all labels; return (N,) int64."""
    values = rows.data.column("label")
    # An unsigned number beyond int64 becomes negative.
    labels = values.cast("int64", safe=False).fill_null(-1).to_numpy().astype(np.int64)
    count = len(names) if names else MOST_CLASSES
    bad = (labels < 0) | (labels >= count)
    if bad.any():
        row = int(bad.argmax())
        raise InputError(
            f"{where(row)}: the label is {values[row]}, but must be 0 to {count - 1}; use a split "
            "with labels, or give all class names"
        )
    return labels


def _check_contents(rows: "Dataset", where: _Where) -> None:
    """Check that each row has the content of an image file; a path would be of another machine."""
    contents = _contents(rows)
    if contents.null_count:
        row = contents.is_null().index(True).as_py()
        raise InputError(
            f"{where(row)}: there is no image, or only the path of one; use data that contain "
            "their images"
        )
