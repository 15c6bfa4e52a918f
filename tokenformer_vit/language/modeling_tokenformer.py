"""Where transformers finds the classes of this model: in the package tokenformer-vit."""

try:
    from tokenformer_vit.language import (
        TokenFormerConfig,
        TokenFormerForCausalLM,
        TokenFormerForSequenceClassification,
        TokenFormerModel,
    )
except ImportError as error:
    raise ImportError(
        "this model needs the package tokenformer-vit: in its clone, run pip install '.[language]'"
    ) from error

__all__ = [
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForSequenceClassification",
    "TokenFormerModel",
]
