"""Tokenizers: bytes, byte-level BPE trained on the text, or a ready-made one."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tokenformer_vit.errors import InputError, one_line

# End of a text for the tokenizers of GPT-2 and GPT-NeoX; their bare files do not say so.
_END = "<|endoftext|>"
# No code from a folder runs, and transformers does not ask for permission to run it.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_BYTES = 256
_MOST_ENTRIES = 10_000_000  # the library reserves memory for all entries, and aborts without it


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer whose tokens are UTF-8 bytes.

    Returns:
        A tokenizer of 257 entries: the number of a byte is its value, and 256 ends a text.
    """
    # Byte-level tokenizers write a printable byte as itself, and the other bytes, in order, as the
    # characters from 256 on.
    letters = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(set(range(_BYTES)) - {ord(letter) for letter in letters}))
    numbers = {
        letter: ord(letter) if ord(letter) < _BYTES else next(others) for letter in sorted(letters)
    }
    return _byte_level(models.BPE(numbers | {_END: _BYTES}, []), words=False)


def train_tokenizer(texts: Iterable[str], entries: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's; it encodes any text without loss.

    Args:
        texts: Training texts.
        entries: Size of the vocabulary, with the 256 bytes and the end of a text. A short text
            gives fewer.

    Returns:
        The tokenizer.

    Raises:
        InputError: If ``entries`` has no room for the bytes, or is over ten million.
    """
    if entries <= _BYTES:
        raise InputError(
            f"bpe:{entries} is too small for {_BYTES} bytes and the end of a text: give at least "
            f"bpe:{_BYTES + 1}"
        )
    if entries > _MOST_ENTRIES:
        raise InputError(f"bpe:{entries} is too large: give at most bpe:{_MOST_ENTRIES}")
    tokenizer = _byte_level(models.BPE(), words=True)
    core = tokenizer.backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=_END, pad_token=_END)


def load_tokenizer(path: Path, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer and check that it fits a model.

    Args:
        path: File such as ``tokenizer.json``, or folder with this file, with GPT-2's ``vocab.json``
            and ``merges.txt``, or with the files of a tokenizer's ``save_pretrained``.
        vocab_size: Number of entries of the model's embedding; None skips the check.

    Returns:
        The tokenizer. ``<|endoftext|>`` ends a text if the tokenizer has this token and names no
        other one.

    Raises:
        InputError: If there is no tokenizer, it is damaged, or it has more entries than the
            embedding.
    """
    vocab, merges, whole = (path / name for name in ("vocab.json", "merges.txt", "tokenizer.json"))
    try:
        if (path / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(path, **LOCAL)
        elif path.is_file() or whole.is_file():
            file = path if path.is_file() else whole
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        elif vocab.is_file() and merges.is_file():
            tokenizer = GPT2Tokenizer.from_pretrained(path, **LOCAL)
        else:
            raise InputError(
                f"there is no tokenizer in {path}: give its folder or file (--tokenizer)"
            )
        used: Any = tokenizer("a")["input_ids"]  # fails here if its settings do not work
    except InputError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise InputError(
            f"{path} holds no readable tokenizer; give another folder or file ({reason_of(error)})"
        ) from error
    numbers = tokenizer.get_vocab()
    if tokenizer.eos_token is None and _END in numbers:
        tokenizer.eos_token = _END
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    entries = max((*numbers.values(), *used), default=-1) + 1
    if vocab_size is not None and entries > vocab_size:
        raise InputError(
            f"the tokenizer {path} has {entries} entries, but the model's vocab_size is "
            f"{vocab_size}: give the tokenizer that the model was trained with"
        )
    return tokenizer


def check_tokens_agree(one: Path, other: Path) -> None:
    """Check that the tokenizers of two folders give the same numbers to the same tokens.

    Names are not enough: two tokenizers from different texts may both be called ``bpe:4096``.

    Args:
        one: Folder with a tokenizer.
        other: Folder with a tokenizer.

    Raises:
        InputError: If a number stands for different tokens, or there is no tokenizer.
    """
    known, found = (
        {number: token for token, number in load_tokenizer(folder).get_vocab().items()}
        for folder in (one, other)
    )
    for number in sorted(known.keys() & found.keys()):
        if known[number] != found[number]:
            raise InputError(
                f"the tokenizers in {one} and {other} differ: token {number} is {known[number]!r} "
                f"in the first and {found[number]!r} in the second; prepare the text of the second "
                f"with --tokenizer {one}"
            )


def find_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a ready-made tokenizer.

    Args:
        name: Path of a folder or file, as in :func:`load_tokenizer`; or a name on the Hugging Face
            hub, such as ``EleutherAI/gpt-neox-20b``.

    Returns:
        The tokenizer.

    Raises:
        InputError: If there is no such path, and no such name on the hub.
    """
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return load_tokenizer(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many types: no network, no such name, no tokenizer
        raise InputError(
            f"there is no file or folder {name!r}, and no such tokenizer on the Hugging Face hub "
            f"({one_line(error)}): give a path or a name of the hub"
        ) from error


def _byte_level(model: models.BPE, words: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=_END, pad_token=_END)


def reason_of(error: BaseException) -> str:
    """Describe an error of the libraries in one line."""
    reason = str(error) if isinstance(error, InputError) else one_line(error)
    if "custom code" in reason:
        reason += "; code in a folder is never run: use a model type that transformers has"
    return reason
