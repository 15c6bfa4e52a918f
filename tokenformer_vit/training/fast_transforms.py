"""mmpretrain's transforms of photographs, with faster calls and fewer copies.

They draw the same random numbers as mmpretrain's and give the same images, but for the rounding of
a resize. PyTorch's antialiased resize has Pillow's filter and takes a third of the time. What
changes each value of a channel alone is worked out once for each of the 256 values.
"""

from math import ceil
from typing import Any

import cv2
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmpretrain.datasets import transforms as stock
from mmpretrain.registry import TRANSFORMS
from PIL import Image, ImageOps
from torch.nn.functional import interpolate

from tokenformer_vit.errors import InputError

_LEVELS = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, axis=2)  # (256, 1, 3)
_POINTWISE = (stock.Brightness, stock.Invert, stock.Posterize, stock.Solarize, stock.SolarizeAdd)
# Pillow's tables are those of mmcv.
_PILLOW = {stock.AutoContrast: ImageOps.autocontrast, stock.Equalize: ImageOps.equalize}


@TRANSFORMS.register_module()
class FastRandomResizedCrop(stock.RandomResizedCrop):
    """mmpretrain's ``RandomResizedCrop`` with ``backend="pillow"``.

    Args:
        scale: Size of the result, a number or (H, W).
        interpolation: ``bilinear`` or ``bicubic``.
        **kwargs: As for ``RandomResizedCrop``.
    """

    def __init__(self, scale: Any, interpolation: str = "bicubic", **kwargs: Any) -> None:
        super().__init__(scale, interpolation=_checked(interpolation), **kwargs)

    def transform(self, results: dict) -> dict:
        """Replace ``img``, (H, W, 3) uint8, by a random crop of it, resized."""
        top, left, height, width = self.rand_crop_params(results["img"])
        crop = results["img"][top : top + height, left : left + width]
        planes = _resize(crop, self.interpolation, size=tuple(self.scale))
        results["img"] = cv2.merge(list(planes))  # OpenCV would copy a view more slowly
        results["img_shape"] = tuple(self.scale)
        return results


@TRANSFORMS.register_module()
class FastCenterCrop(BaseTransform):
    """mmpretrain's ``ResizeEdge`` of the shorter edge with ``backend="pillow"``, and ``CenterCrop``.

    Args:
        scale: Length of the shorter edge after the resize.
        crop_size: Height and width of the crop.
        interpolation: ``bilinear`` or ``bicubic``.

    Raises:
        InputError: If the crop is larger than the resized image may be.
    """

    def __init__(self, scale: int, crop_size: int, interpolation: str = "bicubic") -> None:
        if crop_size > scale:
            raise InputError(
                f"FastCenterCrop: crop_size is {crop_size}, but the shorter edge is resized to "
                f"{scale}: make crop_size at most scale"
            )
        self.scale, self.crop_size = scale, crop_size
        self.interpolation = _checked(interpolation)

    def transform(self, results: dict) -> dict:
        """Replace ``img``, (H, W, 3) uint8, by the central crop of the resized image."""
        image, crop = results["img"], self.crop_size
        before = image.shape[:2]
        after = [int(self.scale * side / min(before)) for side in before]
        top, left = (round((side - crop) / 2) for side in after)
        # Pixels right of the crop and below it are not made. A pixel is made from at most two
        # others, or two of the result, in each direction. Upwards, a shortened side could keep its
        # length, and PyTorch would not resize it.
        height, width = (
            old if new >= old else min(old, ceil((start + crop + 2) * old / new) + 1)
            for old, new, start in zip(before, after, (top, left), strict=True)
        )
        # PyTorch rounds the new length down, so what is a whole number must not become smaller.
        factors = tuple(
            new / old * (1 + 1e-12) for old, new in zip(before, after, strict=True)
        )
        planes = _resize(image[:height, :width], self.interpolation, scale_factor=factors)
        planes = planes[:, top : top + crop, left : left + crop]
        results["img"] = planes.transpose(1, 2, 0)
        results["img_shape"] = (crop, crop)
        return results


def _checked(interpolation: str) -> str:
    if interpolation not in ("bilinear", "bicubic"):
        raise InputError(
            f"interpolation is {interpolation!r}: set bilinear or bicubic, or use mmpretrain's own "
            "transforms with backend='pillow'"
        )
    return interpolation


def _resize(image: np.ndarray, interpolation: str, **to: Any) -> np.ndarray:
    """Resize (H, W, 3) to (3, H', W'). PyTorch has a fast path from this to that order."""
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    return interpolate(pixels, mode=interpolation, antialias=True, **to)[0].numpy()


@TRANSFORMS.register_module()
class FastRandomFlip(BaseTransform):
    """mmcv's horizontal ``RandomFlip``.

    Args:
        prob: Probability of a flip.
    """

    def __init__(self, prob: float) -> None:
        self.prob = prob

    def transform(self, results: dict) -> dict:
        """Mirror ``img``, or leave it as it is."""
        # The number that np.random.choice would draw; making a choice takes ten times as long.
        results["flip"] = np.random.rand() < self.prob  # noqa: NPY002
        if results["flip"]:
            results["img"] = cv2.flip(results["img"], 1)
        return results


@TRANSFORMS.register_module()
class FastRandAugment(stock.RandAugment):
    """mmpretrain's ``RandAugment``."""

    def transform(self, results: dict) -> dict:
        """Apply operations that are chosen at random to ``img``, (H, W, 3) uint8."""
        for index in self.random_policy_indices():
            operation = self.transforms[index]
            if isinstance(operation, _POINTWISE):
                table = operation({"img": _LEVELS})["img"]
                if table is not _LEVELS:
                    results["img"] = cv2.LUT(results["img"], table)
            elif change := _PILLOW.get(type(operation)):
                if not operation.random_disable():
                    results["img"] = np.array(change(Image.fromarray(results["img"])))
            else:
                operation(results)
        return results
