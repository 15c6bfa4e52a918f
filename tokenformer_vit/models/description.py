"""The description of a model: architecture, arguments, preprocessing and class names.

It is what timm writes into ``config.json``. An exported folder has this file, and a training
checkpoint of this package has the same content under :data:`DESCRIPTION`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from timm.data import ImageNetInfo, resolve_model_data_config
from timm.models import get_model_args
from torch import nn

from tokenformer_vit.errors import InputError, first_fault, one_line
from tokenformer_vit.layers.arguments import COUNTS, Counts, plain_count

# Key of the description in a training checkpoint.
DESCRIPTION = "timm_config"
CONFIG = "config.json"
CARD = "README.md"
# Weight files that timm's save_for_hf writes next to it, the safe format first.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# The origin of weights, and what a description holds outside of pretrained_cfg.
_NOT_DESCRIBED = (
    *("url", "file", "hf_hub_id", "hf_hub_filename", "state_dict", "source", "tag"),
    *("architecture", "num_classes", "label_names", "label_descriptions"),
)

_Side = Annotated[int, Field(strict=True, ge=1, le=4096)]
_Mean = Annotated[float, Field(strict=True, ge=0, le=1)]
_Std = Annotated[float, Field(strict=True, gt=0, le=10)]


class _DataConfig(BaseModel):
    """Arguments of timm's ``create_transform``, in ranges somewhat wider than in timm's models.

    timm's models have a crop_pct of 0.875 to 1.15, sides of 106 to 1024, means of 0 to 0.5, and
    standard deviations of 0.143 to 1, for values from 0 to 1.
    """

    input_size: tuple[Literal[3], _Side, _Side]
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
    mean: tuple[_Mean, _Mean, _Mean]
    std: tuple[_Std, _Std, _Std]
    crop_pct: Annotated[float, Field(strict=True, ge=0.1, le=2)]
    crop_mode: Literal["center", "squash", "border"]


class _Card(BaseModel):
    """Facts in a training checkpoint, for the model card of its export."""

    model_config = ConfigDict(extra="forbid")

    sections: dict[str, dict[str, Any]] = {}
    datasets: list[str] = []
    metrics: list[str] = []


class _Description(BaseModel):
    """The content of ``config.json``; timm reads other keys without a check.

    Old files have no ``pretrained_cfg``; its entries are keys of the file.
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
    """Return the description of a model, the content of ``config.json``, as plain values.

    Args:
        model: timm model, with or without its head.
        num_classes: Number of classes of the head.
        label_names: Names of the classes, in order.
        data_config: Preprocessing, in timm's words; default: from the model's configuration.
    """
    own: Any = model
    architecture = own.pretrained_cfg["architecture"]
    known = {key: value for key, value in own.pretrained_cfg.items() if key not in _NOT_DESCRIBED}
    args = {**get_model_args(own), **plain_counts(own)}
    args.pop("num_classes", None)
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


def plain_counts(model: nn.Module) -> dict[str, Counts]:
    """Return the numbers of pairs among the arguments of a timm model, as JSON can have them."""
    args = get_model_args(model)
    return {name: plain_count(name, args[name]) for name in COUNTS.values() if name in args}


def configured_names(model: nn.Module) -> list[str] | None:
    """Return the names of the classes in a model's configuration.

    None if it has none, or those of another head than the model's.
    """
    own: Any = model
    names = own.pretrained_cfg.get("label_names")
    return [str(name) for name in names] if names and len(names) == own.num_classes else None


def class_names(model: nn.Module) -> list[str]:
    """Return the names of a model's classes.

    They are the names in its configuration; without them, the names of ImageNet-1K if there are
    1000 classes, otherwise numbers.
    """
    own: Any = model
    if names := configured_names(model):
        return names
    if own.num_classes == 1000:
        return ImageNetInfo().label_descriptions()  # type: ignore[return-value]
    return [f"class {index}" for index in range(own.num_classes)]


def data_config(model: nn.Module) -> dict[str, Any]:
    """Return the preprocessing of a model, as arguments of timm's ``create_transform``.

    Args:
        model: timm model for RGB images.

    Returns:
        ``input_size`` (3, H, W), ``mean``, ``std``, ``interpolation``, ``crop_pct``, ``crop_mode``.

    Raises:
        InputError: If the model is not for RGB images, or a value is out of range.
    """
    if model.in_chans != 3:
        raise InputError(f"the model takes {model.in_chans} channels; give a model of RGB images")
    # The size of the built model; its configuration may still have timm's default.
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    try:
        config = resolve_model_data_config(model, {"input_size": (3, *size)} if size else None)
    except Exception as error:  # it computes with values that may be of any type
        raise InputError(
            f"the preprocessing of the model cannot be used: {one_line(error)}; correct it in the "
            "config.json beside the weights"
        ) from error
    check_data_config(config)
    return config


def check_data_config(config: dict[str, Any]) -> None:
    """Check the preprocessing of a model.

    Args:
        config: Result of timm's ``resolve_model_data_config``: ``input_size`` (3, H, W), ``mean``
            and ``std`` of values from 0 to 1, ``interpolation``, ``crop_pct`` and ``crop_mode``.

    Raises:
        InputError: If a value is missing or out of range; the message names it.
    """
    try:
        _DataConfig.model_validate(config)
    except ValidationError as error:
        raise InputError(
            f"the preprocessing of the model cannot be used: {first_fault(error)}; correct it in "
            "the config.json beside the weights"
        ) from error


def find_description(checkpoint: Path, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find and check the description of a checkpoint, in the file or in ``config.json`` next to it.

    Args:
        checkpoint: Path of the checkpoint.
        content: Content of the checkpoint.

    Returns:
        The description; None if there is none.

    Raises:
        InputError: If the description is invalid.
    """
    if DESCRIPTION in content:
        return _check_description(content[DESCRIPTION], checkpoint)
    # Only for an exported file: a training checkpoint in this folder may have another size.
    config = checkpoint.with_name(CONFIG)
    if checkpoint.name in WEIGHT_FILES and config.is_file():
        return read_description(config)
    return None


def trained_arguments(checkpoint: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model arguments in the description of a checkpoint; see :func:`find_description`.

    Empty if there is no description, or what is beside the checkpoint is not one.
    """
    try:
        description = find_description(checkpoint, content)
    except InputError:
        return {}
    return (description or {}).get("model_args") or {}


def read_description(path: Path) -> dict[str, Any]:
    """Read and check a ``config.json``.

    Raises:
        InputError: If the file is not JSON, is for a model of transformers, or the description is
            invalid.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not readable JSON ({one_line(error)}); export again"
        ) from error
    if isinstance(content, dict):
        if "architecture" not in content and "model_type" in content:
            raise InputError(
                f"{path} is for a model of transformers ({content['model_type']!r}), not for an "
                "image model: give the folder of an image model; for a language model see "
                "tokenformer_vit/language/README.md"
            )
        content.pop("card", None)  # only a training checkpoint has our card; this key is foreign
    return _check_description(content, path)


def _check_description(content: Any, path: Path) -> dict[str, Any]:
    try:
        _Description.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{path}: {first_fault(error)}; export the model again") from error
    return content
