"""Language models in mmengine's runner.

The configs ``lm_*.py`` name this package in ``custom_imports``, which registers its classes.
``tokenformer_vit.training`` needs none of Hugging Face's libraries.
"""

from .data import TokenDataset
from .hooks import LanguageGuardHook, LanguageResultsHook
from .metrics import AnswerAccuracy, Perplexity
from .model import CausalLM

__all__ = [
    "AnswerAccuracy",
    "CausalLM",
    "LanguageGuardHook",
    "LanguageResultsHook",
    "Perplexity",
    "TokenDataset",
]
