"""Language models in mmengine's runner.

Importing this package registers its classes. The configs ``lm_*.py`` name it in
``custom_imports``, with ``tokenformer_vit.training``, which needs none of Hugging Face's libraries.
Loop, schedule, checkpoints, growth and record are those of image classifiers; this package has
the data set, the model, the metrics, and what differs in the checks and the export.
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
