"""mmpretrain's transforms of photographs, with faster calls and fewer copies.

They draw the same random numbers as mmpretrain's and give the same images, but for the rounding of
a resize. PyTorch's antialiased resize has Pillow's filter and takes a third of the time. What
changes each value of a channel alone is worked out once for each of the 256 values.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import cv2
import mmcv
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmcv.transforms.utils import cache_randomness
from mmpretrain.datasets import transforms as stock
from mmpretrain.registry import TRANSFORMS
from PIL import Image, ImageOps
from torch.nn.functional import interpolate

from tokenformer_vit.errors import InputError

# What ColorJitter does, in the order of its factors; RandAugment has the same operations.
JITTER = (stock.Brightness, stock.Contrast, stock.ColorTransform)
_LEVELS = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, axis=2)  # (256, 1, 3)
# What an operation of RandAugment with a value does to an image, (H, W, 3) uint8 in BGR.
_Change = Callable[[Any, np.ndarray, Any], np.ndarray]


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
    """mmpretrain's ``ResizeEdge`` with ``backend="pillow"``, and ``CenterCrop``.

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
        factors = tuple(new / old * (1 + 1e-12) for old, new in zip(before, after, strict=True))
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
        results["flip"] = self._random_flip()
        if results["flip"]:
            results["img"] = cv2.flip(results["img"], 1)
        return results

    @cache_randomness
    def _random_flip(self) -> bool:
        # The number that np.random.choice would draw; making a choice takes ten times as long.
        return np.random.rand() < self.prob  # noqa: NPY002


@TRANSFORMS.register_module()
class FastRandAugment(stock.RandAugment):
    """mmpretrain's ``RandAugment``."""

    def transform(self, results: dict) -> dict:
        """Apply operations that are chosen at random to ``img``, (H, W, 3) uint8."""
        for index in self.random_policy_indices():
            operation = self.transforms[index]
            if type(operation) not in _OPERATIONS:
                results = operation(results)
            elif not operation.random_disable():
                name, signed, change = _OPERATIONS[type(operation)]
                value: Any = getattr(operation, name)
                if value is None:
                    value = operation.random_magnitude()
                if signed:
                    value = operation.random_negative(value)
                results["img"] = change(operation, results["img"], value)
        return results


@TRANSFORMS.register_module()
class FastColorJitter(stock.ColorJitter):
    """mmpretrain's ``ColorJitter`` with ``backend="cv2"``, without hue.

    Args:
        brightness: Largest change of the factor 1, or its range.
        contrast: As ``brightness``.
        saturation: As ``brightness``.
    """

    def __init__(self, brightness: Any = 0.0, contrast: Any = 0.0, saturation: Any = 0.0) -> None:
        super().__init__(brightness, contrast, saturation, backend="cv2")

    def transform(self, results: dict) -> dict:
        """Change ``img``, (H, W, 3) uint8, in a random order of the three."""
        order, *factors = self._rand_params()
        for index in order:
            if factors[index] is not None:
                *_, change = _OPERATIONS[JITTER[index]]
                results["img"] = change(None, results["img"], factors[index] - 1)
        return results


def _by_table(change: _Change) -> _Change:
    """Change an image by a table of what each of the 256 values becomes."""
    return lambda operation, image, value: cv2.LUT(
        image, change(operation, _LEVELS, value).astype(np.uint8)
    )


def _by_pillow(change: Callable[[Image.Image], Image.Image]) -> _Change:
    """Change an image by a function of Pillow that treats all channels alike."""
    return lambda operation, image, value: np.array(change(Image.fromarray(image)))


def _by_warp(warp: Callable[..., np.ndarray]) -> _Change:
    """Change an image by mmcv's function for a shear or a translation."""
    return lambda operation, image, value: warp(
        image, value, operation.direction, operation.pad_val, operation.interpolation
    )


def _translate(operation: Any, image: np.ndarray, value: float) -> np.ndarray:
    side = image.shape[1 if operation.direction == "horizontal" else 0]
    return _by_warp(mmcv.imtranslate)(operation, image, value * side)


def _rotate(operation: Any, image: np.ndarray, angle: float) -> np.ndarray:
    options = operation.center, operation.scale, operation.pad_val, operation.interpolation
    return mmcv.imrotate(image, angle, *options)


def _solarize_add(operation: Any, image: np.ndarray, value: float) -> np.ndarray:
    return np.where(image < operation.thr, np.minimum(image + value, 255), image)


def _contrast(operation: Any, image: np.ndarray, value: float) -> np.ndarray:
    mean = round(cv2.mean(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))[0])
    levels = _LEVELS.astype(np.float32)
    table = cv2.addWeighted(levels, 1 + value, np.full_like(levels, mean), -value, 0)
    return cv2.LUT(image, table.clip(0, 255).astype(np.uint8))


# For each operation: the attribute that holds its value, which is drawn if that is None; whether a
# sign is drawn, too; and what it does. Some have no value, and do not use their probability.
_OPERATIONS: dict[type, tuple[str, bool, _Change]] = {
    stock.AutoContrast: ("prob", False, _by_pillow(ImageOps.autocontrast)),  # as mmcv's
    stock.Equalize: ("prob", False, _by_pillow(ImageOps.equalize)),
    stock.Invert: ("prob", False, lambda _, image, value: cv2.bitwise_not(image)),
    stock.Posterize: ("bits", False, _by_table(lambda _, x, v: mmcv.posterize(x, ceil(v)))),
    stock.Solarize: ("thr", False, _by_table(lambda _, x, v: mmcv.solarize(x, v))),
    stock.SolarizeAdd: ("magnitude", False, _by_table(_solarize_add)),
    stock.Brightness: (
        *("magnitude", True),
        _by_table(lambda _, x, v: mmcv.adjust_brightness(x, 1 + v)),
    ),
    stock.Contrast: ("magnitude", True, _contrast),
    stock.ColorTransform: ("magnitude", True, lambda _, x, v: mmcv.adjust_color(x, 1 + v)),
    stock.Sharpness: ("magnitude", True, lambda _, x, v: mmcv.adjust_sharpness(x, 1 + v)),
    stock.Rotate: ("angle", True, _rotate),
    stock.Shear: ("magnitude", True, _by_warp(mmcv.imshear)),
    stock.Translate: ("magnitude", True, _translate),
}
