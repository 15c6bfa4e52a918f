"""Classify image files with a timm model."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import description_of, find_weights, load_model

from .images import read_images


def predict(
    model: nn.Module,
    samples: Sequence[Any],
    topk: int = 5,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Path, list[dict[str, Any]] | InputError]]:
    """Yield each path with its top classes as {label, index, probability}, or with its error.

    ``samples`` are paths of images or ``LabelledImages``; images are prepared as in the model's
    evaluation. InputError if the model has no classifier, or its output is not finite.
    """
    config, names = resolve_input_data_config(model), class_names(model)
    if not names:
        raise InputError("the model has no classifier: give one that was trained to classify")
    model = model.to(device)
    for found, images in read_images(samples, config, batch_size):
        tops = _top(model, images.to(device), names, topk) if len(images) else iter(())
        for path, error in found:
            yield path, error or next(tops)


def load_for_images(name: str | None, checkpoint: Path | None, **kwargs: Any) -> nn.Module:
    """Load a model as ``load_model`` does, and warn if the checkpoint names no preprocessing."""
    model = load_model(name, checkpoint, **kwargs)
    if checkpoint is not None and not description_of(find_weights(checkpoint)):
        warning = "%s does not describe its preprocessing: %s's is used"
        logging.getLogger("tokenformer_vit").warning(warning, checkpoint, name)
    return model


def load_any(source: str, name: str | None = None, **kwargs: Any) -> Any:
    """Load a file or folder as :func:`load_for_images`, or a timm name with its weights."""
    path = Path(source.removeprefix("local-dir:")).expanduser()
    if name or path.exists():
        return load_for_images(name, path, **kwargs)
    if not source.startswith("hf-hub:") and not timm.is_model(source):
        raise InputError(f"{source} is no file or folder, and no name of timm: correct it")
    return timm.create_model(source, pretrained=True, **kwargs).eval()


def class_names(model: Any) -> list[str]:
    """Return the names of a model's classes; without any, those of ImageNet-1K, or numbers."""
    names = model.pretrained_cfg.get("label_names") or ()
    if len(names) == model.num_classes:
        return [str(name) for name in names]
    if model.num_classes == 1000:
        return ImageNetInfo().label_descriptions()  # type: ignore[return-value]
    return [f"class {index}" for index in range(model.num_classes)]


@torch.inference_mode()
def _top(model: nn.Module, images: Tensor, names: list[str], topk: int) -> Iterator[list[dict]]:
    probabilities = model(images).float().softmax(dim=-1)  # (B, K)
    if not probabilities.isfinite().all():
        raise InputError("the model's output is not finite: use an earlier checkpoint")
    best = probabilities.topk(min(topk, len(names)))
    for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        yield [
            {"label": names[index], "index": index, "probability": value}
            for value, index in zip(values, indices, strict=True)
        ]
