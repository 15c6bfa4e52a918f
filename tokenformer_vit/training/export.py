"""Export a trained classifier to timm: weights, arguments, preprocessing and class names."""

from pathlib import Path, PurePath
from typing import Any

from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.runner import IterBasedTrainLoop
from mmpretrain.registry import MODELS

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import describe_model, save_model
from tokenformer_vit.vision.image_rows import hub_name

from .backbone import TimmClassificationBackbone, as_timm_model, check_exportable, num_classes
from .guard import check_weights, classes_of
from .loop import validation_is_due
from .metrics import RECONSTRUCTION, VAL_LOSS
from .progress import dtype_of
from .steps import highest_rate, sample_noun, samples_per_step
from .storage import load_plain_checkpoint

_LOADERS = ("LoadImage", "LoadImageFromFile")  # both give BGR
# Steps that do not change what an image shows.
_NEUTRAL = (*_LOADERS, "PackInputs")
# Metrics of a validation: their titles in the card, and units.
_RESULTS = {
    "accuracy/top1": ("Top-1 accuracy", " %"),
    "accuracy/top5": ("Top-5 accuracy", " %"),
    VAL_LOSS: ("Cross-entropy", ""),
    RECONSTRUCTION: ("Reconstruction loss of masked patches", ""),
    "perplexity": ("Perplexity", ""),
}


def preprocessing(cfg: Any) -> dict[str, Any]:
    """Translate the test pipeline of a config into timm's preprocessing.

    Args:
        cfg: Config of an image classifier.

    Returns:
        ``mean``, ``std``, ``input_size``, ``crop_pct``, ``interpolation`` and ``crop_mode``.

    Raises:
        InputError: If timm cannot express the pipeline.
    """
    preprocessor = cfg.model.get("data_preprocessor") or cfg.data_preprocessor
    if not (preprocessor.get("mean") and preprocessor.get("std")):
        raise InputError(
            f"{cfg.filename}: the export needs data_preprocessor.mean and .std; set both"
        )
    pipeline = cfg.test_dataloader.dataset.pipeline
    in_bgr = any(step["type"] in _LOADERS for step in pipeline) and not preprocessor.get("to_rgb")
    if in_bgr and len(preprocessor["mean"]) == 3:
        raise InputError(
            f"{cfg.filename}: data_preprocessor.to_rgb is False, but timm gives a model RGB "
            "images: set `default_hooks.export=None` to train without an export, or, for a new "
            "run, set to_rgb=True, with mean and std in RGB"
        )
    steps = [step for step in pipeline if step["type"] not in _NEUTRAL]
    kinds = [step["type"] for step in steps]
    config = {
        "mean": [value / 255 for value in preprocessor["mean"]],
        "std": [value / 255 for value in preprocessor["std"]],
    }
    channels = len(preprocessor["mean"])
    in_two = kinds == ["ResizeEdge", "CenterCrop"] and steps[0].get("edge", "short") == "short"
    if in_two or kinds == ["FastCenterCrop"]:
        crop, resize = steps[-1]["crop_size"], steps[0]
        if isinstance(crop, int):
            return config | {
                "input_size": (channels, crop, crop),
                "crop_pct": crop / resize["scale"],
                "interpolation": resize.get("interpolation", "bilinear" if in_two else "bicubic"),
                "crop_mode": "center",
            }
    raise InputError(
        f"the test pipeline of {cfg.filename} ({', '.join(kinds) or 'nothing'}) cannot be "
        "exported: give FastCenterCrop, or ResizeEdge (edge 'short') and CenterCrop (one number), "
        "or set `default_hooks.export=None` to train without an export"
    )


def resizes_with_opencv(cfg: Any) -> bool:
    """Tell whether the test pipeline resizes with OpenCV, mmpretrain's default."""
    return any(
        step["type"] == "ResizeEdge" and step.get("backend", "cv2") == "cv2"
        for step in cfg.test_dataloader.dataset.pipeline
    )


def describe_classifier(
    classifier: Any, cfg: Any, metainfo: dict[str, Any]
) -> dict[str, Any] | None:
    """Describe an mmpretrain classifier as the ``config.json`` of its export does.

    Args:
        classifier: The classifier, or a masked autoencoder.
        cfg: Config of the run.
        metainfo: ``metainfo`` of the data set; ``classes`` names the labels.

    Returns:
        The description in plain values. None for a language model and LoRA, and if timm cannot
        express preprocessing, neck or head.
    """
    backbone = getattr(classifier, "backbone", None)
    if not isinstance(backbone, TimmClassificationBackbone):
        return None
    try:
        check_exportable(classifier)
        images = preprocessing(cfg)
    except InputError:
        return None
    number = num_classes(classifier)
    return describe_model(backbone.model, number, metainfo["classes"] if number else None, images)


def run_facts(runner: Any) -> dict[str, Any]:
    """Collect the data, recipe and results of a run for a model card.

    It has results only if the present weights were validated. It has the names of folders, not
    their paths, because a path may be private.
    """
    cfg, info = runner.cfg, runner.train_dataloader.dataset.metainfo
    unit, groups = sample_noun(runner), runner.optim_wrapper.param_groups
    teacher = (cfg.model.get("distillation") or {}).get("teacher")
    root = cfg.train_dataloader.dataset.get("data_root") or ""
    folders = [root] if isinstance(root, str) else list(root)
    validation = None if runner.val_loop is None else f"{len(runner.val_dataloader.dataset):,}"
    by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
    averaged = any(
        isinstance(hook, EMAHook) and getattr(hook, "validated", True) for hook in runner.hooks
    )
    scalars = runner.message_hub.log_scalars
    found = {}
    if runner.val_loop is not None and validation_is_due(runner.train_loop):
        found = {
            title: f"{scalars[f'val/{key}'].current():.4g}{unit_of}"
            for key, (title, unit_of) in _RESULTS.items()
            if f"val/{key}" in scalars
        }
    imagenet = cfg.train_dataloader.dataset.type == "ImageNet" and len(info["classes"]) == 1000
    on_hub = [name for name in map(hub_name, folders) if name]
    sections: dict[str, dict[str, Any]] = {
        "Data": {
            "Folder": ", ".join(PurePath(folder).name for folder in folders) or None,
            f"Training {unit}": f"{len(runner.train_dataloader.dataset):,}",
            f"Validation {unit}": validation,
        },
        "Training": {
            "Config": PurePath(cfg.filename).name if cfg.filename else None,
            "Epochs": None if by_iteration else runner.epoch,
            "Iterations": f"{runner.iter:,}",
            "Optimiser": type(runner.optim_wrapper.optimizer).__name__,
            "Learning rate": f"{highest_rate(runner):.3g} (highest)",
            "Weight decay": f"{max(group.get('weight_decay', 0) for group in groups):.3g}",
            f"Batch size ({unit} a step)": f"{samples_per_step(runner):,}",
            "Precision": dtype_of(runner),
            "Weights": "exponential moving average" if averaged else "those of the last step",
            "Teacher": teacher and PurePath(teacher).name,
            "Seed": runner.seed,
        },
        "Validation": found,
    }
    facts: dict[str, Any] = {
        title: {key: value for key, value in section.items() if value is not None}
        for title, section in sections.items()
        if section
    }
    if datasets := ["imagenet-1k"] if imagenet else on_hub:
        facts["Dataset"] = datasets  # timm also names these in the front matter
    return facts


def export_classifier(
    classifier: Any,
    cfg: Any,
    metainfo: dict[str, Any],
    folder: str | Path,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write an mmpretrain classifier as a timm folder, with a model card.

    Args:
        classifier: ``ImageClassifier`` with a ``TimmClassificationBackbone``, or a
            ``MaskedAutoencoder``, whose encoder is written, without a head.
        cfg: Config of the run; its test pipeline gives the preprocessing.
        metainfo: ``metainfo`` of the data set; ``classes`` names the labels.
        folder: Folder for the files; existing ones are replaced.
        facts: Data, recipe and results for the model card.

    Raises:
        InputError: If timm cannot express the preprocessing.
        OSError: If the files cannot be written.
    """
    model = as_timm_model(classifier)
    names = metainfo["classes"] if num_classes(classifier) else None
    save_model(model, Path(folder), names, preprocessing(cfg), facts)


def forget_start(cfg: Config) -> None:
    """Leave out the weights that a training started from: their file may not exist any more."""
    backbone = cfg.model.backbone.get("module", cfg.model.backbone)  # LoRA wraps it
    for start in ("checkpoint_path", "pretrained"):
        if backbone.get(start):
            backbone[start] = type(backbone[start])()


def export_checkpoint(cfg: Config, checkpoint: Path, folder: Path) -> None:
    """Write the validated weights of a training checkpoint as a timm folder.

    It is for checkpoints without a description: those of LoRA.

    Args:
        cfg: Config of the training.
        checkpoint: File of the checkpoint.
        folder: Folder for the files.

    Raises:
        InputError: If the checkpoint cannot be read, belongs to another model, or does not name
            its classes.
    """
    content = load_plain_checkpoint(str(checkpoint))
    classes = classes_of(content)
    if classes is None:
        raise InputError(
            f"{checkpoint} does not name its classes: export the last checkpoint of the run"
        )
    preprocessor = cfg.model.get("data_preprocessor") or cfg.data_preprocessor
    forget_start(cfg)
    classifier = MODELS.build({**cfg.model, "data_preprocessor": preprocessor})
    check_weights(classifier, content)
    classifier.load_state_dict(content["state_dict"])
    export_classifier(classifier, cfg, {"classes": classes}, folder)
