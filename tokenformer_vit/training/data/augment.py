"""Transforms of images: timm's for evaluation, torchvision's, and a fast RandAugment.

All of them take and give ``img``, (H, W, 3) uint8 in RGB, as mmpretrain's transforms do, and draw
from the global generators of random, NumPy and PyTorch alone.
"""

from collections.abc import Callable
from inspect import isclass
from math import ceil, floor
from typing import Any

import cv2
import mmcv
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmpretrain.datasets import transforms as stock
from mmpretrain.registry import TRANSFORMS
from PIL import Image, ImageOps
from timm.data import create_transform
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode, v2

from tokenformer_vit.errors import InputError

__all__ = ["EvalTransform", "FastRandAugment", "Torchvision"]

_LEVELS = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, axis=2)  # (256, 1, 3)
# What an operation of RandAugment with a value does to an image, (H, W, 3) uint8 in RGB.
_Change = Callable[[np.ndarray, Any], np.ndarray]


class Torchvision(BaseTransform):
    """A transform of ``torchvision.transforms.v2``, applied to a tensor.

    Configs name it, as in ``dict(type="v2/RandomCrop", size=32, padding=4)``; ``interpolation`` may
    be a word.

    Args:
        inner: The transform.
    """

    def __init__(self, inner: v2.Transform) -> None:
        self.inner = inner

    def transform(self, results: dict) -> dict:
        """Replace ``img``, (H, W, 3) uint8."""
        image = results["img"]
        if min(image.strides) < 0:  # as mmcv's RandomFlip leaves it
            image = image.copy()
        planes = self.inner(torch.from_numpy(image).permute(2, 0, 1))
        results["img"] = planes.permute(1, 2, 0).numpy()
        results["img_shape"] = results["img"].shape[:2]
        return results

    def __repr__(self) -> str:
        """Return torchvision's words."""
        return f"v2/{self.inner!r}"


def _register(kind: type[v2.Transform]) -> None:
    def build(**options: Any) -> Torchvision:
        if isinstance(options.get("interpolation"), str):
            options["interpolation"] = InterpolationMode(options["interpolation"])
        return Torchvision(kind(**options))

    as_class: Any = build  # mmengine takes any callable
    TRANSFORMS.register_module(f"v2/{kind.__name__}", module=as_class)


for _kind in vars(v2).values():
    if isclass(_kind) and issubclass(_kind, v2.Transform):
        _register(_kind)


@TRANSFORMS.register_module()
class EvalTransform(BaseTransform):
    """timm's transform for evaluation, without the normalisation, which the model does.

    A centre crop of a square is made by PyTorch's resize and takes a quarter of the time: only the
    pixels of the crop are made. 0.3 % of the values differ from Pillow's, by one or two levels of
    255. Everything else is timm's own.

    Args:
        input_size: Channels, height and width, as in timm's data config.
        crop_pct: Side of the crop, divided by the side of the resized image.
        interpolation: Filter of the resize.
        crop_mode: ``center`` keeps the aspect ratio, ``squash`` does not.

    Raises:
        InputError: If ``crop_mode`` is another one.
    """

    def __init__(
        self,
        input_size: tuple[int, int, int],
        crop_pct: float = 0.875,
        interpolation: str = "bicubic",
        crop_mode: str = "center",
    ) -> None:
        if crop_mode not in ("center", "squash"):
            raise InputError(f"EvalTransform: crop_mode is {crop_mode!r}: set center or squash")
        _, height, width = input_size
        self.crop, self.scale = width, floor(width / crop_pct)
        self.interpolation = interpolation
        self._fast = (
            crop_mode == "center"
            and height == width <= self.scale
            and interpolation in ("bilinear", "bicubic")
        )
        self._timm: Any = create_transform(
            input_size,
            crop_pct=crop_pct,
            interpolation=interpolation,
            crop_mode=crop_mode,
            normalize=False,
        )

    def transform(self, results: dict) -> dict:
        """Replace ``img``, (H, W, 3) uint8."""
        image = results["img"]
        if self._fast:
            image = self._center_crop(image)
        else:
            image = self._timm(Image.fromarray(image)).permute(1, 2, 0).numpy()
        results["img"], results["img_shape"] = image, image.shape[:2]
        return results

    def _center_crop(self, image: np.ndarray) -> np.ndarray:
        """Return the central crop of the resized image."""
        before, crop = image.shape[:2], self.crop
        after = [int(self.scale * side / min(before)) for side in before]
        top, left = (round((side - crop) / 2) for side in after)
        if min(before) == self.scale:  # Pillow would not resize it either
            return image[top : top + crop, left : left + crop]
        # Pixels right of the crop and below it are not made. A pixel is made from at most two
        # others, or two of the result, in each direction. Upwards, a shortened side could keep its
        # length, and PyTorch would not resize it.
        height, width = (
            old if new >= old else min(old, ceil((start + crop + 2) * old / new) + 1)
            for old, new, start in zip(before, after, (top, left), strict=True)
        )
        # PyTorch rounds the new length down, so what is a whole number must not become smaller.
        factors = tuple(new / old * (1 + 1e-12) for old, new in zip(before, after, strict=True))
        pixels = torch.from_numpy(np.ascontiguousarray(image[:height, :width])).permute(2, 0, 1)
        resized = interpolate(
            pixels[None], mode=self.interpolation, antialias=True, scale_factor=factors
        )
        return resized[0, :, top : top + crop, left : left + crop].permute(1, 2, 0).numpy()


@TRANSFORMS.register_module()
class FastRandAugment(stock.RandAugment):
    """mmpretrain's ``RandAugment`` for images in RGB, with faster operations.

    It draws the same random numbers and gives the same images. What changes each value of a channel
    alone is worked out once for each of the 256 values. Fill colours (``hparams.pad_val``) are RGB.
    """

    def transform(self, results: dict) -> dict:
        """Apply operations that are chosen at random to ``img``, (H, W, 3) uint8."""
        planes = results["img"].transpose(2, 0, 1)
        if planes.flags.c_contiguous:  # as torchvision's transforms leave it
            results["img"] = cv2.merge(list(planes))  # OpenCV would copy a view more slowly
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
                results["img"] = change(results["img"], value)
        return results


def _by_table(change: Callable[[Any, Any], Any]) -> _Change:
    """Change an image by a table of what each of the 256 values becomes."""
    return lambda image, value: cv2.LUT(image, change(_LEVELS, value).astype(np.uint8))


def _by_pillow(change: Callable[[Image.Image], Image.Image]) -> _Change:
    """Change an image by a function of Pillow that treats all channels alike, as mmcv's does."""
    return lambda image, value: np.array(change(Image.fromarray(image)))


def _contrast(image: np.ndarray, value: float) -> np.ndarray:
    mean = round(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0])
    levels = _LEVELS.astype(np.float32)
    table = cv2.addWeighted(levels, 1 + value, np.full_like(levels, mean), -value, 0)
    return cv2.LUT(image, table.clip(0, 255).astype(np.uint8))


def _saturate(image: np.ndarray, value: float) -> np.ndarray:
    gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, 1 + value, gray, -value, 0)


# For each operation that mmcv makes slowly or in BGR: the attribute that holds its value, which is
# drawn if that is None; whether a sign is drawn, too; and what it does. Two have no value.
_OPERATIONS: dict[type, tuple[str, bool, _Change]] = {
    stock.AutoContrast: ("prob", False, _by_pillow(ImageOps.autocontrast)),
    stock.Equalize: ("prob", False, _by_pillow(ImageOps.equalize)),
    stock.Posterize: ("bits", False, _by_table(lambda x, v: mmcv.posterize(x, ceil(v)))),
    stock.Solarize: ("thr", False, _by_table(mmcv.solarize)),
    stock.Brightness: ("magnitude", True, _by_table(lambda x, v: mmcv.adjust_brightness(x, 1 + v))),
    stock.Contrast: ("magnitude", True, _contrast),
    stock.ColorTransform: ("magnitude", True, _saturate),
}
