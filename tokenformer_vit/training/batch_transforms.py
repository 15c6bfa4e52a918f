"""mmpretrain's augmentations of images of one size, applied to a batch of tensors at a time.

The operations are torchvision's. Each image keeps parameters of its own, so images that share an
operation are changed by one call.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from math import ceil
from typing import Any

import torch
from mmcv.transforms import RandomChoice, RandomFlip
from mmpretrain.datasets import transforms as stock
from torch import Tensor
from torch.nn.functional import grid_sample, pad
from torchvision.transforms.v2 import functional

from .batch_crops import Crop, Flip, ResizedCrop, between, unsupported, without_waiting
from .fast_transforms import JITTER, FastColorJitter, FastRandomFlip, FastRandomResizedCrop

__all__ = ["BatchTransforms"]


class BatchTransforms:
    """Apply transforms of mmpretrain to a batch.

    The result for an image depends on the image and its random numbers, not on the rest of the
    batch. For the same parameters it agrees with mmpretrain's to three levels of 255, with two
    exceptions: a single ``pad_val`` fills all channels (mmcv fills only the first), and
    ``Sharpness`` leaves the border of one pixel as it is, as Pillow does.

    Args:
        transforms: ``RandomCrop``, ``RandomResizedCrop``, ``RandomFlip``, ``ColorJitter``, the fast
            forms of the last three, ``RandAugment``, ``GaussianBlur``, one of the operations that
            ``RandAugment`` chooses from, such as ``Rotate``, or ``RandomChoice`` of operations.

    Attributes:
        num_draws: Random numbers that each image needs.

    Raises:
        InputError: If a transform, or one of its options, cannot be applied to a batch.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        self._parts = [_batched(transform) for transform in transforms]
        self.num_draws = sum(part.num_draws for part in self._parts)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform a batch.

        Args:
            images: (N, 3, H, W) uint8, BGR, on any device; may be changed in place.
            draws: (N, num_draws) float64 on the CPU, uniform in [0, 1).

        Returns:
            (N, 3, H', W') uint8 on the same device.
        """
        numbers = [part.num_draws for part in self._parts]
        for part, own in zip(self._parts, draws.split(numbers, dim=1), strict=True):
            images = part(images, own)
        return images


class _Jitter:
    """Brightness, contrast and saturation in a random order: ``ColorJitter``."""

    num_draws = 4  # the order, and a factor for each operation

    def __init__(self, transform: stock.ColorJitter) -> None:
        if transform.hue is not None:
            raise unsupported("ColorJitter", f"hue={transform.hue}")
        ranges = transform.brightness, transform.contrast, transform.saturation
        self._ranges = [each or (1.0, 1.0) for each in ranges]
        self._orders = torch.tensor(list(permutations(range(3))))

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        order = self._orders[(draws[:, 0] * len(self._orders)).long()]  # (N, 3)
        for place in range(3):
            for index, limits in enumerate(self._ranges):
                (rows,) = torch.where(order[:, place] == index)
                factors = between(draws[rows, 1 + index], *limits)
                _change_colours(images, rows, _COLOURS[JITTER[index]], None, factors - 1)
        return images


class _Choice:
    """An operation for each image in each round, chosen at random: ``RandAugment``."""

    def __init__(self, operations: Sequence[Any], rounds: int) -> None:
        for operation in operations:
            if type(operation) not in _COLOURS and type(operation) not in _MATRICES:
                raise unsupported(type(operation).__name__)
            interpolation = getattr(operation, "interpolation", "nearest")
            if interpolation not in ("nearest", "bilinear", "bicubic"):
                raise unsupported(type(operation).__name__, f"interpolation={interpolation!r}")
        self._operations, self._rounds = operations, rounds
        self.num_draws = 4 * rounds  # which operation, whether at all, its value, the sign

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        for own in draws.chunk(self._rounds, dim=1):
            self._apply(images, own)
        return images

    def _apply(self, images: Tensor, draws: Tensor) -> None:
        choice = (draws[:, 0] * len(self._operations)).long()
        warps: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for index, operation in enumerate(self._operations):
            (rows,) = torch.where((choice == index) & (draws[:, 1] < operation.prob))
            if not len(rows):
                continue
            values = _values(operation, draws[rows, 2], draws[rows, 3])
            if change := _COLOURS.get(type(operation)):
                _change_colours(images, rows, change, operation, values)
            else:
                matrices = _MATRICES[type(operation)](operation, values, *images.shape[2:])
                how = operation.interpolation, operation.pad_val
                warps.setdefault(how, []).append((rows, matrices))
        for how, parts in warps.items():
            rows, matrices = (
                without_waiting(torch.cat(each), images.device) for each in zip(*parts, strict=True)
            )
            images.index_copy_(0, rows, _warp(images.index_select(0, rows), matrices, *how))


def _change_colours(
    images: Tensor, rows: Tensor, change: Any, operation: Any, values: Tensor
) -> None:
    """Apply an entry of ``_COLOURS`` to some of the images, in place."""
    if len(rows):
        here = without_waiting(rows, images.device)
        values = without_waiting(values.float(), images.device)[:, None, None, None]
        images.index_copy_(0, here, change(operation, images.index_select(0, here), values))


def _values(operation: Any, sizes: Tensor, signs: Tensor) -> Tensor:
    """Turn draws into the values of an operation, such as angles.

    Args:
        operation: The operation.
        sizes: (N,) draws.
        signs: (N,) draws.

    Returns:
        (N,) float64; zeros if the operation takes no value.
    """
    if operation.magnitude_range is None:
        names = ("magnitude", "angle", "thr", "bits", "radius")
        fixed = (getattr(operation, name, None) for name in names)
        values = torch.full_like(sizes, next((each for each in fixed if each is not None), 0))
    else:
        most, std = operation.magnitude_level, operation.magnitude_std
        if std == "inf":
            levels = sizes * most
        else:  # normally distributed; 0 would be infinitely far away
            levels = most + max(std, 0) * torch.special.ndtri(sizes.clamp(min=1e-16))
        shares = levels.clamp(0, operation.total_level) / operation.total_level
        values = between(shares, *operation.magnitude_range)
    return torch.where(signs < operation.random_negative_prob, -values, values)


def _posterize(operation: Any, images: Tensor, bits: Tensor) -> Tensor:
    masks = 256 - 2 ** (8 - bits.ceil())  # keep the upper bits
    return images & masks.to(torch.uint8)


def _solarize_add(operation: Any, images: Tensor, values: Tensor) -> Tensor:
    added = (images + values).clamp_(max=255).to(torch.uint8)
    return torch.where(images < operation.thr, added, images)


def _blend(weakest: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Mix images with what factor 0 makes of them, each image by a factor of its own."""
    # No lerp: it may round otherwise at the end of a tensor, where other batches have other images.
    mixed = images * factors + weakest * (1 - factors)
    return mixed.clamp_(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    return functional.rgb_to_grayscale(images.flip(1), num_output_channels=3)


def _blur(operation: Any, images: Tensor, radii: Tensor) -> Tensor:
    """Blur as Pillow does: three box filters in each direction, with the variance of a Gaussian."""
    variances = radii**2 / 3
    whole = (((12 * variances + 1).sqrt() - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variances)
    sides = whole + part / (6 * (variances - (whole + 1) ** 2))  # from the middle of a box
    reach = ceil(max(operation.magnitude_range or [operation.radius]))
    weights = [
        (sides + 1 - abs(place)).clamp(0, 1) / (2 * sides + 1) for place in range(-reach, reach + 1)
    ]
    blurred: Any = images.float()
    for dim, padding in 3 * [(3, (reach, reach, 0, 0))] + 3 * [(2, (0, 0, reach, reach))]:
        padded = pad(blurred, padding, mode="replicate")
        parts = (padded.narrow(dim, start, images.shape[dim]) for start in range(2 * reach + 1))
        # A sum one by one, and no convolution, whose rounding depends on the size of the batch.
        blurred = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    return blurred.round_().clamp_(0, 255).to(torch.uint8)


# Each takes the operation, (n, 3, H, W) uint8 BGR images and (n, 1, 1, 1) float32 values.
_COLOURS: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    stock.AutoContrast: lambda _, x, v: functional.autocontrast(x),
    stock.Equalize: lambda _, x, v: functional.equalize(x),
    stock.Invert: lambda _, x, v: functional.invert(x),
    stock.Posterize: _posterize,
    stock.Solarize: lambda _, x, v: torch.where(x < v, x, functional.invert(x)),
    stock.SolarizeAdd: _solarize_add,
    stock.ColorTransform: lambda _, x, v: _blend(_gray(x), x, 1 + v),
    stock.Contrast: lambda _, x, v: _blend(functional.adjust_contrast(x.flip(1), 0.0), x, 1 + v),
    stock.Brightness: lambda _, x, v: _blend(torch.zeros_like(x), x, 1 + v),
    stock.GaussianBlur: _blur,
    stock.Sharpness: lambda _, x, v: _blend(functional.adjust_sharpness(x, 0.0), x, 1 + v),
}


def _rotations(operation: Any, angles: Tensor, height: int, width: int) -> Tensor:
    x, y = operation.center or ((width - 1) / 2, (height - 1) / 2)
    sin, cos = (f(angles.deg2rad()) / operation.scale for f in (torch.sin, torch.cos))
    return torch.stack(
        [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], dim=1
    ).view(-1, 2, 3)


def _shears(operation: Any, values: Tensor, height: int, width: int) -> Tensor:
    one, zero = torch.ones_like(values), torch.zeros_like(values)
    x, y = (-values, zero) if operation.direction == "horizontal" else (zero, -values)
    return torch.stack([one, x, zero, y, one, zero], dim=1).view(-1, 2, 3)


def _shifts(operation: Any, values: Tensor, height: int, width: int) -> Tensor:
    one, zero = torch.ones_like(values), torch.zeros_like(values)
    horizontal = operation.direction == "horizontal"
    x, y = (-values * width, zero) if horizontal else (zero, -values * height)
    return torch.stack([one, zero, x, zero, one, y], dim=1).view(-1, 2, 3)


# Each takes the operation, (n,) float64 values and the size of the images, and returns (n, 2, 3)
# matrices from the x and y of a pixel of the result to where it is read.
_MATRICES: dict[type, Callable[[Any, Tensor, int, int], Tensor]] = {
    stock.Rotate: _rotations,
    stock.Shear: _shears,
    stock.Translate: _shifts,
}


def _warp(images: Tensor, matrices: Tensor, interpolation: str, pad_val: Any) -> Tensor:
    """Warp each image by a matrix of its own.

    Args:
        images: (N, 3, H, W) uint8.
        matrices: (N, 2, 3), from pixels of the result to where they are read.
        interpolation: ``nearest``, ``bilinear`` or ``bicubic``.
        pad_val: Value outside an image, or one for each channel.

    Returns:
        (N, 3, H, W) uint8.
    """
    height, width = images.shape[2:]
    matrices = matrices.float()[:, :, :, None, None]  # (N, 2, 3, 1, 1)
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    # Sums instead of a matrix product, whose rounding depends on the size of the batch.
    places = matrices[:, :, 0] * x + matrices[:, :, 1] * y + matrices[:, :, 2]  # (N, 2, H, W)
    sizes = without_waiting(torch.tensor([width, height]), images.device)
    grid = (2 * places.permute(0, 2, 3, 1) + 1) / sizes - 1  # (N, H, W, 2), from -1 to 1
    fill = without_waiting(torch.tensor(pad_val, dtype=torch.float), images.device).view(-1, 1, 1)
    # It reads zeros outside.
    warped = grid_sample(images - fill, grid, mode=interpolation, align_corners=False) + fill
    return warped.round_().clamp_(0, 255).to(torch.uint8)


def _batched(transform: Any) -> Any:
    """Return the form of a transform that takes a batch."""
    if type(transform) is stock.RandAugment:
        return _Choice(transform.transforms, transform.num_policies)
    if type(transform) is RandomChoice:
        if transform.prob is not None or any(len(each.transforms) != 1 for each in transform):
            raise unsupported("RandomChoice", "prob, or several transforms in one choice")
        return _Choice([each.transforms[0] for each in transform], 1)
    kinds: dict[type, Callable[[Any], Any]] = {
        stock.RandomCrop: Crop,
        stock.RandomResizedCrop: ResizedCrop,
        stock.ColorJitter: _Jitter,
        FastRandomResizedCrop: ResizedCrop,
        FastColorJitter: _Jitter,
        RandomFlip: Flip,
        FastRandomFlip: Flip,
    }
    return kinds.get(type(transform), lambda operation: _Choice([operation], 1))(transform)
