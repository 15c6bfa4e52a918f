"""Load and save a language model and its tokenizer, and continue texts with it."""

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
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils import logging

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import new_folder
from tokenformer_vit.growth import TokenMasks
from tokenformer_vit.models.checkpoints import read_checkpoint, state_dict_in

from .modeling import TokenFormerConfig
from .schemas import ConfigFile, ShardIndex, read_json
from .tokenizers import LOCAL, reason_of

# File next to a model that has separate pairs for each text.
MASKS = "masks.safetensors"
# A logit below the first, divided by the second, is finite in float32.
_MOST_LOGIT, _LEAST_TEMPERATURE = 1e32, 1e-6
_LONGEST_TOKEN = 256  # characters; only text that a tokenizer does not know has longer tokens
_NEW_FOLDER = "give a folder that save_pretrained wrote"


def load_language_model(
    folder: Path,
    kinds: Sequence[str] | None = (TokenFormerConfig.model_type,),
    mask: str | None = None,
) -> Any:
    """Load a model that ``save_pretrained`` wrote.

    Args:
        folder: Folder with ``config.json`` and ``model.safetensors``, or its shards and their
            index.
        kinds: Model types of transformers that are accepted; None for any causal language model.
        mask: Name of a mask in ``masks.safetensors``, to use only its pairs; None for all pairs.

    Returns:
        The model on the CPU, in evaluation mode, in the dtype of the saved weights.

    Raises:
        InputError: If there is no such folder or mask, a file is damaged or asks for code of its
            own, or the weights do not fit the configuration exactly. (transformers would draw
            missing weights.)
        OSError: If a file cannot be read.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"there is no {file}; {_NEW_FOLDER}")
    config = _read_config(file, kinds)
    try:
        tensors = _read_weights(folder)
        if (depth := config.num_hidden_layers) > len(tensors):  # it would take long to build
            raise InputError(
                f"config.json has {depth} layers, but there are only {len(tensors)} tensors"
            )
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            _check_shapes(kind(config).state_dict(), tensors)
        # transformers gets the checked tensors, and opens no file itself.
        model, found = kind.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True
        )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    except Exception as error:  # a configuration can make the libraries raise nearly anything
        raise InputError(
            f"{folder} holds no readable model: {reason_of(error)}; copy or export it again"
        ) from error
    model.name_or_path = model.config.name_or_path = str(folder)
    faults = [
        f"{name} {fault}"
        for key, fault in (("missing_keys", "is missing"), ("unexpected_keys", "is unknown"))
        for name in sorted(found[key])
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError(
            f"the weights in {folder} do not fit its config.json: {'; '.join(faults[:3])}{more}; "
            "copy or export both files again"
        )
    if mask is not None:
        TokenMasks.load(folder / MASKS, model).activate(mask)
    return model.eval()


def _read_config(file: Path, kinds: Sequence[str] | None) -> Any:
    kind = read_json(file, ConfigFile, "a readable configuration", _NEW_FOLDER).get("model_type")
    if kinds is not None and kind not in kinds:
        raise InputError(
            f"{file} is for a model of type {kind!r}, not {' or '.join(map(repr, kinds))}; "
            f"{_NEW_FOLDER}"
        )
    try:
        config = AutoConfig.from_pretrained(file.parent, **LOCAL)
    except Exception as error:  # each model type has its own checks
        raise InputError(
            f"{file} cannot be used: {reason_of(error)}; correct it, or export the model again"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{file.parent} holds no readable model: {file.name} is for a model of type {kind!r}, "
            "which is not a causal language model of transformers; give another folder"
        )
    if "/" in str(config._attn_implementation):  # code of the hub, which `kernels` would load
        raise InputError(
            f"{file} names attention code on the hub ({config._attn_implementation!r}), which is "
            "never run: remove attn_implementation from the file"
        )
    return config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        if not whole.is_file():
            raise InputError(f"there is no {whole}; {_NEW_FOLDER}")
        return state_dict_in(read_checkpoint(whole), whole)
    places = read_json(index, ShardIndex, "an index of weights", _NEW_FOLDER)["weight_map"]
    tensors = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise InputError(f"there is no {folder / name}, which {index} names; copy all files")
        tensors |= state_dict_in(read_checkpoint(folder / name), name)
    return tensors


def _check_shapes(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Compare shapes; transformers would first draw wrong tensors in full, then refuse them."""
    for name, tensor in wanted.items():
        if name in found and found[name].shape != tensor.shape:
            raise InputError(
                f"{name} is {tuple(found[name].shape)} in the file, but {tuple(tensor.shape)} by "
                "config.json"
            )


def save_language_model(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    facts: Any = None,
) -> None:
    """Write a model, its tokenizer and a model card to a folder that ``from_pretrained`` reads.

    Args:
        model: Any model of transformers.
        folder: The folder. A new one appears only when it is complete; in an existing one each
            file is replaced at once.
        tokenizer: Tokenizer of the model. Its tokens for the end of a text and for padding are
            written for the model too if the model names none; the model's context is written as
            the tokenizer's ``model_max_length``. Neither object is changed.
        facts: Data, training and results for the model card. Only a model that writes text gets
            one.

    Raises:
        InputError: If the model is quantised, or a model of peft wraps its layers.
        OSError: If it cannot be written; ``filename`` is ``folder``. Existing files stay.
    """
    try:
        _save(model, folder, tokenizer)
    except (OSError, SafetensorError, UnicodeError) as error:
        # safetensors has its own error for a full disk, and refuses paths that are not UTF-8.
        number = getattr(error, "errno", None) or errno.EIO
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise OSError(number, reason, str(folder)) from error


def _save(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it counts files, and there is only one
    with new_folder(folder) as partial:
        try:
            if tokenizer is None:
                model.save_pretrained(partial)
            else:
                with _agreed(model, tokenizer):
                    model.save_pretrained(partial)
                    tokenizer.save_pretrained(partial)
        finally:
            if had_bars:
                logging.enable_progress_bar()


@contextmanager
def _agreed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Let model and tokenizer say the same of ends, padding and lengths while they are saved.

    ``generate``, classifiers and truncation of transformers read them from these objects only.
    """
    values: list[tuple[Any, str, Any]] = [
        (config, name, getattr(tokenizer, name))
        for config in (model.config, getattr(model, "generation_config", None))
        for name in ("eos_token_id", "pad_token_id")
        if config is not None and getattr(config, name, 0) is None  # a classifier has one config
    ]
    if longest := getattr(model.config, "max_position_embeddings", None):
        # Even if the tokenizer has a length: that of another model with the same tokenizer.
        values.append((tokenizer, "model_max_length", longest))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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
    """Continue a text.

    Args:
        model: Language model of transformers. Its ``generation_config`` is ignored.
        tokenizer: Tokenizer of the model.
        prompt: Text of at least one token.
        max_new_tokens: Largest number of new tokens; the context may allow fewer.
        greedy: Whether to take the most likely token each time, instead of a random one.
        temperature: Divisor of the logits before a token is drawn.
        top_k: Number of most likely tokens to draw from; None for all.
        top_p: Probability of the most likely tokens to draw from, above 0 and at most 1.
        streamer: Receives each new token, such as transformers' ``TextStreamer``.

    Returns:
        The new text.

    Raises:
        InputError: If the prompt is empty, is not valid text or fills the context; a number is out
            of range; or the output of the model is not finite.
    """
    if not _LEAST_TEMPERATURE <= temperature < math.inf:
        raise InputError(
            f"temperature must be at least {_LEAST_TEMPERATURE}, but got {temperature}; to take "
            "the most likely token, use greedy"
        )
    if not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, but got {top_p}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # from bytes on the command line that are not UTF-8
        raise InputError(f"a prompt is not UTF-8 text: {prompt[:40]!r}; convert it") from error
    context = model.config.max_position_embeddings
    longest = max(_LONGEST_TOKEN, *map(len, tokenizer.get_vocab()))
    if len(prompt) > context * longest:  # some tokenizers take minutes for megabytes
        raise InputError(
            f"a prompt of {len(prompt)} characters cannot fit into the model's context of "
            f"{context} tokens: shorten it ({prompt[:40]!r}...)"
        )
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    tokens = inputs["input_ids"].shape[1]
    if tokens == 0:
        raise InputError("a prompt is empty: give a text of at least one token")
    if tokens >= context:
        raise InputError(
            f"a prompt has {tokens} tokens, but the model's context is {context}: shorten it to "
            f"leave room for new ones ({prompt[:40]!r}...)"
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
    """Prints text as it is generated; on a terminal, control characters are escaped."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next part."""
        if sys.stdout.isatty():
            text = re.sub(r"[^\n\t]+", lambda match: printable(match[0]), text)
        super().on_finalized_text(text, stream_end)


class _Finite(LogitsProcessor):
    """Raises an error before a token is drawn from NaN."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if not (scores.amax(dim=-1).abs() < _MOST_LOGIT).all():
            raise InputError(
                "the model's output is not finite, because its training diverged or the file is "
                "damaged: use another checkpoint"
            )
        return scores


@contextmanager
def _only(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Ignore the model's generation_config.json, which transformers would merge in."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own
