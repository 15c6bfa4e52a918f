"""Read and write a language model and its tokenizer, and let it continue a text."""

import errno
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GPT2Tokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TextStreamer,
)
from transformers.utils import logging

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import new_folder
from tokenformer_vit.growth import TokenMasks
from tokenformer_vit.models.weights import read_state_dict, seal_tensors

from .modeling import TokenFormerConfig
from .schemas import ConfigFile, ShardIndex, read_json

__all__ = [
    "MASKS",
    "TerminalStreamer",
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
# Logits below the first, divided by the second, are finite in float32.
_MOST_LOGIT, _LEAST_TEMPERATURE = 1e32, 1e-6
_LONGEST_TOKEN = 256  # characters; only for text that a tokenizer does not know, it may be more
_NEW_FOLDER = "give a folder that save_pretrained wrote"
# No code in a folder runs, and transformers does not ask whether it may.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_language_model(
    folder: Path,
    kinds: Sequence[str] | None = (TokenFormerConfig.model_type,),
    mask: str | None = None,
) -> Any:
    """Read a model that ``save_pretrained`` wrote, whole or not at all.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``, or its shards and their index.
        kinds: Model types of transformers, of which it may be; None for any causal language model.
        mask: Name of the mask in ``masks.safetensors`` whose pairs alone take part; None for all.

    Returns:
        The model on the CPU, in evaluation mode, of the type its weights were saved in.

    Raises:
        InputError: If there is no such folder, its files are damaged or call for code of their own,
            there is no such mask, or the weights are not exactly those that the configuration calls
            for. (transformers would draw missing ones.)
        OSError: If a file cannot be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"there is no {file}; {_NEW_FOLDER}")
    config = _read_config(file, kinds)
    try:
        tensors = _read_weights(folder)
        if (depth := config.num_hidden_layers) > len(tensors):  # which would take long to build
            raise InputError(f"config.json has {depth} layers, the file {len(tensors)} tensors")
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            _check_shapes(kind(config).state_dict(), tensors)
        # transformers gets the tensors that were checked, and opens no file of its own choice.
        model, found = kind.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True
        )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    except Exception as error:  # a configuration can make the libraries raise nearly anything
        raise InputError(f"{folder} holds no readable model: {_reason(error)}") from error
    model.name_or_path = model.config.name_or_path = str(folder)
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


def _read_config(file: Path, kinds: Sequence[str] | None) -> Any:
    kind = read_json(file, ConfigFile, "a readable configuration", _NEW_FOLDER).get("model_type")
    if kinds is not None and kind not in kinds:
        raise InputError(
            f"{file} is of a model of type {kind!r}, not {' or '.join(map(repr, kinds))}"
        )
    try:
        config = AutoConfig.from_pretrained(file.parent, **_LOCAL)
    except Exception as error:  # each type of model has checks of its own
        raise InputError(f"{file} cannot be used: {_reason(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{file.parent} holds no readable model: {file.name} is of a model of type {kind!r}, "
            "which is no causal language model of transformers"
        )
    if "/" in str(config._attn_implementation):  # code of the hub, loaded where `kernels` is there
        raise InputError(
            f"{file} asks for attention by {config._attn_implementation!r}, which is code from "
            "elsewhere and is not run: remove attn_implementation from it"
        )
    return config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        if not whole.is_file():
            raise InputError(f"there is no {whole}; {_NEW_FOLDER}")
        return read_state_dict(whole)
    places = read_json(index, ShardIndex, "an index of weights", _NEW_FOLDER)["weight_map"]
    tensors = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise InputError(f"there is no {folder / name}, which {index} names")
        tensors |= read_state_dict(folder / name)
    return tensors


def _check_shapes(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Compare shapes; transformers would draw such tensors in full before it refuses them."""
    for name, tensor in wanted.items():
        if name in found and found[name].shape != tensor.shape:
            raise InputError(
                f"{name} is {tuple(found[name].shape)} in the file, and config.json calls for "
                f"{tuple(tensor.shape)}"
            )


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
    try:
        _save(model, folder, tokenizer)
    except (OSError, SafetensorError, UnicodeError) as error:
        # safetensors has its own error of a full disk, and takes no path that is not UTF-8.
        number = getattr(error, "errno", None) or errno.EIO
        reason = getattr(error, "strerror", None) or _reason(error)
        raise OSError(number, reason, str(folder)) from error


def _save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one of its own for each file, of which there is one
    with new_folder(folder) as partial:
        try:
            model.save_pretrained(partial)
        finally:
            if had_bars:
                logging.enable_progress_bar()
        for file in partial.glob("*.safetensors"):
            seal_tensors(file)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


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
            tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        elif path.is_file() or whole.is_file():
            file = path if path.is_file() else whole
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        elif vocab.is_file() and merges.is_file():
            tokenizer = GPT2Tokenizer.from_pretrained(path, **_LOCAL)
        else:
            raise InputError(
                f"there is no tokenizer in {path}: give its folder or file (--tokenizer)"
            )
        used: Any = tokenizer("a")["input_ids"]  # also shows settings that it cannot work with
    except InputError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise InputError(f"{path} holds no readable tokenizer: {_reason(error)}") from error
    numbers = tokenizer.get_vocab()
    if tokenizer.eos_token is None and _END in numbers:
        tokenizer.eos_token = _END
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    entries = max((*numbers.values(), *used), default=-1) + 1
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
        model: Language model of transformers. Its ``generation_config`` does not count.
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
        InputError: If the prompt is empty, no valid text, or fills the context; a number is out of
            its range; or what the model computes is not finite.
    """
    if not _LEAST_TEMPERATURE <= temperature < math.inf:
        raise InputError(
            f"temperature must be positive, at least {_LEAST_TEMPERATURE}, but it is "
            f"{temperature}; greedy takes the likeliest token"
        )
    if not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, but it is {top_p}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # what Python makes of other bytes on a command line
        raise InputError(f"a prompt is not UTF-8 text: {prompt[:40]!r}") from error
    context = model.config.max_position_embeddings
    longest = max(_LONGEST_TOKEN, *map(len, tokenizer.get_vocab()))
    if len(prompt) > context * longest:  # some tokenizers take minutes for megabytes
        raise InputError(
            f"a prompt has {len(prompt)} characters, which leaves no room in the model's context "
            f"of {context} tokens: shorten it ({prompt[:40]!r}...)"
        )
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    tokens = inputs["input_ids"].shape[1]
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
    with torch.inference_mode(), _only(model, config):
        output = model.generate(
            **inputs,
            generation_config=config,
            streamer=streamer,
            logits_processor=LogitsProcessorList([_Finite()]),
        )
    text: Any = tokenizer.decode(output[0, tokens:], skip_special_tokens=True)
    return text


class TerminalStreamer(TextStreamer):
    """Prints text as it is made; on a terminal, characters that would control it are escaped."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next part."""
        if sys.stdout.isatty():
            text = re.sub(r"[^\n\t]+", lambda match: printable(match[0]), text)
        super().on_finalized_text(text, stream_end)


class _Finite(LogitsProcessor):
    """Stop before a token is drawn from NaN."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if not (scores.amax(dim=-1).abs() < _MOST_LOGIT).all():
            raise InputError(
                "the model's output is not finite; its checkpoint is of a training that diverged, "
                "or damaged"
            )
        return scores


@contextmanager
def _only(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Generate as asked: transformers fills in what a model's generation_config.json says."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _reason(error: BaseException) -> str:
    reason = one_line(error)
    if "custom code" in reason:
        reason += "; code of a folder is not run: save it as a type that transformers has"
    return reason
