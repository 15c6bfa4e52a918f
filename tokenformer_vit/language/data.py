"""Token files of language models: rows of tokens in memory-mapped Arrow files.

A folder holds ``meta.json``, the files of the tokenizer, and for every split
``<split>-00000.arrow``, ``<split>-00001.arrow``, ...: streams of one column ``input_ids``, lists
of context_length + 1 tokens. Rows overlap by one token. With the inputs ``row[:-1]`` and the
targets ``row[1:]``, every token except the first is predicted exactly once.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenformer_vit.errors import InputError, one_line

from .schemas import TextMeta, WriterState, read_json

if TYPE_CHECKING:
    from datasets import Dataset

# Exists while a folder is being written: what is done, and where to resume.
PROGRESS = "progress.json"
META = "meta.json"


def read_text_meta(folder: Path) -> TextMeta:
    """Read the description of a folder of tokens.

    Args:
        folder: Folder that ``tokenformer-vit prepare-text`` wrote.

    Returns:
        ``context_length``; ``vocab_size``, the number of entries of the tokenizer; ``end``, the
        number of the end-of-text token, or None; ``tokenizer``, ``sources`` and ``settings`` of
        the command; and ``splits``: for each split the number of its ``rows``, and of the
        ``tokens``, ``documents`` and UTF-8 ``bytes`` of the text that they were cut from.

    Raises:
        InputError: If there is no such folder, it is unfinished, or it is not a folder of tokens.
        OSError: If the description cannot be read.
    """
    file = folder / META
    if not file.is_file():
        if (partial_folder(folder) / PROGRESS).is_file():
            raise InputError(
                f"{folder} is not finished: run the same prepare-text command again to resume it"
            )
        missing = f"{folder} has no {META}" if folder.is_dir() else f"there is no folder {folder}"
        raise InputError(f"{missing}; make a folder of tokens with tokenformer-vit prepare-text")
    way_out = "make it again with tokenformer-vit prepare-text"
    meta = read_json(file, TextMeta, "a description of tokens", way_out)
    for split, counts in meta["splits"].items():
        if counts["rows"] and counts["tokens"] <= counts["rows"] * meta["context_length"]:
            raise InputError(
                f"{file} is damaged: {counts['tokens']} tokens cannot fill {counts['rows']} rows "
                f"of the {split} part; {way_out}"
            )
    return meta


def open_rows(folder: Path, split: str) -> "Dataset":
    """Open the rows of a split; they are memory-mapped, and read only when they are used.

    Args:
        folder: Folder that ``tokenformer-vit prepare-text`` wrote.
        split: Name of the split, such as ``train`` or ``val``.

    Returns:
        Data set in numpy's format: ``dataset[row]["input_ids"]`` is (context_length + 1,), int64.

    Raises:
        InputError: In the cases of :func:`read_text_meta`; or if there is no such split, it has no
            rows, or a file is missing or damaged.
    """
    try:
        from datasets import Dataset, concatenate_datasets
    except ImportError as error:
        raise InputError(
            "reading tokens needs Hugging Face's datasets: in the clone, run "
            "pip install '.[language]'"
        ) from error
    meta = read_text_meta(folder)
    if split not in meta["splits"]:
        raise InputError(f"{folder} has no split {split!r}; it has: {', '.join(meta['splits'])}")
    expected, length = meta["splits"][split]["rows"], meta["context_length"] + 1
    shards = []
    for path in sorted(folder.glob(f"{split}-*.arrow")):
        try:
            shard = Dataset.from_file(str(path))
        except Exception as error:  # pyarrow raises errors of many types
            raise InputError(
                f"{path} is damaged ({one_line(error)}); prepare the text again"
            ) from error
        column = shard.features.get("input_ids")
        kind = getattr(getattr(column, "feature", None), "dtype", None)
        if getattr(column, "length", None) != length or kind not in ("uint16", "uint32"):
            raise InputError(
                f"{path} does not hold rows of {length} tokens as {folder / META} says; prepare "
                "the text again"
            )
        shards.append(shard)
    rows = sum(map(len, shards))
    if rows != expected:
        raise InputError(
            f"the {split} files in {folder} hold {rows} rows, but its {META} says {expected}: a "
            "file is missing or damaged; copy or prepare them again"
        )
    if not rows:
        raise InputError(f"the split {split!r} in {folder} has no rows; prepare more text")
    return concatenate_datasets(shards).with_format("numpy")


def stored_rows(dataset: "Dataset") -> np.ndarray:
    """Read all rows of a data set in their stored type.

    Args:
        dataset: Data set of :func:`open_rows`.

    Returns:
        (R, context_length + 1) uint16 or uint32, a quarter or a half of the memory of int64.
    """
    chunks = dataset.data.column("input_ids").chunks
    return np.concatenate([chunk.flatten().to_numpy().reshape(len(chunk), -1) for chunk in chunks])


def partial_folder(folder: Path) -> Path:
    """Return the folder in which tokens are written until they are complete."""
    return folder.parent / f"{folder.name}.partial"


class SplitWriter:
    """Cuts the tokens of a split into rows and writes them to Arrow files.

    Args:
        folder: Folder of the files.
        split: Name of the split, such as ``train`` or ``val``.
        context_length: Number of tokens of a row less one.
        vocab_size: Number of entries of the tokenizer; up to 65,536 are stored as uint16, more as
            uint32.
        state: Result of :meth:`state`, to resume with the next file. A file of this name is
            replaced.

    Attributes:
        counts: Number of ``rows`` written and ``tokens`` received. The caller counts ``documents``
            and ``bytes``.
        shard_tokens: Number of tokens in the open file.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        context_length: int,
        vocab_size: int,
        state: WriterState | None = None,
    ) -> None:
        import pyarrow as pa

        none = {"rows": 0, "tokens": 0, "documents": 0, "bytes": 0}
        begun: Any = state or {"counts": none, "shards": 0, "rest": []}
        self.counts: dict[str, int] = {**begun["counts"]}
        self.shard_tokens = 0
        self._shards: int = begun["shards"]
        self._folder, self._split, self._length = folder, split, context_length
        self._dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self._rest = np.array(begun["rest"], self._dtype)
        self._file: Any = None
        self._stream: Any = None
        self._pa = pa
        self._type = pa.list_(pa.from_numpy_dtype(self._dtype), context_length + 1)

    @property
    def left_over(self) -> int:
        """Number of tokens after the last row; they do not fill a row yet."""
        return max(len(self._rest) - 1, 0) if self.counts["rows"] else len(self._rest)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._split}-{self._shards:05d}.arrow"

    def add(self, tokens: Sequence[np.ndarray]) -> None:
        """Append tokens, and write the rows that are complete.

        Args:
            tokens: Arrays of any length, in order.

        Raises:
            OSError: If a row cannot be written; the error names the file.
        """
        parts = [part.astype(self._dtype) for part in tokens]
        self.counts["tokens"] += sum(map(len, parts))
        self._rest = np.concatenate([self._rest, *parts])
        rows = (len(self._rest) - 1) // self._length
        if rows < 1:
            return
        windows = np.lib.stride_tricks.sliding_window_view(self._rest, self._length + 1)
        flat = self._pa.array(windows[:: self._length].reshape(-1))  # (rows * (N + 1),)
        column = self._pa.FixedSizeListArray.from_arrays(flat, type=self._type)
        try:
            if self._stream is None:
                self._path.unlink(missing_ok=True)  # removes a link, but not its target
                self._file = self._path.open("xb")
                schema = self._pa.schema([("input_ids", self._type)])
                self._stream = self._pa.ipc.new_stream(self._file, schema)
            self._stream.write_batch(self._pa.record_batch([column], names=["input_ids"]))
        except OSError as error:  # a full disk is reported without the file's name
            raise OSError(error.errno, error.strerror or str(error), str(self._path)) from error
        self.counts["rows"] += rows
        self.shard_tokens += rows * self._length
        self._rest = self._rest[rows * self._length :].copy()

    def close_shard(self) -> None:
        """Finish the open file, if there is one, and flush it to the disk.

        Raises:
            OSError: If it cannot be written; the error names the file.
        """
        if self._stream is None:
            return
        try:
            self._stream.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self._path)) from error
        self._stream = self._file = None
        self._shards += 1
        self.shard_tokens = 0

    def state(self) -> WriterState:
        """Return where to resume, in values for JSON; call it while no file is open."""
        counts: Any = self.counts
        return {"counts": counts, "shards": self._shards, "rest": self._rest.tolist()}
