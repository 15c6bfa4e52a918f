"""Classify image files with a timm model and a checkpoint that is read without running its code."""

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.utils import ParseKwargs
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import class_names, data_config

__all__ = [
    "KeyValues",
    "choose_device",
    "find_images",
    "model_arguments",
    "predict",
    "read_images",
    "say_skipped",
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


def find_images(paths: Sequence[Path]) -> list[Path]:
    """List the files among ``paths`` and the images in folders among them, at any depth.

    Args:
        paths: Files, taken whatever their suffix, and folders.

    Returns:
        Files in the order given, those of a folder sorted.

    Raises:
        InputError: If a path does not exist or a folder has no image.
    """
    images = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)
            if not found:
                raise InputError(
                    f"there is no image in the folder {path} ({' '.join(IMG_EXTENSIONS)})"
                )
            images += found
        elif path.exists():
            images.append(path)
        else:
            raise InputError(f"there is no file or folder {path}")
    return images


def read_images(
    paths: Sequence[Path], config: dict[str, Any], batch_size: int
) -> Generator[list[tuple[Path, Tensor | Exception]], None, None]:
    """Read images as a model's evaluation does, with a bar if there is more than one batch.

    Args:
        paths: Image files.
        config: What :func:`data_config` returns.
        batch_size: Images at a time.

    Yields:
        The paths of a batch in order, each with its (3, H, W) image or with the exception that
        reading it raised.
    """
    transform: Any = create_transform(**config, is_training=False)

    def read(path: Path) -> tuple[Path, Tensor | Exception]:
        try:
            with Image.open(path) as image:
                return path, transform(image.convert("RGB"))
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
            return path, error

    quiet = len(paths) <= batch_size  # tqdm's None: a bar if stderr is a terminal
    with (
        ThreadPoolExecutor() as pool,
        tqdm(total=len(paths), unit="image", leave=False, disable=quiet or None) as bar,
    ):
        for start in range(0, len(paths), batch_size):
            batch = list(pool.map(read, paths[start : start + batch_size]))
            yield batch
            bar.update(len(batch))


def say_skipped(path: Path, error: Exception) -> None:
    """Name on stderr, above any bar, an image that could not be read, and why."""
    reason = " ".join(str(error).split()) or type(error).__name__
    tqdm.write(f"skipped: {path}: {reason}", file=sys.stderr)


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
        first, or with the exception that reading the image raised.

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
