"""Language models in mmengine's runner.

The configs ``lm_*.py`` name this package in ``custom_imports``, which registers its classes.
``tokenformer_vit.training`` needs none of Hugging Face's libraries.
"""

from . import data, hooks, metrics, model  # noqa: F401
