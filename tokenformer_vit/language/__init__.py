"""Language models under Hugging Face's transformers; importing it registers them there.

``AutoModelForCausalLM.from_pretrained``, ``generate``, ``Trainer`` and what builds on these then
know the model type ``tokenformer``. It is the one place that imports Hugging Face's libraries, and
it needs none of OpenMMLab's.
"""

from tokenformer_vit.errors import InputError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise InputError(
        "language models need Hugging Face's transformers: `pip install -e '.[language]'`"
    ) from error

from .data import read_text_meta, read_tokens
from .generation import (
    generate_text,
    load_language_model,
    load_tokenizer,
    save_language_model,
)
from .modeling import TokenFormerConfig, TokenFormerForCausalLM
from .released import from_released, read_released, released_config, to_released
from .transformer import matched_transformer, transformer_lm

__all__ = [
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "from_released",
    "generate_text",
    "load_language_model",
    "load_tokenizer",
    "matched_transformer",
    "read_released",
    "read_text_meta",
    "read_tokens",
    "released_config",
    "save_language_model",
    "to_released",
    "transformer_lm",
]

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig, exist_ok=True)
AutoModelForCausalLM.register(TokenFormerConfig, TokenFormerForCausalLM, exist_ok=True)
