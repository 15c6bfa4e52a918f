"""Turn text of any size into tokens on the disk, as a stream that can be interrupted."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import locked_folder, new_folder, remove_leftovers, write_whole

from .corpora import Piece, Source, TextReader
from .data import META, PROGRESS, SplitWriter, partial_folder, read_text_meta
from .schemas import Progress, TextMeta, read_json
from .tokenizers import load_tokenizer

_BATCH = 2**21  # characters that are tokenised at once
_LONGEST = 2**23  # characters of a file that are joined; their tokens take about a gigabyte
# The text as it is: "<|endoftext|>" in it does not end it.
_AS_IT_IS = {
    "add_special_tokens": False,
    "split_special_tokens": True,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,
}
_TOKENIZER_BYTES = 2**30  # of text are enough to train a tokenizer
_LOCK = ".lock"  # file of locked_folder
_SHARD = re.compile(r"(train|val)-\d{5,}\.arrow")
_NO_PROGRESS = ("the progress of prepare-text", "move its folder away")


def prepare_text(
    sources: Sequence[Source],
    target: Path,
    make_tokenizer: Callable[[], PreTrainedTokenizerBase],
    context_length: int,
    settings: dict[str, Any],
    *,
    held_out: bool = True,
    limit_tokens: int | None = None,
    shard_tokens: int = 100_000_000,
) -> TextMeta:
    """Write a folder of tokens as :mod:`tokenformer_vit.language.data` describes it.

    The files go to ``<target>.partial``, which is renamed when it is complete. After an
    interruption the same call resumes after the last finished file, and gives the same result. If
    the target is already complete, nothing is done. Other folders are not changed.

    Args:
        sources: Sources, read in order. The end-of-text token of the tokenizer, if there is one,
            follows each document. A row may hold parts of several documents.
        target: The folder.
        make_tokenizer: Makes the tokenizer; called once, at the beginning.
        context_length: Number of tokens of a row less one.
        settings: All settings that change the result, in values for JSON, with ``tokenizer`` and
            ``sources``. A folder that was begun with other settings is refused.
        held_out: Whether there is a split ``val``.
        limit_tokens: Number of training tokens. Reading ends after the piece that reaches it; None
            for no limit.
        shard_tokens: Number of tokens in a file. A file ends after the batch that reaches it.

    Returns:
        The description of the folder; see :func:`read_text_meta`.

    Raises:
        InputError: If the folder is something else or was made with other settings, another
            process is writing it, a source cannot be read, or a split does not fill a row.
        OSError: If a file cannot be written; the error names it.
    """
    if there := _finished(target, settings):
        return there
    if target.exists():
        raise InputError(f"{target} exists and is not a folder of tokens; choose another place")
    partial = partial_folder(target)
    with _held(partial):
        # It is complete already if a run was killed just before the renaming.
        meta = _finished(partial, settings) or _fill(
            partial,
            sources,
            make_tokenizer,
            context_length,
            settings,
            ["train", *(["val"] if held_out else [])],
            limit_tokens,
            shard_tokens,
        )
    # Only after the lock: Windows cannot rename a folder that has an open file.
    (partial / _LOCK).unlink(missing_ok=True)
    partial.rename(target)
    (target / PROGRESS).unlink()
    return meta


@contextmanager
def _held(partial: Path) -> Iterator[None]:
    """Keep other processes out of the unfinished folder, and remove it if it stays empty."""
    if (partial / PROGRESS).is_file():
        read_json(partial / PROGRESS, Progress, *_NO_PROGRESS)  # before anything is written there
    elif partial.is_symlink() or (partial.exists() and not _is_empty(partial)):
        raise _in_the_way(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with locked_folder(partial, "choose another place"):
        remove_leftovers(partial)
        try:
            yield
        finally:
            if _is_empty(partial):
                with suppress(OSError):  # Windows cannot remove an open file
                    (partial / _LOCK).unlink()
                    partial.rmdir()


def _is_empty(partial: Path) -> bool:
    """Tell whether the folder has only the lock file of a run that began or was killed."""
    return partial.is_dir() and {path.name for path in partial.iterdir()} <= {_LOCK}


def _in_the_way(partial: Path) -> InputError:
    return InputError(
        f"{partial} holds other files than unfinished tokens: move it, or choose another place"
    )


def _finished(folder: Path, settings: dict[str, Any]) -> TextMeta | None:
    if not (folder / META).is_file():
        return None
    meta = read_text_meta(folder)
    _check_settings(folder, meta.get("settings", {}), settings)
    return meta


def _fill(
    partial: Path,
    sources: Sequence[Source],
    make_tokenizer: Callable[[], PreTrainedTokenizerBase],
    context_length: int,
    settings: dict[str, Any],
    splits: Sequence[str],
    limit_tokens: int | None,
    shard_tokens: int,
) -> TextMeta:
    """Write all missing files to the unfinished folder, the description last."""
    progress = _begin(partial, make_tokenizer, settings)
    tokenizer = load_tokenizer(partial)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    _check_progress(progress, partial, len(sources), vocab_size)
    writers = {
        split: SplitWriter(
            partial, split, context_length, vocab_size, progress["splits"].get(split)
        )
        for split in splits
    }
    reader = TextReader(sources, progress["position"])
    sizes = [source.size for source in sources]
    size = None if None in sizes else sum(size for size in sizes if size)
    for _ in _write(reader, writers, tokenizer, limit_tokens, size):
        if any(writer.shard_tokens >= shard_tokens for writer in writers.values()):
            for writer in writers.values():
                writer.close_shard()
            progress["splits"] = {split: writer.state() for split, writer in writers.items()}
            progress["position"] = reader.position()
            write_whole(partial / PROGRESS, json.dumps(progress).encode())
    for writer in writers.values():
        writer.close_shard()
    _check_rows(writers, context_length, partial, progress["files"])
    meta: Any = {
        "context_length": context_length,
        "vocab_size": vocab_size,
        "end": tokenizer.eos_token_id,
        "tokenizer": settings["tokenizer"],
        "sources": settings["sources"],
        "splits": {
            split: {**writer.counts, "left_over": writer.left_over}
            for split, writer in writers.items()
        },
        "settings": settings,
    }
    write_whole(partial / META, json.dumps(meta, indent=2, ensure_ascii=False).encode())
    return meta


def training_texts(sources: Iterable[Source], limit_tokens: int | None) -> Iterator[str]:
    """Iterate over the texts that a tokenizer may be trained on: no held-out or unused text.

    Args:
        sources: As in :func:`prepare_text`.
        limit_tokens: As in :func:`prepare_text`; a token is at least one byte.

    Yields:
        Training texts.
    """
    room = min(_TOKENIZER_BYTES, limit_tokens or _TOKENIZER_BYTES)
    for piece in TextReader(list(sources)):
        if piece.split == "train":
            yield piece.text
            room -= len(piece.text.encode())
            if room <= 0:
                return


def _begin(
    partial: Path, make_tokenizer: Callable[[], PreTrainedTokenizerBase], settings: dict[str, Any]
) -> Progress:
    if (partial / PROGRESS).is_file():
        progress = read_json(partial / PROGRESS, Progress, *_NO_PROGRESS)
        if progress["position"] is not None:
            _check_settings(partial, progress["settings"], settings)
            return progress
        _remove(partial, progress["files"])  # nothing is finished yet
    if not _is_empty(partial):
        raise _in_the_way(partial)
    tokenizer = make_tokenizer()
    with new_folder(partial) as folder:
        tokenizer.save_pretrained(folder)
        written = [file for file in folder.rglob("*") if file.is_file()]
        files = [file.relative_to(folder).as_posix() for file in written]
        progress: Progress = {"settings": settings, "position": None, "splits": {}, "files": files}
        # Written first: it tells the next run what to remove if this one is killed.
        write_whole(partial / PROGRESS, json.dumps(progress).encode())
    return progress


def _check_progress(progress: Progress, partial: Path, sources: int, vocab_size: int) -> None:
    """Check that the progress fits the sources and the tokenizer."""
    position = progress["position"] or {"source": 0}
    rests = [token for state in progress["splits"].values() for token in state["rest"]]
    if position["source"] > sources or max(rests, default=0) >= vocab_size:
        what, way_out = _NO_PROGRESS
        raise InputError(f"{partial / PROGRESS} is not {what} of these sources; {way_out}")


def _remove(partial: Path, files: Sequence[str]) -> None:
    """Remove the files of an unfinished folder, unless a link leads out of it."""
    inside = Path(os.path.realpath(partial))
    folders = {(partial / name).parent for name in files} - {partial}
    if not all(Path(os.path.realpath(folder)).is_relative_to(inside) for folder in folders):
        raise _in_the_way(partial)
    shards = [file.name for file in partial.iterdir() if _SHARD.fullmatch(file.name)]
    for name in (*files, *shards, PROGRESS):
        (partial / name).unlink(missing_ok=True)
    for folder in folders:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _check_settings(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    names = [name for name in here | there if here.get(name) != there.get(name)]
    if names:
        told = "; ".join(
            f"{name}: {str(there.get(name))[:60]}, now {str(here.get(name))[:60]}" for name in names
        )
        raise InputError(
            f"{folder} was made with other settings ({told}): give the same settings again, "
            "remove that folder, or choose another place"
        )


def _write(
    reader: TextReader,
    writers: dict[str, SplitWriter],
    tokenizer: Any,
    limit_tokens: int | None,
    size: int | None,
) -> Iterator[None]:
    """Tokenise and write; yield after each batch, when everything that was read is written."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    train = writers["train"].counts
    limit = limit_tokens or float("inf")

    def done() -> int:
        if limit_tokens:
            return train["tokens"]
        return sum(writer.counts["bytes"] for writer in writers.values())

    pieces = iter(reader) if _same_in_pieces(tokenizer) else _joined(reader)
    unit = {"unit": "token", "total": limit_tokens} if limit_tokens else {"unit": "B"}
    with tqdm(**{"total": size, **unit}, initial=done(), unit_scale=True) as bar:
        while train["tokens"] < limit and (batch := _batch(pieces)):
            numbers = tokenizer([piece.text for piece in batch], **_AS_IT_IS)["input_ids"]
            tokens: dict[str, list[np.ndarray]] = {split: [] for split in writers}
            room = limit - train["tokens"]
            for piece, found in zip(batch, numbers, strict=True):
                ids = np.array(found + end if piece.ends else found, np.int64)
                tokens[piece.split].append(ids)
                counts = writers[piece.split].counts
                counts["bytes"] += len(piece.text.encode())
                counts["documents"] += piece.ends
                room -= len(ids) if piece.split == "train" else 0
                if room <= 0:
                    break
            for split, writer in writers.items():
                writer.add(tokens[split])
            bar.update(done() - bar.n)
            yield


def _same_in_pieces(tokenizer: Any) -> bool:
    """Tell whether a text has the same tokens in the pieces that a reader cuts."""
    whole, a, b, c = tokenizer(["a b\nc", "a", " b\n", "c"], **_AS_IT_IS)["input_ids"]
    return whole == a + b + c


def _joined(reader: TextReader) -> Iterator[Piece]:
    """Yield whole documents."""
    texts: list[str] = []
    for piece in reader:
        texts.append(piece.text)
        if not piece.ends and sum(map(len, texts)) > _LONGEST:
            raise InputError(
                f"{reader.source} is too long for a tokenizer that reads only whole texts: divide "
                f"it into files of {_LONGEST:,} characters, or into documents (JSON lines, or "
                "--documents line)"
            )
        if piece.ends:
            yield Piece("".join(texts), piece.split)
            texts = []


def _batch(pieces: Iterator[Piece]) -> list[Piece]:
    batch, room = [], _BATCH
    while room > 0 and (piece := next(pieces, None)):
        batch.append(piece)
        room -= len(piece.text)
    return batch


def _check_rows(
    writers: dict[str, SplitWriter], context_length: int, partial: Path, files: Sequence[str]
) -> None:
    for split, writer in writers.items():
        if not writer.counts["rows"]:
            _remove(partial, files)  # a resumed run would fail here again
            raise InputError(
                f"the {split} part has {writer.counts['tokens']} tokens, too few for one row of "
                f"{context_length + 1}: give more text, a smaller --context-length"
                + (", or a larger --val-share (0 for no val part)" if split == "val" else "")
            )
