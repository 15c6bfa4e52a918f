"""Crops and flips of a batch of images, and what all transforms of a batch share."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from mmcv.transforms import RandomFlip
from mmpretrain.datasets import transforms as stock
from torch import Tensor
from torchvision.transforms.v2 import functional

from tokenformer_vit.errors import InputError

from .fast_transforms import FastRandomFlip, FastRandomResizedCrop

__all__ = ["Crop", "Flip", "ResizedCrop", "between", "unsupported", "without_waiting"]


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the processor to a device; a GPU goes on computing meanwhile."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def between(draws: Tensor, low: float, high: float) -> Tensor:
    """Turn draws, uniform in [0, 1), into numbers from ``low`` to ``high``."""
    return low + draws * (high - low)


def unsupported(kind: str, options: str = "") -> InputError:
    """Make the error for a transform that cannot be applied to a batch."""
    given = f"{kind} with {options}" if options else kind
    return InputError(
        f"{given} cannot be applied to a batch of images in memory: leave it out, or train with "
        "the data set CustomDataset"
    )


class Crop:
    """mmpretrain's ``RandomCrop``."""

    num_draws = 2

    def __init__(self, transform: stock.RandomCrop) -> None:
        if transform.pad_if_needed:
            raise unsupported("RandomCrop", "pad_if_needed=True")
        self._size, self._padding = transform.crop_size, transform.padding
        value: Any = transform.pad_val
        self._fill = list(value) if isinstance(value, Sequence) else value

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform a batch, as ``BatchTransforms`` does."""
        if self._padding is not None:
            padding: Any = self._padding
            padding = padding if isinstance(padding, int) else list(padding)
            images = functional.pad(images, padding, fill=self._fill)
        height, width = (min(sizes) for sizes in zip(self._size, images.shape[2:], strict=True))
        windows = images.unfold(2, height, 1).unfold(3, width, 1)  # (N, 3, tops, lefts, H', W')
        offsets = (draws * torch.tensor(windows.shape[2:4])).long()
        offsets = without_waiting(offsets, images.device)
        rows = torch.arange(len(images), device=images.device)
        return windows[rows, :, offsets[:, 0], offsets[:, 1]]


class Flip:
    """mmcv's ``RandomFlip``."""

    num_draws = 1

    def __init__(self, transform: RandomFlip | FastRandomFlip) -> None:
        flips = {"horizontal": functional.horizontal_flip, "vertical": functional.vertical_flip}
        direction: Any = getattr(transform, "direction", "horizontal")  # the fast one has no other
        if not isinstance(transform.prob, float) or direction not in flips:
            raise unsupported("RandomFlip", f"prob={transform.prob}, direction={direction!r}")
        self._prob, self._flip = transform.prob, flips[direction]

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform a batch, as ``BatchTransforms`` does."""
        flipped = without_waiting(draws < self._prob, images.device)
        return torch.where(flipped[:, :, None, None], self._flip(images), images)


class ResizedCrop:
    """mmpretrain's ``RandomResizedCrop`` with ``backend="pillow"`` and bicubic interpolation.

    A crop that becomes smaller may differ by some levels: Pillow 13 resizes it in either direction
    first, earlier versions in the horizontal one.
    """

    def __init__(self, transform: stock.RandomResizedCrop) -> None:
        if transform.interpolation != "bicubic":
            raise unsupported("RandomResizedCrop", f"interpolation={transform.interpolation!r}")
        if transform.backend != "pillow" and not isinstance(transform, FastRandomResizedCrop):
            raise unsupported("RandomResizedCrop", f"backend={transform.backend!r}")
        self._size, self._shares = transform.scale, transform.crop_ratio_range
        self._aspects = transform.aspect_ratio_range
        self.num_draws = 2 * transform.max_attempts + 2

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform a batch, as ``BatchTransforms`` does."""
        sides, starts = self._boxes(draws, torch.tensor(images.shape[2:], dtype=torch.double))
        rows, columns = (
            _resize_matrices(start, side, old, new, images.device)
            for start, side, old, new in zip(
                starts, sides, images.shape[2:], self._size, strict=True
            )
        )
        # In float64 the rounding of a product does not show, whatever the size of the batch. Pillow
        # also rounds between the two directions.
        wide = (images.double() @ columns[:, None].mT).round_().clamp_(0, 255)
        return (rows[:, None] @ wide).round_().clamp_(0, 255).to(torch.uint8)

    def _boxes(self, draws: Tensor, whole: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return heights and widths, tops and lefts of the crops, (N,) float64 whole numbers."""
        shares, aspects = draws[:, :-2].unflatten(1, (-1, 2)).unbind(2)  # (N, attempts)
        areas = between(shares, *self._shares) * whole.prod()
        aspects = between(aspects, *map(log, self._aspects)).exp()
        tries = torch.stack([areas / aspects, areas * aspects], dim=2).sqrt_().round_()
        fits = ((tries > 0) & (tries <= whole)).all(2)
        first = fits.int().argmax(1)
        sides = tries[torch.arange(len(draws)), first]  # (N, 2)
        narrow, wide = self._aspects
        centre = torch.stack([whole[1] / narrow, whole[0] * wide]).round_().minimum(whole)
        found = fits.any(1, keepdim=True)
        sides = torch.where(found, sides, centre)
        free = whole - sides
        starts = torch.where(found, draws[:, -2:] * (free + 1), free / 2).floor_()
        return list(sides.unbind(1)), list(starts.unbind(1))


def _resize_matrices(
    starts: Tensor, lengths: Tensor, old: int, new: int, device: torch.device
) -> Tensor:
    """Return the weights, (N, new, old) float64, of Pillow's bicubic resize of a part of a row.

    Args:
        starts: First pixel of each part, (N,) float64.
        lengths: Number of pixels of each part, (N,) float64.
        old: Number of pixels of the row.
        new: Number of pixels of the result.
        device: Device of the weights.
    """
    starts, lengths = (without_waiting(each, device)[:, None, None] for each in (starts, lengths))
    scales = lengths / new
    pixels = torch.arange(old, device=device) + 0.5
    centres = starts + (torch.arange(new, device=device) + 0.5)[:, None] * scales
    gaps = (pixels - centres).abs() / scales.clamp(min=1)
    near, far = (1.5 * gaps - 2.5) * gaps**2 + 1, ((2.5 - gaps / 2) * gaps - 4) * gaps + 2
    weights = torch.where(gaps < 1, near, torch.where(gaps < 2, far, 0.0))
    weights = weights * ((pixels > starts) & (pixels < starts + lengths))
    return weights / weights.sum(2, keepdim=True)
