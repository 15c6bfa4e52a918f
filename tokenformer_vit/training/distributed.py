"""Several processes of one run."""

from typing import Any

from mmengine.model import is_model_wrapper
from torch import nn

__all__ = ["unwrap"]


def unwrap(model: nn.Module) -> Any:
    """Return the model inside a data-parallel wrapper, or the model itself."""
    return model.module if is_model_wrapper(model) else model
