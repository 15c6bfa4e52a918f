"""Export a trained classifier to timm: weights, arguments, preprocessing and class names."""

import math
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import get_model_args
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.models.checkpoints import describe_model, save_model

from .config import datasets, name_of
from .engine import ClsBatchNormNeck, LinearClsHead, MAEPretrainDecoder, MAEPretrainHead
from .models.backbone import num_classes


def preprocessing(cfg: Any) -> dict[str, Any]:
    """Translate the test pipeline and the normalisation of a config into timm's data config.

    Without ``input_size`` in it, the images have the model's own size.
    """
    preprocessor = cfg.model.get("data_preprocessor") or cfg.data_preprocessor
    mean, std = preprocessor.get("mean") or [0.0] * 3, preprocessor.get("std") or [1.0] * 3
    pipeline = next(datasets(cfg.test_dataloader.dataset)).pipeline
    in_bgr = any(name_of(step["type"]) == "LoadImageFromFile" for step in pipeline)  # mmcv's step
    if len(mean) == 3 and in_bgr != bool(preprocessor.get("to_rgb")):
        raise InputError("the model sees images in BGR (data_preprocessor.to_rgb), timm's are RGB")
    unchanging = ["LoadImage", "LoadImageFromFile", "PackInputs"]
    if len(mean) == 1:  # timm's images are then grey; of three equal channels they would not be
        unchanging.append("v2/Grayscale")
    config = _geometry([step for step in pipeline if name_of(step["type"]) not in unchanging])
    if "input_size" in config:
        config["input_size"] = (len(mean), *config["input_size"][-2:])
    return {"mean": [v / 255 for v in mean], "std": [v / 255 for v in std], **config}


def _geometry(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Translate the steps that resize and crop."""
    kinds = [name_of(step["type"]) for step in steps]
    if not kinds:  # the images have the size of the model
        return {"crop_pct": 1.0, "crop_mode": "squash"}
    if kinds == ["EvalTransform"]:
        defaults = {"crop_pct": 0.875, "interpolation": "bicubic", "crop_mode": "center"}
        return {**defaults, **{key: value for key, value in steps[0].items() if key != "type"}}
    scale: Any = steps[0].get("scale")
    crop = steps[-1].get("crop_size")
    how = {"interpolation": steps[0].get("interpolation", "bilinear"), "crop_mode": "center"}
    if kinds == ["Resize"] and scale and not steps[0].get("keep_ratio"):
        size = (scale, scale) if isinstance(scale, int) else (scale[1], scale[0])
        return {**how, "input_size": size, "crop_pct": 1.0, "crop_mode": "squash"}
    short = kinds == ["ResizeEdge", "CenterCrop"] and steps[0].get("edge", "short") == "short"
    if short and isinstance(crop, int):
        share = crop / scale
        if math.floor(crop / share) != scale:  # timm would resize to a pixel less
            share = crop / (scale + 0.5)
        return {**how, "input_size": (crop, crop), "crop_pct": share}
    raise InputError(f"timm has no such test pipeline ({', '.join(kinds)}): use EvalTransform")


def resizes_with_opencv(cfg: Any) -> bool:
    """Tell whether the test pipeline resizes with OpenCV, mmpretrain's default."""
    steps = next(datasets(cfg.test_dataloader.dataset)).pipeline
    resizing = (step for step in steps if name_of(step["type"]) in ("Resize", "ResizeEdge"))
    return any(step.get("backend", "cv2") == "cv2" for step in resizing)


def check_exportable(classifier: Any) -> None:
    """Refuse a classifier of which timm's model would lose a part."""
    backbone, head = getattr(classifier, "backbone", None), getattr(classifier, "head", None)
    neck = getattr(classifier, "neck", None)
    if not hasattr(getattr(backbone, "model", None), "pretrained_cfg"):
        raise InputError(f"{type(backbone).__name__} is not a model of timm")
    if not isinstance(head, LinearClsHead | MAEPretrainHead):
        raise InputError(f"the head of a timm model is linear, but this is {type(head).__name__}")
    if not isinstance(neck, ClsBatchNormNeck | MAEPretrainDecoder | None):
        raise InputError(f"a timm model has no {type(neck).__name__} before its head")
    norm = getattr(neck, "bn", None)  # of a linear probe, which goes into the head
    if norm is not None and (norm.affine or norm.eps != 1e-6):
        raise InputError(f"model.neck has affine={norm.affine} and eps={norm.eps}: omit both")


def as_timm_model(classifier: Any) -> nn.Module:
    """Copy an mmpretrain classifier to the CPU, as a timm model; that of an MAE has no head."""
    check_exportable(classifier)
    backbone, state_dict = classifier.backbone, classifier.state_dict()
    if hasattr(backbone, "exported"):  # LoRA adds its products to the weights
        state_dict = backbone.exported(state_dict)
    # Built from the recorded arguments, which timm then writes into config.json.
    args = {**get_model_args(backbone.model), "num_classes": num_classes(classifier)}
    with torch.random.fork_rng(devices=[]):  # a run goes on with its own random numbers
        model = timm.create_model(backbone.model.pretrained_cfg["architecture"], **args)
    model.load_state_dict(timm_state_dict(state_dict))
    return model


# What may be raised for a classifier that timm cannot express.
IMPOSSIBLE = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


def describe_classifier(classifier: Any, cfg: Any, metainfo: dict) -> dict[str, Any]:
    """Return the ``config.json`` of a classifier's export, or raise one of ``IMPOSSIBLE``."""
    check_exportable(classifier)
    number = num_classes(classifier)
    names = metainfo["classes"] if number else None
    return describe_model(classifier.backbone.model, number, names, preprocessing(cfg))


def export_classifier(
    classifier: Any, cfg: Any, metainfo: dict, folder: str | Path, facts: dict | None = None
) -> None:
    """Write an mmpretrain classifier as a timm folder, with ``facts`` in its model card."""
    names = metainfo["classes"] if num_classes(classifier) else None
    save_model(as_timm_model(classifier), Path(folder), names, preprocessing(cfg), facts)
