"""Language models in mmengine's runner: ``custom_imports`` of the configs ``lm_*.py``."""

from . import data, hooks, metrics, model  # noqa: F401
