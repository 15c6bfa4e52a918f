"""Checkpoints are read without running code, and have tensors and plain values only."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.model import PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS

from tokenformer_vit.errors import InputError
from tokenformer_vit.mmpretrain_names import classifier_state_dict
from tokenformer_vit.models.checkpoints import (
    DESCRIPTION,
    description_of,
    read_checkpoint,
    state_dict_in,
)

__all__ = ["PlainPretrained", "load_plain_checkpoint", "plain_values"]

# A tensor of each of timm's ViTs. In a classifier of mmpretrain its name begins with `backbone.`.
_TIMM_STEM = "patch_embed.proj.weight"


class _Skipped:
    """Stands for the log in a checkpoint of mmengine, whose own class would call what it reads."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Forget the content."""


def _number(kind: _Skipped, raw: bytes) -> Any:
    """Read a number of NumPy, whose own types would take flags from the file."""
    return np.frombuffer(raw, kind.args[0])[0].item()


# What mmengine's own CheckpointHook writes: its log, and numbers of NumPy.
_SKIPPED: list[Any] = [
    (_Skipped, "builtins.getattr"),
    (_Skipped, "mmengine.logging.history_buffer.HistoryBuffer"),
    *((_Skipped, f"numpy.{name}") for name in ("dtype", "ndarray")),
    (_Skipped, "numpy._core.multiarray._reconstruct"),
    (_number, "numpy._core.multiarray.scalar"),
]


def load_plain_checkpoint(filename: str, map_location: Any = None) -> dict[str, Any]:
    """Load a checkpoint of tensors and plain values, without running code.

    Args:
        filename: ``.pth`` file, or ``.safetensors`` file of a timm model.
        map_location: As in ``torch.load``.

    Returns:
        The checkpoint, also one of mmengine's own ``CheckpointHook``. A safetensors file, and a
        checkpoint of timm, gives ``state_dict`` with mmpretrain's names, ``meta`` with the class
        names of its export, and its description under ``DESCRIPTION``.

    Raises:
        InputError: If the file is damaged or holds more than tensors and plain values, or
            ``filename`` is a URL or a name from a model zoo.
    """
    path = Path(filename).expanduser()
    if not path.exists() and re.match(r"[A-Za-z][\w+.-]+:", filename):
        raise InputError(f"{filename} is not a local file: download it first, and give its path")
    with torch.serialization.safe_globals(_SKIPPED):
        checkpoint: dict[str, Any] = read_checkpoint(path, map_location or "cpu")
    weights = checkpoint.get("state_dict", checkpoint)
    if path.suffix == ".safetensors" or (isinstance(weights, dict) and _TIMM_STEM in weights):
        description = description_of(path, checkpoint)
        checkpoint = {"state_dict": classifier_state_dict(state_dict_in(checkpoint, path))}
        if names := description.get("label_names"):
            checkpoint["meta"] = {"dataset_meta": {"classes": names}}
        if description:
            checkpoint[DESCRIPTION] = description
    meta = checkpoint.get("meta")
    if isinstance(meta, dict):
        meta.pop("config", None)  # mmengine's resume would run this text as Python
    return checkpoint


@WEIGHT_INITIALIZERS.register_module()
class PlainPretrained(PretrainedInit):
    """mmengine's ``Pretrained``, for the checkpoints that ``load_plain_checkpoint`` reads.

    Args:
        checkpoint: The file.
        prefix: Beginning of the names of the tensors to take.
    """

    def __call__(self, module: torch.nn.Module) -> None:
        """Load the weights of a module."""
        weights, prefix = load_plain_checkpoint(self.checkpoint)["state_dict"], self.prefix or ""
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        module.load_state_dict(own)


def plain_values(value: Any) -> Any:
    """Convert NumPy values to Python's, and all other objects to text."""
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    return getattr(value, "__qualname__", None) or str(value)
