"""Transforms of images: timm's for evaluation, torchvision's, and a fast RandAugment.

All take and give ``img``, (H, W, 3) uint8 in RGB, and draw from the global generators alone.
"""

from functools import partial
from inspect import isclass
from math import floor
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, v2

from ..engine import TRANSFORMS, BaseTransform, stock


class Torchvision(BaseTransform):
    """A transform of ``torchvision.transforms.v2``, applied to a tensor.

    Configs name it, as in ``dict(type="v2/Resize", size=32, interpolation="bicubic")``.
    """

    def __init__(self, kind: type[v2.Transform], **options: Any) -> None:
        if isinstance(options.get("interpolation"), str):
            options["interpolation"] = InterpolationMode(options["interpolation"])
        self.inner = kind(**options)

    def transform(self, results: dict) -> dict:
        """Replace ``img``, (H, W, 3) uint8."""
        image = results["img"]
        if min(image.strides) < 0:  # as mmcv's RandomFlip leaves it
            image = image.copy()
        planes = self.inner(torch.from_numpy(image).permute(2, 0, 1))
        results["img"] = planes.permute(1, 2, 0).numpy()
        results["img_shape"] = results["img"].shape[:2]
        return results


for _kind in vars(v2).values():
    if isclass(_kind) and issubclass(_kind, v2.Transform):
        _build: Any = partial(Torchvision, _kind)  # mmengine takes any callable
        TRANSFORMS.register_module(f"v2/{_kind.__name__}", module=_build)


@TRANSFORMS.register_module()
class EvalTransform(Torchvision):
    """timm's transform for evaluation, without the normalisation, which the model does.

    PyTorch resizes and crops squares, in less time: 0.3 % of the values differ from Pillow's, by
    one or two levels of 255. The arguments are those of timm's data config.
    """

    def __init__(
        self,
        input_size: tuple[int, int, int],
        crop_pct: float = 0.875,
        interpolation: str = "bicubic",
        crop_mode: str = "center",
    ) -> None:
        _, height, width = input_size
        scale = floor(width / crop_pct)
        central = crop_mode == "center" and height == width <= scale
        if central and interpolation in ("bilinear", "bicubic"):
            steps = [v2.Resize(scale, InterpolationMode(interpolation)), v2.CenterCrop(width)]
        else:
            how: Any = {"crop_pct": crop_pct, "interpolation": interpolation, "normalize": False}
            steps = [v2.ToPILImage(), create_transform(input_size, crop_mode=crop_mode, **how)]
        super().__init__(v2.Compose, transforms=steps)


# mmcv's take ten times as long.
_BY_PILLOW = {stock.AutoContrast: ImageOps.autocontrast, stock.Equalize: ImageOps.equalize}
_OF_BGR = (stock.Contrast, stock.ColorTransform)


@TRANSFORMS.register_module()
class FastRandAugment(stock.RandAugment):
    """mmpretrain's ``RandAugment`` for images and fill colours in RGB: the same images, faster."""

    def transform(self, results: dict) -> dict:
        """Apply operations that are chosen at random to ``img``, (H, W, 3) uint8."""
        planes = results["img"].transpose(2, 0, 1)
        if planes.flags.c_contiguous:  # as torchvision's transforms leave it
            results["img"] = cv2.merge(list(planes))  # OpenCV would copy a view more slowly
        for index in self.random_policy_indices():
            operation = self.transforms[index]
            if isinstance(operation, _OF_BGR):
                bgr = {"img": cv2.cvtColor(results["img"], cv2.COLOR_RGB2BGR)}
                operation(bgr)
                results["img"] = cv2.cvtColor(bgr["img"], cv2.COLOR_BGR2RGB)
            elif type(operation) not in _BY_PILLOW:
                operation(results)
            elif not operation.random_disable():
                change = _BY_PILLOW[type(operation)]
                results["img"] = np.array(change(Image.fromarray(results["img"])))
        return results
