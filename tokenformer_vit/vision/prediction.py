"""Classify image files with a timm model."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.errors import InputError

from .images import read_images


def predict(
    model: nn.Module,
    paths: Sequence[Path],
    topk: int = 5,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Path, list[dict[str, Any]] | Exception]]:
    """Classify images with the model's evaluation transform.

    Args:
        model: timm classifier for RGB images.
        paths: Image files.
        topk: Number of classes to return for each image; all if the model has fewer.
        batch_size: Images in a forward pass.
        device: Device to compute on.

    Yields:
        Each path, in order, with its top classes as {label, index, probability}, or with the error
        of reading the image.

    Raises:
        InputError: If the model does not take RGB images, has no classifier, or returns a value
            that is not finite.
    """
    config = resolve_input_data_config(model)
    if not model.num_classes:
        raise InputError("the model has no classifier; give a model that was trained to classify")
    names = class_names(model)
    topk = min(topk, len(names))
    model = model.to(device)
    with closing(read_images(paths, config, batch_size)) as batches:
        for batch in batches:
            readable = [image for _, image in batch if isinstance(image, Tensor)]
            tops = iter(_top(model, torch.stack(readable).to(device), topk) if readable else ())
            for path, image in batch:
                if isinstance(image, Exception):
                    yield path, image
                else:
                    yield (
                        path,
                        [{"label": names[i], "index": i, "probability": p} for i, p in next(tops)],
                    )


def class_names(model: Any) -> list[str]:
    """Return the names of a model's classes; without any, those of ImageNet-1K, or numbers."""
    names = model.pretrained_cfg.get("label_names") or ()
    if len(names) == model.num_classes:
        return [str(name) for name in names]
    if model.num_classes == 1000:
        return ImageNetInfo().label_descriptions()  # type: ignore[return-value]
    return [f"class {index}" for index in range(model.num_classes)]


@torch.inference_mode()
def _top(model: nn.Module, images: Tensor, topk: int) -> list[list[tuple[int, float]]]:
    probabilities = model(images).float().softmax(dim=-1)  # (B, K)
    if not probabilities.isfinite().all():
        raise InputError(
            "the model's output is not finite: its training diverged; use an earlier checkpoint"
        )
    values, indices = probabilities.topk(topk)
    return [
        list(zip(i, p, strict=True)) for i, p in zip(indices.tolist(), values.tolist(), strict=True)
    ]
