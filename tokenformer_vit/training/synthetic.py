"""Synthetic images, and models of small tensors, to measure a training without its data."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmpretrain.registry import DATASETS
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS

from .transforms import SeededTransforms

_POOL = 256  # different images: 38 MB at 224 px


@DATASETS.register_module()
class SyntheticImages(Dataset):
    """Random images and labels in memory, fetched a batch at a time.

    Args:
        length: Number of samples; the images repeat after the first 256.
        img_size: Height and width of an image.
        num_classes: Number of classes.
        as_tensor: Return labels as one tensor, as ``PackLabels`` does, not as ``DataSample``.
    """

    def __init__(self, length: int, img_size: int, num_classes: int, as_tensor: bool) -> None:
        self.metainfo = {"classes": [str(label) for label in range(num_classes)]}
        # A run warns of a pipeline without seeded transforms; these images need none.
        self.pipeline = Compose([SeededTransforms([])])
        self._length, self._as_tensor = length, as_tensor
        shape = (min(length, _POOL), 3, img_size, img_size)
        self._images = torch.randint(256, shape, dtype=torch.uint8)
        self._labels = torch.randint(num_classes, shape[:1])

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Fetch a batch.

        Returns:
            ``inputs``, (N, 3, H, W) uint8, and ``data_samples``: (N,) int64, or a list of N.
        """
        rows = torch.tensor(indices) % len(self._images)
        labels: Any = self._labels[rows]
        if not self._as_tensor:
            labels = [DataSample().set_gt_label(label) for label in labels]
        return {"inputs": self._images[rows], "data_samples": labels}

    def fingerprint(self) -> str:
        """Return the identity of the data for a checkpoint."""
        return f"{len(self)} synthetic images"


def shrink(cfg: Config) -> None:
    """Give the model of a config small tensors, and as many of them as before.

    What a step then takes outside the forward and the backward pass is the fixed cost of its
    operations.

    Args:
        cfg: The config, which is changed: width 32, two heads, one patch, and for a TokenFormer 32
            pairs in each layer.

    Raises:
        InputError: If it is not the config of an image classifier.
    """
    model = cfg.model
    if not model.get("head"):
        raise InputError(
            f"{cfg.filename} trains no image classifier, which --small-tensors needs: give the "
            "config of one"
        )
    model.backbone.update(embed_dim=32, num_heads=2, img_size=model.backbone.get("patch_size", 16))
    if model.backbone.model_name.startswith("tokenformer"):
        model.backbone.update(dict.fromkeys(COUNTS.values(), 32))
    model.head.in_channels = 32


def with_synthetic_images(cfg: Config, steps: int, processes: int) -> Config:
    """Return a copy of a config that trains on :class:`SyntheticImages`.

    Args:
        cfg: Config of an image classifier. The synthetic images have its size and its number of
            classes; its loader stays the same.
        steps: Number of optimiser steps for which the images last.
        processes: Number of processes.

    Raises:
        InputError: If the config does not say how large the images are.
    """
    cfg = copy.deepcopy(cfg)
    backbone, loader = cfg.model.get("backbone") or {}, cfg.train_dataloader
    size = (backbone.get("module") or backbone).get("img_size")  # LoRA has the model in a module
    if size is None or not cfg.model.get("head"):
        raise InputError(
            f"{cfg.filename} has no model.backbone.img_size, but synthetic images need a size: set "
            "it in the config"
        )
    pipeline = loader.dataset.get("pipeline") or [{}]
    # One more step: the training ends before the epoch does.
    images = (steps + 1) * cfg.optim_wrapper.get("accumulative_counts", 1) * loader.batch_size
    loader.sampler.pop("num_samples", None)
    loader.dataset = {
        "type": "SyntheticImages",
        "length": images * processes,
        "img_size": size,
        "num_classes": cfg.model.head.num_classes,
        "as_tensor": pipeline[-1].get("type") == "PackLabels",
    }
    loader.collate_fn = {"type": "collate_fetched"}
    return cfg
