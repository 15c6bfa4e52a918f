"""Language models in mmengine's runner.

Importing this package registers its classes. The configs ``lm_*.py`` name it in
``custom_imports``, with ``tokenformer_vit.training``, which needs none of Hugging Face's libraries.
Image classifiers use the same loop, schedule, checkpoints, growth and record. This package has the
data set, the model, the metrics, and its own checks and export.
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
