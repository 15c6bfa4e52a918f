"""The tokenizers that text is prepared with: of bytes, trained on the text, or ready-made."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tokenformer_vit.errors import InputError, one_line

from .generation import load_tokenizer

__all__ = ["END", "byte_tokenizer", "find_tokenizer", "train_tokenizer"]

END = "<|endoftext|>"
BYTES = 256
_MOST_ENTRIES = 10_000_000  # the library reserves memory for all of them, and aborts without it


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer whose tokens are the bytes of a text's UTF-8.

    Returns:
        257 entries: each byte has its own value as its number, 256 ends a text.
    """
    # Byte-level tokenizers write a byte as one character: as itself where that is printable, and
    # the others, in their order, as the characters from 256 on.
    letters = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(set(range(BYTES)) - {ord(letter) for letter in letters}))
    numbers = {
        letter: ord(letter) if ord(letter) < BYTES else next(others) for letter in sorted(letters)
    }
    return _byte_level(models.BPE(numbers | {END: BYTES}, []), words=False)


def train_tokenizer(texts: Iterable[str], entries: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, which writes any text without loss, as GPT-2's does.

    Args:
        texts: What to train on.
        entries: Size of the vocabulary, the 256 bytes and the end of a text among them; of little
            text it becomes fewer.

    Returns:
        The tokenizer.

    Raises:
        InputError: If there is no room for the bytes, or the number is absurd.
    """
    if entries <= BYTES:
        raise InputError(
            f"bpe:{entries} is too small: {BYTES} bytes and the end of a text are among the "
            f"entries, give at least bpe:{BYTES + 1}"
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
    """Read a ready-made tokenizer.

    Args:
        name: Path of a folder or file, as in :func:`load_tokenizer`; where there is none, a name
            on the Hugging Face hub, such as ``EleutherAI/gpt-neox-20b``.

    Returns:
        The tokenizer.

    Raises:
        InputError: If there is none, neither here nor there.
    """
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return load_tokenizer(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many types: no network, no such name, no tokenizer there
        raise InputError(
            f"there is no tokenizer {name!r}: no such file or folder here, and the Hugging Face "
            f"hub gave none ({one_line(error)})"
        ) from error


def _byte_level(model: models.BPE, words: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)
