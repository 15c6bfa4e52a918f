"""Text from files and from the Hugging Face hub, as one stream that can be resumed."""

import codecs
import glob
import gzip
import hashlib
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from tokenformer_vit.errors import InputError, one_line

from .data import META, PROGRESS, partial_folder
from .schemas import Position

if TYPE_CHECKING:
    from datasets import IterableDataset

_JSON = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_SUFFIXES = (".txt", *_JSON, ".parquet")
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")  # rows too, but nothing here reads them
_KNOWN_ROWS = 10_000  # the text column is missing if this many rows do not have it
_PIECE = 8192  # characters of a file that are tokenised at once
# Bytes. A smaller held-out part is less than a paragraph: such a file is not divided.
_LEAST_HELD_OUT = 1024
# The last place where byte-level tokenizers begin a new word: before a single space, or after a
# single line end. A text that is cut there has the same tokens as the uncut text, unless the
# tokenizer puts a space before each text; for such a one preparation.py joins the pieces again.
_WORDS = re.compile(r"(?s:.*)\S(?:\n(?=\S)|(?= \S))")
# What to do about errors of the libraries; their messages do not say it.
_WAYS_OUT = {
    "scripts are no longer supported": "the hub may have made a readable copy: "
    "--hub-revision refs/convert/parquet",
    "type zstd not supported": "`pip install zstandard`",
}


@dataclass(frozen=True)
class Piece:
    """Text of a document, or a part of it.

    Attributes:
        text: The text, not empty.
        split: ``train`` or ``val``.
        ends: Whether the document ends after this text.
    """

    text: str
    split: str
    ends: bool = True


@dataclass(frozen=True)
class Source:
    """A source of text.

    Attributes:
        name: Name for messages.
        open: Opens the stream of rows.
        piece: Turns a row into a piece; returns None for a row without text.
        size: Size of the text in UTF-8 bytes; None if it is unknown before reading.
    """

    name: str
    open: Callable[[], "IterableDataset"]
    piece: Callable[[dict[str, Any]], Piece | None]
    size: int | None = None


class TextReader:
    """Iterates over the pieces of several sources, one source after the other.

    Args:
        sources: The sources; to resume, the same as before.
        position: Result of :meth:`position`, to resume there; None to begin.

    Raises:
        InputError: During iteration, if a source cannot be read; the message names it.
    """

    def __init__(self, sources: Sequence[Source], position: Position | None = None) -> None:
        self._sources = sources
        position = position or {"source": 0, "state": None}
        self._number, self._state = position["source"], position["state"]
        self._stream: Any = None

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces after the position."""
        while self._number < len(self._sources):
            source = self._sources[self._number]
            try:
                self._stream = source.open()
                if self._state is not None:
                    self._stream.load_state_dict(self._state)
                for row in self._stream:
                    if piece := source.piece(row):
                        yield piece
            except InputError:
                raise
            except Exception as error:  # each library has its own errors
                reason = one_line(error)
                for sign, way_out in _WAYS_OUT.items():
                    if sign in reason:
                        reason += f"; {way_out}"
                raise InputError(f"{source.name} cannot be read: {reason}") from error
            self._number, self._state, self._stream = self._number + 1, None, None

    @property
    def source(self) -> str:
        """Name of the source of the last piece."""
        return self._sources[self._number].name

    def position(self) -> Position:
        """Return the position after the last piece, in values for JSON."""
        state = self._stream.state_dict() if self._stream else self._state
        return {"source": self._number, "state": state}


def find_files(path: Path, target: Path | None = None) -> list[Path]:
    """List the text files of a path: the file itself, or all files of known types in a folder.

    Args:
        path: File or folder. Folders of tokens in it are left out; their JSON files are no text.
        target: Folder of tokens that will be written, or is unfinished; left out too.

    Returns:
        The files, sorted.

    Raises:
        InputError: If the path does not exist, or the folder has no such file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"there is no file or folder {path}; --hub NAME reads from the hub")
    own = () if target is None else (target.resolve(), partial_folder(target).resolve())
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = [
            name
            for name in inner
            if Path(folder, name).resolve() not in own and not _holds_tokens(Path(folder, name))
        ]
        found += [
            Path(folder, name)
            for name in names
            if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
        ]
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise InputError(f"{path} has no text file; give files that end in {', '.join(_SUFFIXES)}")
    return files


def _holds_tokens(folder: Path) -> bool:
    """Tell whether prepare-text made a folder; others have files of these names too."""
    if folder.suffix == ".partial":
        return (folder / PROGRESS).is_file()
    return (folder / META).is_file() and any(folder.glob("*.arrow"))


def file_source(
    path: Path, documents: str, column: str, val_share: float, split: str | None = None
) -> Source:
    """Make a source of a file: rows of ``.parquet`` or JSON, or UTF-8 text.

    Args:
        path: The file. Its suffix says what it holds: ``.parquet``, or ``.json``, ``.jsonl`` or
            ``.ndjson``, also with ``.gz``; any other is text. JSON is one object a line, or a list
            of objects or of texts.
        documents: What is a document in a text file: ``file`` for the whole file, ``line`` for
            each line without its line end.
        column: Column of the text in rows.
        val_share: Share of the text that is held out, 0 to 1. Documents are chosen by a hash of
            their content, which keeps equal ones in one split. If a file is one document, its last
            part is held out, from the start of a line or word on. The stream yields this part
            first.
        split: Split of the whole file; None holds out a part.

    Returns:
        The source.

    Raises:
        InputError: If the file is empty or a table such as ``.csv``, or a Parquet file is damaged
            or does not have the column.
    """
    name = path.name.lower()
    if name.endswith(_TABLES):
        raise InputError(
            f"{path} is a table, not text: write its rows as JSON lines or parquet, and choose the "
            "text with --column (to read it as it stands, rename it to .txt)"
        )
    if not path.stat().st_size:
        raise InputError(f"{path} is empty; remove it from the sources")
    if name.endswith(".parquet"):
        _check_column(path, column)
        files = [glob.escape(str(path))]
        open_stream = _streamed(path="parquet", data_files=files, split="train", columns=[column])
    elif name.endswith(_JSON):
        open_stream = _generated(_json_rows, {"path": str(path), "column": column})
    else:
        read = _lines if documents == "line" else _parts
        arguments = {"path": str(path), "val_share": val_share, "split": split}
        return Source(
            str(path), _generated(read, arguments), lambda row: Piece(**row), path.stat().st_size
        )
    return Source(str(path), open_stream, _of_column(str(path), column, val_share, split))


def hub_source(
    name: str,
    config: str | None,
    hub_split: str,
    column: str,
    val_share: float,
    revision: str | None = None,
) -> Source:
    """Make a source of a data set of the Hugging Face hub; arguments as in ``load_dataset``."""
    where = f"the data set {name} of the Hugging Face hub"
    return Source(
        where,
        _streamed(path=name, name=config, split=hub_split, revision=revision),
        _of_column(where, column, val_share, None),
    )


def reversal_source(lines: int, digits: int, val_share: float, seed: int) -> Source:
    """Draw different lines of digits and their reversal, such as ``8307>7038``.

    Args:
        lines: Number of lines, with the held-out ones.
        digits: Number of digits on each side of ``>``, at most 18.
        val_share: Share of the lines that is held out.
        seed: Seed of the drawn digits.

    Returns:
        The source; each split is one document.

    Raises:
        InputError: If there are fewer sequences of digits than lines.
    """
    if lines > 10**digits:
        raise InputError(
            f"there are {10**digits} sequences of {digits} digits, too few for {lines} different "
            "lines: use more --digits or fewer lines"
        )
    arguments = {"lines": lines, "digits": digits, "val_share": val_share, "seed": seed}
    size = lines * (2 * digits + 2)
    return Source("digits", _generated(_reversed_digits, arguments), lambda row: Piece(**row), size)


def _streamed(**options: Any) -> Callable[[], "IterableDataset"]:
    def open_stream() -> Any:
        from datasets import load_dataset

        # Without this, old versions ask whether the code of a data set may run.
        return load_dataset(**options, streaming=True, trust_remote_code=False)

    return open_stream


def _generated(read: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[], Any]:
    def open_stream() -> Any:
        from datasets import IterableDataset

        return IterableDataset.from_generator(read, gen_kwargs=arguments)

    return open_stream


def _check_column(path: Path, column: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a readable parquet file: {error}") from error
    if column not in names:
        raise InputError(_no_column(str(path), column, names))


def _no_column(where: str, column: str, names: Sequence[str]) -> str:
    return f"{where} has no column {column!r}; choose one with --column: {', '.join(names)}"


def _of_column(
    where: str, column: str, val_share: float, split: str | None
) -> Callable[[dict[str, Any]], Piece | None]:
    def piece(row: dict[str, Any]) -> Piece | None:
        text = _text(where, row, column)
        return Piece(text, split or _split_of(text.encode(), val_share)) if text else None

    return piece


def _text(where: str, row: dict[str, Any], column: str) -> str | None:
    if column not in row:
        raise InputError(_no_column(where, column, list(row)))
    text = row[column]
    if not isinstance(text, str | None):
        raise InputError(
            f"{where}: the column {column!r} holds {type(text).__name__}, not text; choose "
            f"another one with --column: {', '.join(row)}"
        )
    return text


def _json_rows(path: str, column: str) -> Iterator[dict[str, Any]]:
    """Yield the text of each row; some rows, but not all, may lack it."""
    names: list[str] = []
    found = False
    for number, row in enumerate(_json_values(path)):
        row = {"text": row} if isinstance(row, str) else row
        if not isinstance(row, dict):
            raise InputError(
                f"{path}: row {number}, counted from 0, is {type(row).__name__}; it must be an "
                f"object whose {column!r} is a text"
            )
        names = names or list(row)
        if column in row:
            found = True
            yield {column: _text(path, row, column)}
        elif not found and number >= _KNOWN_ROWS:
            break
    if not names:
        raise InputError(f"{path} has no rows; remove it from the sources")
    if not found:
        raise InputError(_no_column(path, column, names))


def _json_values(path: str) -> Iterator[Any]:
    # Arrow's reader, which datasets uses, overflows the stack on lines with 20,000 nested levels;
    # this reader refuses more than 200.
    opened: Any = gzip.open if path.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            start = line.lstrip()[:1]
            try:
                if start == b"[":
                    yield from from_json(line + file.read())
                elif start:
                    yield from_json(line)
            except ValueError as error:
                reason = str(error).partition(" at line")[0]
                raise InputError(
                    f"{path} cannot be read: line {number} is not JSON ({reason}); write one "
                    "object a line, or a list of them"
                ) from error


def _split_of(content: bytes, val_share: float) -> str:
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return "val" if number < val_share * 2**64 else "train"


def _after_mark(file: Any) -> int:
    """Skip a byte order mark, which is no text; return the position of the first byte of text."""
    return file.seek(len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0)


def _lines(path: str, val_share: float, split: str | None) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        position = _after_mark(file)
        for line in file:
            content = line.rstrip(b"\r\n")
            if content:
                try:
                    text = content.decode()
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, position + error.start) from error
                yield {"text": text, "split": split or _split_of(content, val_share), "ends": True}
            position += len(line)


def _parts(path: str, val_share: float, split: str | None) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for name, start, stop in _cut(file, val_share, split):
            text, decoder, done = "", codecs.getincrementaldecoder("utf-8")(), False
            file.seek(start)
            while not done:
                position = file.tell()
                data = file.read(min(_PIECE, stop - position))
                pending = len(decoder.getstate()[0])
                done = position + len(data) >= stop or not data
                try:
                    text += decoder.decode(data, final=done)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, position - pending + error.start) from error
                cut = None if done else _WORDS.match(text)
                end = cut.end() if cut else len(text)
                if end:
                    yield {"text": text[:end], "split": name, "ends": done}
                text = text[end:]


def _cut(file: Any, val_share: float, split: str | None) -> list[tuple[str, int, int]]:
    """Return the split, first byte and last byte + 1 of each part of a file."""
    first = _after_mark(file)
    size = file.seek(0, 2)
    if split or not val_share:
        return [(split or "train", first, size)]
    if size * val_share < _LEAST_HELD_OUT:
        file.seek(first)
        return [(_split_of(file.read(), val_share), first, size)]
    position = file.seek(int(size * (1 - val_share)))
    line = file.readline()
    start = file.tell()
    if start == size and b" " in line:  # no line begins after it; text8 is a single line
        start = position + line.index(b" ") + 1
    return [(name, a, b) for name, a, b in (("val", start, size), ("train", first, start)) if a < b]


def _not_utf8(path: str, position: int) -> InputError:
    return InputError(
        f"{path} is not UTF-8 text: byte {position} (counted from 0) is invalid; convert the file, "
        "for example with iconv"
    )


def _reversed_digits(
    lines: int, digits: int, val_share: float, seed: int
) -> Iterator[dict[str, Any]]:
    numbers = random.Random(seed).sample(range(10**digits), lines)
    held_out = round(lines * val_share)
    for split, chosen in (("val", numbers[:held_out]), ("train", numbers[held_out:])):
        for number in range(0, len(chosen), 256):
            block = [f"{drawn:0{digits}d}" for drawn in chosen[number : number + 256]]
            text = "".join(f"{word}>{word[::-1]}\n" for word in block)
            yield {"text": text, "split": split, "ends": number + 256 >= len(chosen)}
