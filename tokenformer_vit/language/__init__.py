"""Language models under Hugging Face's transformers.

Importing this package registers the model type ``tokenformer`` with the Auto classes of
transformers. It imports Hugging Face's libraries, and none of OpenMMLab's. See README.md.
"""

from tokenformer_vit.errors import InputError

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
except ImportError as error:
    raise InputError(
        "language models need Hugging Face's transformers: in the clone, run "
        "pip install '.[language]'"
    ) from error

from .corpora import Source, file_source, find_files, hub_source, reversal_source
from .data import open_rows, read_text_meta
from .generation import (
    MASKS,
    TerminalStreamer,
    generate_text,
    load_language_model,
    save_language_model,
)
from .modeling import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForSequenceClassification,
    TokenFormerModel,
)
from .preparation import prepare_text, training_texts
from .released import from_released, read_released, released_config, to_released
from .tokenizers import (
    byte_tokenizer,
    check_tokens_agree,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from .transformer import TRAINED_KINDS, matched_transformer, transformer_lm

__all__ = [
    "MASKS",
    "TRAINED_KINDS",
    "Source",
    "TerminalStreamer",
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForSequenceClassification",
    "TokenFormerModel",
    "byte_tokenizer",
    "check_tokens_agree",
    "file_source",
    "find_files",
    "find_tokenizer",
    "from_released",
    "generate_text",
    "hub_source",
    "load_language_model",
    "load_tokenizer",
    "matched_transformer",
    "open_rows",
    "prepare_text",
    "read_released",
    "read_text_meta",
    "released_config",
    "reversal_source",
    "save_language_model",
    "to_released",
    "train_tokenizer",
    "training_texts",
    "transformer_lm",
]

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig, exist_ok=True)
for _auto_class, _model in (
    (AutoModel, TokenFormerModel),
    (AutoModelForCausalLM, TokenFormerForCausalLM),
    (AutoModelForSequenceClassification, TokenFormerForSequenceClassification),
):
    _auto_class.register(TokenFormerConfig, _model, exist_ok=True)
