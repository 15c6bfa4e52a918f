"""Tokenizers: bytes, byte-level BPE trained on the text, or a ready-made one."""

from collections.abc import Iterable, Sequence
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

# Names of GPT-2 and GPT-NeoX, whose bare files do not say what they are for. Padding must not be
# the end of a text: collators hide padding from the loss, and no text would learn to end.
_SPECIAL = {"eos_token": "<|endoftext|>", "pad_token": "<|padding|>"}
_BYTES = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer whose tokens are UTF-8 bytes.

    Returns:
        A tokenizer of 258 entries: the number of a byte is its value, 256 ends a text, 257 pads.
    """
    # Byte-level tokenizers write a printable byte as itself, and the other bytes, in order, as the
    # characters from 256 on.
    letters = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(set(range(_BYTES)) - {ord(letter) for letter in letters}))
    numbers = {
        letter: ord(letter) if ord(letter) < _BYTES else next(others) for letter in sorted(letters)
    }
    return _byte_level(models.BPE(numbers, []), words=False)


def train_tokenizer(texts: Iterable[str], entries: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's; it encodes any text without loss.

    Args:
        texts: Training texts.
        entries: Size of the vocabulary, with 256 bytes, the end of a text and padding. A short text
            gives fewer.
    """
    tokenizer = _byte_level(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.backend_tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **_SPECIAL)


def load_tokenizer(source: Path | str, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer and check that it fits a model.

    Args:
        source: File such as ``tokenizer.json``; folder with this file, with GPT-2's ``vocab.json``
            and ``merges.txt``, or with the files of a tokenizer's ``save_pretrained``; or, as a
            text, a name on the Hugging Face hub, such as ``EleutherAI/gpt-neox-20b``.
        vocab_size: Number of entries of the model's embedding; None skips the check.

    Returns:
        The tokenizer. ``<|endoftext|>`` ends a text and ``<|padding|>`` pads if the tokenizer has
        these tokens and names no others.

    Raises:
        InputError: If there is no tokenizer, or it has more entries than the embedding.
    """
    path, local = Path(source), isinstance(source, Path) or Path(source).exists()
    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizer: Any
    try:
        if file.is_file() and not (path / "tokenizer_config.json").is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        elif (path / "merges.txt").is_file() and not (path / "tokenizer_config.json").is_file():
            tokenizer = GPT2Tokenizer.from_pretrained(path, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                source, local_files_only=local, trust_remote_code=False
            )
    except Exception as error:  # each library has its own, of many types
        raise InputError(
            f"there is no readable tokenizer in {source} ({one_line(error)}): give its folder, its "
            "file, or a name of the Hugging Face hub (--tokenizer)"
        ) from error
    numbers = tokenizer.get_vocab()
    for name, token in _SPECIAL.items():
        if getattr(tokenizer, name) is None and token in numbers:
            setattr(tokenizer, name, token)
    entries = max(numbers.values()) + 1
    if vocab_size is not None and entries > vocab_size:
        raise InputError(
            f"the tokenizer {source} has {entries} entries, but the model's vocab_size is "
            f"{vocab_size}: give the tokenizer that the model was trained with"
        )
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts as they are: "<|endoftext|>" spelt in a text does not end it."""
    how = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    how |= {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(list(texts), **how)["input_ids"] if texts else []


def check_tokens_agree(one: Path, other: Path) -> None:
    """Check that the tokenizers of two folders give the same numbers to the same tokens.

    Names are not enough: two tokenizers from different texts may both be called ``bpe:4096``.

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


def _byte_level(model: models.BPE, words: bool) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, **_SPECIAL)
