"""Language models under Hugging Face's transformers.

Importing this package registers the model type ``tokenformer`` with the Auto classes of
transformers. It imports Hugging Face's libraries, and none of OpenMMLab's. See README.md.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .from_gpt2 import from_gpt2
from .generation import load_language_model, save_language_model
from .modeling import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForSequenceClassification,
    TokenFormerModel,
)
from .released import from_released, read_released
from .tokenizers import byte_tokenizer, check_tokens_agree, load_tokenizer, train_tokenizer
from .transformer import matched_transformer, transformer_lm

__all__ = [
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForSequenceClassification",
    "TokenFormerModel",
    "byte_tokenizer",
    "check_tokens_agree",
    "from_gpt2",
    "from_released",
    "load_language_model",
    "load_tokenizer",
    "matched_transformer",
    "read_released",
    "save_language_model",
    "train_tokenizer",
    "transformer_lm",
]

AutoConfig.register(TokenFormerConfig.model_type, TokenFormerConfig, exist_ok=True)
for _auto_class, _model in (
    (AutoModel, TokenFormerModel),
    (AutoModelForCausalLM, TokenFormerForCausalLM),
    (AutoModelForSequenceClassification, TokenFormerForSequenceClassification),
):
    _auto_class.register(TokenFormerConfig, _model, exist_ok=True)
# register() does not fill this table of names, by which Trainer finds out that a model needs
# shifted labels under label_smoothing_factor, and pipeline() which models write text.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TokenFormerConfig.model_type] = TokenFormerForCausalLM.__name__
