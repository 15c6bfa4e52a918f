"""Language models in mmengine's runner; importing it registers the pieces.

The configs ``lm_*.py`` name this package in ``custom_imports``, beside
``tokenformer_vit.training``, which does without Hugging Face's libraries.
"""

from .data import TokenDataset
from .hooks import LanguageExportHook, LanguageGuardHook
from .metrics import AnswerAccuracy, Perplexity
from .model import CausalLM

__all__ = [
    "AnswerAccuracy",
    "CausalLM",
    "LanguageExportHook",
    "LanguageGuardHook",
    "Perplexity",
    "TokenDataset",
]
