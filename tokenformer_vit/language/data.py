"""Text as tokens on the disk.

A folder holds ``train.bin`` and ``val.bin``, the tokens of all documents one after the other as
uint16 or uint32; ``meta.json``; and the files of the tokenizer. Training reads rows of N + 1 tokens
that overlap by one: with the inputs ``row[:-1]`` and the targets ``row[1:]``, every token except
the first is predicted exactly once.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, load_dataset
from numpy.typing import NDArray
from tqdm import tqdm

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import new_folder

from .tokenizers import encode

Texts = Dataset | IterableDataset

META = "meta.json"
# How datasets reads a file, by its suffix before that of a compression.
_READERS = {".txt": "text", ".parquet": "parquet", ".csv": "csv"}
_READERS |= dict.fromkeys((".json", ".jsonl", ".ndjson"), "json")
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# Characters. A smaller held-out part is less than a paragraph: such a file is not divided.
_LEAST_HELD_OUT = 1024


def find_files(paths: Sequence[Path]) -> list[Path]:
    """List files, whatever their names, and the text files in folders, sorted, without links."""
    found = []
    for path in paths:
        inside = (file for file in sorted(path.rglob("[!.]*")) if file.is_file() and _reader(file))
        files = [path] if path.is_file() else list(inside)
        if not files:
            raise InputError(
                f"{path} is no file, and no folder with files that end in {', '.join(_READERS)}; "
                "--hub NAME reads from the hub"
            )
        found += [file.resolve() for file in files]
    return found


def _reader(file: Path) -> str | None:
    plain = file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file
    return _READERS.get(plain.suffix.lower())


def load_files(
    files: Sequence[Path], column: str = "text", documents: str = "file", streaming: bool = False
) -> list[Texts]:
    """Open files of text, JSON, parquet or CSV, also compressed ones; see :func:`load_texts`.

    ``documents`` says what a document in a text file is: ``file``, ``paragraph`` or ``line``. With
    ``streaming`` the files are read while they are used, instead of a copy in Arrow's form.
    """
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(_reader(file) or "text", []).append(str(file))
    sample = {"file": "document"}.get(documents, documents)
    how: dict[str, Any] = {"text": {"sample_by": sample, "encoding": "utf-8-sig"}}
    # pandas would read NA as nothing, and 007 as 7.
    how["csv"] = {"usecols": [column], "converters": {column: str}, "keep_default_na": False}
    texts = []
    for reader, names in groups.items():
        own = {"streaming": streaming, "data_files": names, **how.get(reader, {})}
        texts.append(load_texts(reader, "text" if reader == "text" else column, **own))
    return texts


def load_texts(name: str, column: str, /, **how: Any) -> Texts:
    """Open a data set of ``datasets.load_dataset`` as one with a single column ``text``."""
    try:
        texts: Any = load_dataset(name, **{"split": "train", **how})
        next(iter(texts), None)  # with streaming, reading begins here
    except Exception as error:  # of datasets, the hub and the readers
        raise unreadable(how.get("data_files", name), error) from error
    names = texts.column_names
    if names and column not in names:
        raise InputError(
            f"{how.get('data_files', name)} has no column {column!r}; choose one with --column: "
            f"{', '.join(names)}"
        )
    texts = texts.select_columns([column])
    return texts if column == "text" else texts.rename_column(column, "text")


def unreadable(source: Any, error: BaseException) -> InputError:
    """Return the error of a text that cannot be read."""
    return InputError(
        f"the text in {source} cannot be read: {one_line(error.__cause__ or error)}; give UTF-8 "
        "text, JSON lines or parquet, and the right --column"
    )


def reversal_text(lines: int) -> Dataset:
    """Draw different lines of 16 digits and their reversal, such as ``8307>7038``: one document."""
    numbers = (f"{drawn:016d}" for drawn in random.Random(0).sample(range(10**16), lines))
    return Dataset.from_dict({"text": ["".join(f"{word}>{word[::-1]}\n" for word in numbers)]})


def divide(text: str | None, val_share: float) -> list[tuple[str, bool]]:
    """Divide a document into parts, each with whether it is held out.

    A long document is cut at the start of a line, or of a word. Short ones are chosen whole by a
    hash of their content, which keeps equal ones on one side. Nothing is left of an empty one.
    """
    if not isinstance(text, str | None):
        raise InputError(f"{text!r} in a row is no text: choose a column of texts with --column")
    if not text:
        return []
    if len(text) * val_share < _LEAST_HELD_OUT:
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return [(text, number < val_share * 2**64)]
    place = int(len(text) * (1 - val_share))
    cut = text.find("\n", place - 1) + 1
    if cut in (0, len(text)):  # text8 is a single line
        cut = text.find(" ", place) + 1 or place
    return [(part, held) for part, held in ((text[cut:], True), (text[:cut], False)) if part]


def training_texts(texts: Sequence[Texts], val_share: float, limit: int) -> Iterator[str]:
    """Iterate over texts that a tokenizer may be trained on, up to a number of characters."""
    rows: Any = (row for each in texts for row in each)
    for row in rows:
        for part, held_out in divide(row["text"], val_share):
            if not held_out:
                yield part
                limit -= len(part)
        if limit <= 0:
            return


def prepare_text(
    texts: Sequence[Texts],
    target: Path,
    tokenizer: Any,
    context_length: int,
    val_share: float = 0.0,
    *,
    val_texts: Sequence[Texts] = (),
    limit_tokens: int | None = None,
    workers: int = 1,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a folder of tokens, which must not exist; it appears when it is complete.

    The end-of-text token of the tokenizer, if there is one, follows each document. ``val_texts``
    are held out, and ``val_share`` of ``texts``. Reading ends after ``limit_tokens`` of training.
    ``datasets`` keeps the tokens of each finished source in its cache: the same call goes on there
    after an interruption. Returns the content of ``meta.json``, which also has ``about``.
    """
    if target.exists():
        raise InputError(f"{target} already exists; choose another OUT, or remove it")
    if not 0 <= val_share < 1:
        raise InputError(f"--val-share must be at least 0 and below 1, but got {val_share}")
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    how = {"tokenizer": tokenizer, "dtype": dtype}
    splits = {
        name: {"tokens": 0, "documents": 0, "bytes": 0}
        for name in (["train", "val"] if val_texts or val_share else ["train"])
    }
    with (
        new_folder(target) as folder,
        tqdm(total=limit_tokens, unit="token", unit_scale=True) as bar,
    ):
        files = {name: (folder / f"{name}.bin").open("wb") for name in splits}
        for name, ids, size in _tokens(texts, val_texts, val_share, workers, how):
            ids.tofile(files[name])
            for key, more in (("tokens", len(ids)), ("documents", 1), ("bytes", size)):
                splits[name][key] += more
            bar.update(len(ids) if name == "train" or not limit_tokens else 0)
            if limit_tokens and splits["train"]["tokens"] >= limit_tokens:
                break
        for name, file in files.items():
            file.close()
            if splits[name]["tokens"] <= context_length:
                raise InputError(
                    f"the {name} part has {splits[name]['tokens']} tokens, too few for one row of "
                    f"{context_length + 1}: give more text, a smaller --context-length, or another "
                    "--val-share (0 for no val part)"
                )
        tokenizer.save_pretrained(folder)
        meta = {
            "context_length": context_length,
            "vocab_size": vocab_size,
            "end": tokenizer.eos_token_id,
            "dtype": dtype,
            "splits": splits,
            **(about or {}),
        }
        (folder / META).write_text(json.dumps(meta, indent=2), encoding="utf-8")
    return meta


def _tokens(
    texts: Sequence[Texts], val_texts: Sequence[Texts], val_share: float, workers: int, how: Any
) -> Iterator[tuple[str, NDArray[np.integer], int]]:
    """Yield the split, the tokens and the UTF-8 bytes of each document, held-out ones first."""
    parts = [(each, "val", 0.0) for each in val_texts] + [(each, None, val_share) for each in texts]
    for each, split, share in parts:
        # A row may be a whole file: a thousand of them may not fit in memory.
        size = 16 if isinstance(each, Dataset) and len(each) < 10_000 else 1000
        given: dict[str, Any] = {"batched": True, "batch_size": size, "remove_columns": ["text"]}
        if isinstance(each, Dataset):
            given |= {"num_proc": workers if workers > 1 else None, "writer_batch_size": size}
        tokens: Any = each.map(_tokenize, fn_kwargs={**how, "val_share": share}, **given)
        for batch in tokens.with_format("numpy").iter(size):
            for ids, held_out, length in zip(*batch.values(), strict=True):
                name = split or ("val" if held_out else "train")
                yield name, np.asarray(ids, how["dtype"]), int(length)


def _tokenize(
    batch: Mapping[str, list[Any]], tokenizer: Any, dtype: str, val_share: float
) -> dict[str, list[Any]]:
    parts = [part for text in batch["text"] for part in divide(text, val_share)]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = encode(tokenizer, [text for text, _ in parts])
    return {
        "tokens": [np.array(each + end, dtype) for each in ids],
        "held_out": [held_out for _, held_out in parts],
        "bytes": [len(text.encode()) for text, _ in parts],
    }


def read_text_meta(folder: Path) -> dict[str, Any]:
    """Read ``meta.json`` of a folder of tokens that :func:`prepare_text` wrote."""
    try:
        return json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fault = (
            f"{folder} has no whole {META}" if folder.is_dir() else f"there is no folder {folder}"
        )
        raise InputError(
            f"{fault}; make a folder of tokens with tokenformer-vit prepare-text"
        ) from error


def open_tokens(folder: Path, split: str) -> NDArray[np.integer]:
    """Open the (T,) tokens of a split, memory-mapped: read when they are used."""
    meta = read_text_meta(folder)
    if split not in meta["splits"]:
        raise InputError(f"{folder} has no split {split!r}; it has: {', '.join(meta['splits'])}")
    file, wanted = folder / f"{split}.bin", meta["splits"][split]["tokens"]
    size = file.stat().st_size if file.is_file() else 0
    if size != wanted * np.dtype(meta["dtype"]).itemsize:
        raise InputError(
            f"{file} has {size} bytes, but {META} says {wanted} tokens of {meta['dtype']}: copy or "
            "prepare it again"
        )
    return np.memmap(file, meta["dtype"], mode="r")
