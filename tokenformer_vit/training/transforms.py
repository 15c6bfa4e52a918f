"""Image loading that names a corrupt file, and augmentation that can be repeated exactly."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import ClassBalancedDataset, RepeatDataset
from mmpretrain.registry import TRANSFORMS
from torch.utils.data import get_worker_info

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.images import read_bgr

from .loop import place_of

_GENERATOR = np.random.MT19937()


@TRANSFORMS.register_module()
class LoadImage(BaseTransform):
    """Decode an image file as prediction does; a corrupt image stops the run.

    Nothing is skipped silently: a run on a part of the data would go unnoticed, and a random
    replacement could not be repeated on resume. mmcv decodes some files differently. With OpenCV,
    its default, the missing part of a truncated JPEG becomes grey without a warning. With Pillow,
    it clips 16-bit values to white, and gives only some transparent images a grey background.

    Raises:
        InputError: If the file cannot be decoded; the message names it.
    """

    def transform(self, results: dict) -> dict | None:
        """Add ``img`` (H, W, 3) uint8 BGR and its shape to ``results``.

        Args:
            results: A sample with ``img_path``, and perhaps ``img_bytes``, the content of the file.
        """
        if "img" in results:  # mmpretrain's inferencers decode their inputs themselves
            return results
        content = results.pop("img_bytes", None)
        try:
            results["img"] = read_bgr(results["img_path"], content)
        except InputError as error:
            way_out = (
                "replace or delete it (`tokenformer-vit prepare-data --check DATA_ROOT` lists all "
                "such files)"
                if content is None
                else "download the file again, or remove the row"
            )
            raise InputError(f"cannot read image {error}; {way_out}") from error
        results["img_shape"] = results["ori_shape"] = results["img"].shape[:2]
        return results


@contextmanager
def _seeded(*key: int) -> Iterator[None]:
    """Seed all generators that transforms draw from, and restore them afterwards."""
    # NumPy's global generator is the one that mmcv's and mmpretrain's transforms use. To copy its
    # state twice would be slow, so its bit generator is replaced instead. That drops the normal
    # number that NumPy may keep for the next call. In the main process, mixup may draw it.
    numpy: Any = np.random  # whose stubs lack these two functions
    kept = numpy.get_state(legacy=False) if get_worker_info() is None else {"has_gauss": 0}
    states = random.getstate(), numpy.get_bit_generator(), torch.get_rng_state()
    words = np.random.SeedSequence(key).generate_state(4)
    random.seed(int(words[0]))
    numpy.set_bit_generator(_GENERATOR)
    np.random.seed(words[1:3])  # noqa: NPY002
    torch.default_generator.manual_seed(int(words[3]))
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.set_bit_generator(states[1])
        if kept["has_gauss"]:
            numpy.set_state(kept)
        torch.set_rng_state(states[2])


@TRANSFORMS.register_module()
class SeededTransforms(BaseTransform):
    """Apply random transforms that depend only on the seed, the epoch and the image.

    The augmentation does not depend on the number of workers or processes, on the worker that reads
    an image, or on an interruption of the run. It differs from epoch to epoch, and in a run by
    iterations from pass to pass.

    Args:
        transforms: Configs of the transforms.

    Attributes:
        key: Seed and epoch, int64 (2,), in memory shared with the data loader's workers.
    """

    def __init__(self, transforms: list[dict]) -> None:
        self.transforms = [TRANSFORMS.build(transform) for transform in transforms]
        self.key = torch.zeros(2, dtype=torch.int64).share_memory_()

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the augmentations of an epoch, also in workers that are running."""
        self.key[0], self.key[1] = seed, epoch

    def transform(self, results: dict) -> dict | None:
        """Apply the transforms to one sample, whose ``sample_idx`` selects its random numbers."""
        transformed: Any = results
        with _seeded(*self.key.tolist(), place_of(results["sample_idx"])):
            for transform in self.transforms:
                transformed = transform(transformed)
        return transformed

    def __repr__(self) -> str:
        """List the transforms."""
        return f"{type(self).__name__}({', '.join(map(repr, self.transforms))})"


def wrapped_datasets(dataset: Any) -> list[Any]:
    """Return the data sets that a data set wraps."""
    inner = (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ()))
    return [each for each in inner if each is not None]


def seeded_transforms(dataset: Any) -> Iterator[SeededTransforms]:
    """Find the :class:`SeededTransforms` of a data set, and of the data sets that it wraps."""
    for inner in wrapped_datasets(dataset):
        yield from seeded_transforms(inner)
    pipeline = getattr(dataset, "pipeline", None)
    for transform in getattr(pipeline, "transforms", ()):
        if isinstance(transform, SeededTransforms):
            yield transform


def check_copies(dataset: Any, endless: bool) -> None:
    """Check that :class:`SeededTransforms` can tell the copies of an image from each other.

    Args:
        dataset: The training data.
        endless: The run is one epoch that takes each image many times.

    Raises:
        InputError: If a data set around the transforms hides which copy of an image they get.
    """
    inner = wrapped_datasets(dataset)
    if not inner or not any(seeded_transforms(dataset)):
        return
    if endless or isinstance(dataset, RepeatDataset | ClassBalancedDataset):
        raise InputError(
            f"train_dataloader.dataset has a {type(dataset).__name__}, with which SeededTransforms "
            "would augment all copies of an image alike: give one data set and a longer run, or "
            "list the transforms in the pipeline without SeededTransforms"
        )
    for each in inner:
        check_copies(each, endless)
