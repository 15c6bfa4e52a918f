"""Read and write a language model and its tokenizer, and let it continue a text."""

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks

from .modeling import TokenFormerConfig

__all__ = [
    "MASKS",
    "check_tokens_agree",
    "generate_text",
    "load_language_model",
    "load_tokenizer",
    "save_language_model",
]

# Beside a model whose texts have pairs of their own.
MASKS = "masks.safetensors"
# Ends a text for GPT-2's tokenizer and GPT-NeoX's, whose bare files do not say so.
_END = "<|endoftext|>"


def load_language_model(
    folder: Path,
    kinds: Sequence[str] | None = (TokenFormerConfig.model_type,),
    mask: str | None = None,
) -> Any:
    """Read a model that ``save_pretrained`` wrote, whole or not at all.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``.
        kinds: Model types of transformers, of which it may be; None for any causal language model.
        mask: Name of the mask in ``masks.safetensors`` whose pairs alone take part; None for all.

    Returns:
        The model on the CPU, in evaluation mode, of the type its weights were saved in.

    Raises:
        InputError: If there is no such folder, its files are damaged, there is no such mask, or the
            weights are not exactly those that the configuration calls for. (transformers would draw
            missing ones.)
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"there is no {file}; give a folder that save_pretrained wrote")
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{file} is not a readable configuration ({_one_line(error)})") from error
    if kinds is not None and kind not in kinds:
        raise InputError(
            f"{file} is of a model of type {kind!r}, not {' or '.join(map(repr, kinds))}"
        )
    try:
        read: Any = AutoModelForCausalLM.from_pretrained
        model, found = read(
            folder, output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    except (OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise InputError(f"{folder} holds no readable model: {_one_line(error)}") from error
    faults = [
        f"{name} {fault}"
        for key, fault in (("missing_keys", "is not there"), ("unexpected_keys", "is too much"))
        for name in sorted(found[key])
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError(
            f"the weights in {folder} do not fit its config.json: {'; '.join(faults[:3])}{more}"
        )
    if mask is not None:
        TokenMasks.load(folder / MASKS, model).activate(mask)
    return model.eval()


def save_language_model(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a model, and its tokenizer, as a folder that ``from_pretrained`` reads.

    Args:
        model: Any model of transformers.
        folder: Appears whole where it is not there; else each of its files is replaced at once.
        tokenizer: The model's tokenizer.

    Raises:
        OSError: If it cannot be written; ``filename`` is ``folder``, and what was there stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _save(model, folder, tokenizer)
    except (OSError, SafetensorError) as error:  # of a full disk safetensors says so in its own way
        number = getattr(error, "errno", None) or errno.EIO
        reason = getattr(error, "strerror", None) or _one_line(error)
        raise OSError(number, reason, str(folder)) from error


def _save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one of its own for each file, of which there is one
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as parent:
        partial = Path(parent, "model")
        try:
            model.save_pretrained(partial)
        finally:
            if had_bars:
                logging.enable_progress_bar()
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if not folder.exists():
            partial.rename(folder)
            return
        for file in sorted(partial.iterdir()):
            os.replace(file, folder / file.name)


def load_tokenizer(path: Path, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Read a tokenizer and see that it fits a model.

    Args:
        path: Folder that a tokenizer's ``save_pretrained`` wrote, or with ``tokenizer.json``, or
            with GPT-2's ``vocab.json`` and ``merges.txt``; or a file such as ``tokenizer.json``.
        vocab_size: Entries of the model's embedding; None does not compare.

    Returns:
        The tokenizer. If it has ``<|endoftext|>`` and no other end of text, that one ends a text.

    Raises:
        InputError: If there is none, it is damaged, or it has more entries than the embedding.
    """
    vocab, merges, whole = (path / name for name in ("vocab.json", "merges.txt", "tokenizer.json"))
    try:
        if (path / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        elif path.is_file() or whole.is_file():
            file = path if path.is_file() else whole
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        elif vocab.is_file() and merges.is_file():
            tokenizer = GPT2Tokenizer.from_pretrained(path, local_files_only=True)
        else:
            raise InputError(
                f"there is no tokenizer in {path}: give its folder or file (--tokenizer)"
            )
    except InputError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise InputError(f"{path} holds no readable tokenizer: {_one_line(error)}") from error
    numbers = tokenizer.get_vocab()
    if tokenizer.eos_token is None and _END in numbers:
        tokenizer.eos_token = _END
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    entries = max(numbers.values(), default=-1) + 1
    if vocab_size is not None and entries > vocab_size:
        raise InputError(
            f"the tokenizer {path} has {entries} entries, and the model's embedding has "
            f"{vocab_size} (vocab_size): give the tokenizer that the model was trained with"
        )
    return tokenizer


def check_tokens_agree(one: Path, other: Path) -> None:
    """Check that a number stands for the same token in two folders.

    That they call their tokenizers alike does not say so: two that are trained on different text
    may both be ``bpe:4096``.

    Args:
        one: Folder with a tokenizer.
        other: Another.

    Raises:
        InputError: If a number means different tokens; the message names the first. Or if there is
            no tokenizer.
    """
    known, found = (
        {number: token for token, number in load_tokenizer(folder).get_vocab().items()}
        for folder in (one, other)
    )
    for number in sorted(known.keys() & found.keys()):
        if known[number] != found[number]:
            raise InputError(
                f"the tokenizers in {one} and {other} differ: {number} is {known[number]!r} there "
                f"and {found[number]!r} here; prepare the second text with --tokenizer {one}"
            )


def generate_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 64,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    streamer: Any = None,
) -> str:
    """Continue a text until it ends, or so far.

    Args:
        model: Language model of transformers.
        tokenizer: Its tokenizer.
        prompt: Text of at least one token.
        max_new_tokens: Most tokens to add; no more than the context has room for.
        greedy: Take the likeliest token each time, rather than draw one.
        temperature: Divides the logits before a token is drawn.
        top_k: Draw among so many of the likeliest tokens; None for all.
        top_p: Draw among the likeliest tokens that make up so much of the probability.
        streamer: Gets tokens as they are made, such as transformers' ``TextStreamer``.

    Returns:
        The text that was added.

    Raises:
        InputError: If the prompt is empty or fills the context, or a number is out of its range.
    """
    if not temperature > 0:
        raise InputError(f"temperature must be positive, but it is {temperature}")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, but it is {top_p}")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    tokens, context = inputs["input_ids"].shape[1], model.config.max_position_embeddings
    if tokens == 0:
        raise InputError("a prompt is empty: the model continues a text of at least one token")
    if tokens >= context:
        raise InputError(
            f"a prompt has {tokens} tokens, which leaves no room in the model's context of "
            f"{context}: shorten it ({prompt[:40]!r}...)"
        )
    how: dict[str, Any] = {"do_sample": not greedy}
    if not greedy:
        how.update(temperature=temperature, top_k=top_k or 0, top_p=top_p)
    config = GenerationConfig(
        max_new_tokens=min(max_new_tokens, context - tokens),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **how,
    )
    with torch.inference_mode():
        output = model.generate(**inputs, generation_config=config, streamer=streamer)
    text: Any = tokenizer.decode(output[0, tokens:], skip_special_tokens=True)
    return text


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
