"""Check sizes in a config that must agree: images, patches, layers and numbers of classes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model

from .backbone import TimmClassificationBackbone

# Argument of each transform that gives the size of its output.
_SIZES = {
    "CenterCrop": "crop_size",
    "EfficientNetCenterCrop": "crop_size",
    "EfficientNetRandomCrop": "scale",
    "FastCenterCrop": "crop_size",
    "FastRandomResizedCrop": "scale",
    "RandomCrop": "crop_size",
    "RandomResizedCrop": "scale",
}


def check_classes(cfg: Mapping[str, Any], path: str) -> None:
    """Check that head, batch augmentation and metrics have the same number of classes.

    Args:
        cfg: The config; its values have the right types.
        path: File of the config, for messages.

    Raises:
        InputError: If they differ; the message gives both numbers.
    """
    classes = (cfg["model"].get("head") or {}).get("num_classes")
    if classes is None:
        return
    preprocessor, key = cfg.get("data_preprocessor"), "data_preprocessor.num_classes"
    if own := cfg["model"].get("data_preprocessor"):
        preprocessor, key = own, f"model.{key}"
    number = (preprocessor or {}).get("num_classes")
    if number is None and (cfg["model"].get("train_cfg") or {}).get("augments"):
        raise InputError(
            f"{path}: {key} is not set, but mixing images (model.train_cfg.augments) needs it: set "
            f"`--cfg-options {key}={classes}`"
        )
    if number not in (None, classes):
        raise InputError(
            f"{path}: model.head.num_classes is {classes}, but {key} is {number}: give both the "
            f"number of classes, as in `--cfg-options model.head.num_classes={classes} "
            f"{key}={classes}`"
        )
    for name in ("val_evaluator", "test_evaluator"):
        evaluators = cfg[name]
        for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
            ranks = evaluator.get("topk", 1)
            ranks = [ranks] if isinstance(ranks, int) else ranks
            if min(ranks, default=classes + 1) > classes:
                raise InputError(
                    f"{path}: {name}.topk is {list(ranks)}, but there are {classes} classes: give "
                    f"ranks from 1 to {classes}"
                )


def check_sizes(cfg: Mapping[str, Any], backbone: Mapping[str, Any], key: str, path: str) -> None:
    """Check that the images fit a timm backbone, and that the backbone fits the head.

    Args:
        cfg: The config; its values have the right types.
        backbone: Part of the config with type ``TimmClassificationBackbone``.
        key: Dotted key of that part.
        path: File of the config, for messages.

    Raises:
        InputError: If the model cannot be built, or two sizes differ.
    """
    if ":" in backbone["model_name"]:
        return  # a model from a folder or a hub, where config.json has the sizes
    own = inspect.signature(TimmClassificationBackbone).parameters
    arguments = {
        name: value
        for name, value in backbone.items()
        if name not in own and name not in ("type", "_scope_")
    }
    try:
        with torch.device("meta"):
            model: Any = load_model(backbone["model_name"], None, 0, **arguments)
    except InputError as error:
        raise InputError(f"{path}: {key}: {error}") from error
    width = getattr(model, "head_hidden_size", None) or model.num_features
    head = (cfg["model"].get("head") or {}).get("in_channels", width)
    if head != width and not cfg["model"].get("neck"):
        raise InputError(
            f"{path}: model.head.in_channels is {head}, but {backbone['model_name']} has width "
            f"{width}: set model.head.in_channels={width}, or another {key}.embed_dim"
        )
    kind = (cfg["model"].get("head") or {}).get("type")
    if kind not in (None, "MAEPretrainHead"):
        _check_head(model, kind, key, path)
    preprocessor = cfg["model"].get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    for name in ("mean", "std"):
        values = preprocessor.get(name)
        if values is not None and len(values) != model.in_chans:
            raise InputError(
                f"{path}: data_preprocessor.{name} has {len(values)} values, but the model takes "
                f"images of {model.in_chans} channels: give one for each"
            )
    stem: Any = getattr(model, "patch_embed", None)
    size = getattr(stem, "img_size", None)
    if not size or getattr(model, "dynamic_img_size", False):
        return  # the model takes images of any size
    patch = stem.patch_size
    if any(side % part for side, part in zip(size, patch, strict=True)):
        raise InputError(
            f"{path}: {key}.img_size is {_product(size)}, which is not a multiple of the patch "
            f"size {_product(patch)}: change one of them"
        )
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        step, crop = _last_size(cfg[name]["dataset"].get("pipeline", ()))
        if crop and sorted(crop) != sorted(size):
            raise InputError(
                f"{path}: {key}.img_size is {_product(size)}, but {step} of the {name} makes "
                f"images of {_product(crop)}: give both the same size"
            )


def _check_head(model: Any, kind: Any, key: str, path: str) -> None:
    """Check that the head reads the distillation token if there is one."""
    if isinstance(model, VisionTransformerDistilled) != (kind == "DistilledHead"):
        name = model.pretrained_cfg["architecture"]
        raise InputError(
            f"{path}: model.head.type is {kind}, but {name} has "
            + (
                f"no distillation token: set {key}.model_name to a model with '_distilled' in its "
                "name, or another head"
                if kind == "DistilledHead"
                else "a distillation token: set model.head.type='DistilledHead'"
            )
        )


def _last_size(pipeline: Sequence[Any]) -> tuple[str, tuple[int, ...]]:
    """Return the transform that decides the size of an image, and the size; empty if unknown."""
    step, size = "", ()
    for transform in pipeline:
        if not isinstance(transform, Mapping):  # a list of transforms: a choice of RandomChoice
            transform = {"transforms": transform}
        kind = str(transform.get("type"))
        if kind in _SIZES:
            found = transform.get(_SIZES[kind], ())
            step, size = kind, (found, found) if isinstance(found, int) else tuple(found)
        elif "Resize" in kind or "Crop" in kind or "Pad" in kind:
            step, size = "", ()
        elif within := transform.get("transforms"):
            inner, sides = _last_size(within)
            step, size = (inner, sides) if sides else (step, size)
    return step, size


def _product(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))
