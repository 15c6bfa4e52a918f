"""Classify image files with a timm model and a checkpoint that is read without running its code."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.description import class_names, data_config

from .images import read_images

__all__ = ["predict"]


def predict(
    model: nn.Module,
    paths: Sequence[Path],
    topk: int = 5,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Path, list[dict[str, Any]] | Exception]]:
    """Classify images with the transform of the model's evaluation.

    Args:
        model: timm classifier of RGB images.
        paths: Image files.
        topk: Number of classes an image, at most all.
        batch_size: Images in a forward pass.
        device: Where to compute.

    Yields:
        Every path in order, with the likeliest classes as {label, index, probability}, likeliest
        first, or with the error of reading the image.

    Raises:
        InputError: If the model takes no RGB images, has no classifier, or yields NaN.
    """
    config = data_config(model)
    if not model.num_classes:
        raise InputError("the model has no classifier: choose one that was trained to classify")
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


@torch.inference_mode()
def _top(model: nn.Module, images: Tensor, topk: int) -> list[list[tuple[int, float]]]:
    probabilities = model(images).float().softmax(dim=-1)  # (B, K)
    if not probabilities.isfinite().all():
        raise InputError(
            "the model's output is not finite; its checkpoint is of a training that diverged"
        )
    values, indices = probabilities.topk(topk)
    return [
        list(zip(i, p, strict=True)) for i, p in zip(indices.tolist(), values.tolist(), strict=True)
    ]
