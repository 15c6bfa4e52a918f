"""What describes a model besides its weights: architecture, arguments, preprocessing, class names.

The description is what timm writes into ``config.json``. An exported folder has that file, and a
training checkpoint of this package has the same content under :data:`DESCRIPTION`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from timm.data import ImageNetInfo, resolve_model_data_config
from timm.models import get_model_args
from torch import nn

from tokenformer_vit.errors import InputError

from .weights import one_line

__all__ = [
    "CARD",
    "CONFIG",
    "DESCRIPTION",
    "WEIGHT_FILES",
    "check_data_config",
    "class_names",
    "data_config",
    "describe_model",
    "find_description",
    "read_description",
]

# Key of a training checkpoint under which its model is described.
DESCRIPTION = "timm_config"
CONFIG = "config.json"
CARD = "README.md"
# What timm's save_for_hf writes beside it, the safe format first.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# Where weights came from, and what stands in a description by itself.
_NOT_DESCRIBED = (
    *("url", "file", "hf_hub_id", "hf_hub_filename", "state_dict", "source", "tag"),
    *("architecture", "num_classes", "label_names", "label_descriptions"),
)

_Side = Annotated[int, Field(strict=True, ge=1, le=4096)]
_Mean = Annotated[float, Field(strict=True, ge=0, le=1)]
_Std = Annotated[float, Field(strict=True, gt=0, le=10)]


class _DataConfig(BaseModel):
    """Arguments of timm's ``create_transform``, within what timm's own models use, and some room.

    Their crop_pct is 0.875 to 1.15, their sides 106 to 1024, their means 0 to 0.5, and their
    deviations 0.143 to 1, of values from 0 to 1.
    """

    input_size: tuple[Literal[3], _Side, _Side]
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
    mean: tuple[_Mean, _Mean, _Mean]
    std: tuple[_Std, _Std, _Std]
    crop_pct: Annotated[float, Field(strict=True, ge=0.1, le=2)]
    crop_mode: Literal["center", "squash", "border"]


class _Card(BaseModel):
    """What a training checkpoint tells the model card of its export."""

    model_config = ConfigDict(extra="forbid")

    sections: dict[str, dict[str, Any]] = {}
    datasets: list[str] = []
    metrics: list[str] = []


class _Description(BaseModel):
    """The content of ``config.json``; what is not named here is timm's own business.

    Old files have no ``pretrained_cfg``: its values stand beside the others.
    """

    model_config = ConfigDict(extra="allow")

    architecture: str
    num_classes: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    label_names: list[str] | dict[str, str] | None = None
    model_args: dict[str, Any] | None = None
    pretrained_cfg: dict[str, Any] | None = None
    card: _Card | None = None


def describe_model(
    model: nn.Module,
    num_classes: int,
    label_names: Sequence[str] | None,
    data_config: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what ``config.json`` says of a model, as plain values.

    Args:
        model: timm model, with or without its head.
        num_classes: Of the head.
        label_names: Of the classes, in order.
        data_config: Preprocessing, in timm's words; default: what the model says of it.
    """
    own: Any = model
    architecture = own.pretrained_cfg["architecture"]
    known = {key: value for key, value in own.pretrained_cfg.items() if key not in _NOT_DESCRIBED}
    args = {name: value for name, value in get_model_args(own).items() if name != "num_classes"}
    description = {
        "architecture": architecture,
        "num_classes": num_classes,
        "label_names": list(label_names) if label_names else None,
        "model_args": args,
        "pretrained_cfg": {
            **{key: value for key, value in known.items() if value is not None},
            **resolve_model_data_config(model, dict(data_config or {})),
        },
    }
    return json.loads(json.dumps(description))


def class_names(model: nn.Module) -> list[str]:
    """Name a model's classes: as its export says, else ImageNet-1K's if 1000, else by number."""
    own: Any = model
    names = own.pretrained_cfg.get("label_names")
    if names and len(names) == own.num_classes:
        return [str(name) for name in names]
    if own.num_classes == 1000:
        return ImageNetInfo().label_descriptions()  # type: ignore[return-value]
    return [f"class {index}" for index in range(own.num_classes)]


def data_config(model: nn.Module) -> dict[str, Any]:
    """Return how images are prepared for a model, as arguments of timm's ``create_transform``.

    Args:
        model: timm model of RGB images.

    Returns:
        ``input_size`` (3, H, W), ``mean``, ``std``, and how to resize and crop.

    Raises:
        InputError: If the model takes no RGB images, or one of the values makes no sense.
    """
    if model.in_chans != 3:
        raise InputError(f"the model takes images of {model.in_chans} channels; only RGB is read")
    # The size that the model was built for; its configuration may still say timm's default.
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    try:
        config = resolve_model_data_config(model, {"input_size": (3, *size)} if size else None)
    except Exception as error:  # it counts and compares what a description may say in any type
        raise InputError(
            f"the preprocessing of the model is unusable: {one_line(error)}"
        ) from error
    check_data_config(config)
    return config


def check_data_config(config: dict[str, Any]) -> None:
    """Check how images are prepared for a model, before an image is.

    Args:
        config: What timm's ``resolve_model_data_config`` returns: ``input_size`` (3, H, W),
            ``mean`` and ``std`` of values from 0 to 1, ``interpolation``, ``crop_pct`` and
            ``crop_mode``.

    Raises:
        InputError: If one of them is missing, or no value that makes sense; the message gives it.
    """
    try:
        _DataConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        reason = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "missing":
            reason = "it must have three values" if name in config else "it must be given"
        raise InputError(
            f"the preprocessing of the model has {name} = {config.get(name)!r:.100}, but {reason}; "
            "correct it in the config.json beside the weights"
        ) from error


def find_description(checkpoint: Path, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find and check what describes the model of a checkpoint: in it, or beside it.

    Args:
        checkpoint: The file.
        content: What it holds.

    Returns:
        The content of ``config.json``; None if nothing describes the model.

    Raises:
        InputError: If the description holds something that cannot be.
    """
    if DESCRIPTION in content:
        return _check_description(content[DESCRIPTION], checkpoint)
    # Beside a file of tensors alone; a training checkpoint there may be of another epoch's size.
    config = checkpoint.with_name(CONFIG)
    if checkpoint.name in WEIGHT_FILES and config.is_file():
        return read_description(config)
    return None


def read_description(path: Path) -> dict[str, Any]:
    """Read and check a ``config.json``.

    Raises:
        InputError: If it is no JSON, or holds something that cannot be.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON ({one_line(error)})") from error
    return _check_description(content, path)


def _check_description(content: Any, path: Path) -> dict[str, Any]:
    try:
        _Description.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "its content"
        raise InputError(
            f"{path}: {key} is {str(first['input'])[:80]!r}, but: {first['msg']}; export the model "
            "again"
        ) from error
    return content
