"""Load and save a language model with its tokenizer."""

from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import new_folder

_UNREADABLE = (OSError, EOFError, JSONDecodeError, RuntimeError, SafetensorError, UnpicklingError)


def load_language_model(folder: Path) -> Any:
    """Load a causal language model of any type from a folder of ``save_pretrained``.

    Args:
        folder: The folder. No code in it is run.

    Returns:
        The model on the CPU, in evaluation mode, in the dtype of the saved weights.

    Raises:
        InputError: If there is no such folder, a file in it is damaged, or a weight is missing,
            which transformers would draw at random.
    """
    if not (folder / "config.json").is_file():
        raise InputError(
            f"there is no {folder / 'config.json'}; give a folder that save_pretrained wrote"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except _UNREADABLE as error:
        raise InputError(
            f"the model in {folder} cannot be read ({one_line(error)}): copy or export it again"
        ) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"the weights in {folder} do not fit its config.json: {missing[0]} is missing; copy or "
            "export both files again"
        )
    return model.eval()


def save_language_model(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a model and its tokenizer to a folder that ``from_pretrained`` reads.

    Args:
        model: Any model of transformers.
        folder: The folder. A new one appears only when it is complete; in an existing one each
            file is replaced at once.
        tokenizer: Tokenizer of the model. From now on, the model names its tokens for the end of a
            text and for padding, if it named none, and it truncates to the model's context.
    """
    if tokenizer is not None:
        for config in (model.config, getattr(model, "generation_config", None)):
            for name in ("eos_token_id", "pad_token_id"):
                if config is not None and getattr(config, name, 0) is None:
                    setattr(config, name, getattr(tokenizer, name))
        if longest := getattr(model.config, "max_position_embeddings", None):
            tokenizer.model_max_length = longest  # it may have that of another model
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
