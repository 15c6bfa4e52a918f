"""Tokenizers: bytes, byte-level BPE trained on the text, or a ready-made one."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tokenformer_vit.errors import InputError

from .generation import load_tokenizer

__all__ = ["END", "byte_tokenizer", "find_tokenizer", "train_tokenizer"]

END = "<|endoftext|>"
BYTES = 256
_MOST_ENTRIES = 10_000_000  # the library reserves memory for all entries, and aborts without it


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer whose tokens are UTF-8 bytes.

    Returns:
        A tokenizer of 257 entries: the number of a byte is its value, and 256 ends a text.
    """
    # Byte-level tokenizers write a printable byte as itself, and the other bytes, in order, as the
    # characters from 256 on.
    letters = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(set(range(BYTES)) - {ord(letter) for letter in letters}))
    numbers = {
        letter: ord(letter) if ord(letter) < BYTES else next(others) for letter in sorted(letters)
    }
    return _byte_level(models.BPE(numbers | {END: BYTES}, []), words=False)


def train_tokenizer(texts: Iterable[str], entries: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE as GPT-2 has it; it encodes any text without loss.

    Args:
        texts: Training texts.
        entries: Size of the vocabulary, with the 256 bytes and the end of a text. A short text
            gives fewer.

    Returns:
        The tokenizer.

    Raises:
        InputError: If ``entries`` has no room for the bytes, or is over ten million.
    """
    if entries <= BYTES:
        raise InputError(
            f"bpe:{entries} is too small for {BYTES} bytes and the end of a text: give at least "
            f"bpe:{BYTES + 1}"
        )
    if entries > _MOST_ENTRIES:
        raise InputError(f"bpe:{entries} is too large: give at most bpe:{_MOST_ENTRIES}")
    tokenizer = _byte_level(models.BPE(), words=True)
    core = tokenizer.backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)


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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"there is no file or folder {name!r}, and no such tokenizer on the Hugging Face hub "
            f"({reason}): give a path or a name of the hub"
        ) from error


def _byte_level(model: models.BPE, words: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)
