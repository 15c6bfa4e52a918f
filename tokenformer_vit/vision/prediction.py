"""Classify image files with a timm model and a checkpoint that is read without running its code."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from timm.utils import ParseKwargs
from torch import Tensor, nn

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.description import class_names, data_config
from tokenformer_vit.vision.images import read_images

__all__ = [
    "KeyValues",
    "choose_device",
    "model_arguments",
    "predict",
]


class KeyValues(ParseKwargs):
    """Action of an option that takes ``KEY=VALUE`` pairs of Python literals into a dict."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Parse the pairs of one option."""
        try:
            super().__call__(parser, namespace, values, option_string)
        except ValueError as error:  # it splits at "=" and trusts that there is one
            raise argparse.ArgumentError(self, "takes KEY=VALUE") from error


def model_arguments() -> argparse.ArgumentParser:
    """Return the options that say which model to build, and on what to run it.

    Returns:
        A parser to be named among the ``parents`` of another, with ``--model``,
        ``--model-kwargs``, ``--num-classes``, ``--batch-size`` and ``--device``.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help="timm model name, or local-dir:FOLDER")
    add(
        "--model-kwargs",
        nargs="+",
        action=KeyValues,
        default={},
        metavar="KEY=VALUE",
        help="arguments of the model, such as img_size=32 patch_size=4",
    )
    add(
        "--num-classes", type=whole_number(1), metavar="N", help="default: as the checkpoint's head"
    )
    add("--batch-size", type=whole_number(1), default=32, metavar="B", help="default: 32")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser


def choose_device(name: str) -> torch.device:
    """Return the device of a ``--device``: ``cpu``, ``cuda``, or ``auto`` for the best there is.

    Raises:
        InputError: If it is ``cuda`` and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but this PyTorch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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
