"""Loading and packing of images, and two data sets: Hugging Face's forms, and images in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.images import read_pixels

from ..engine import (
    DATASETS,
    FUNCTIONS,
    TRANSFORMS,
    BaseDataset,
    BaseTransform,
    Compose,
    CustomDataset,
    PackInputs,
    default_collate,
    force_full_init,
    stock,
)
from .augment import EvalTransform


@TRANSFORMS.register_module()
class LoadImage(BaseTransform):
    """Decode an image file as prediction does, in RGB; a corrupt image stops the run.

    With mmcv's loader the missing part of a truncated JPEG becomes grey without a warning.
    mmpretrain's transforms that mix colours, such as ``ColorTransform``, expect BGR: use
    torchvision's.
    """

    def transform(self, results: dict) -> dict:
        """Add ``img``, (H, W, 3) uint8, of the file ``img_path`` or its content ``img_bytes``."""
        if "img" in results:  # mmpretrain's inferencers decode their inputs themselves, in BGR
            results["img"] = cv2.cvtColor(results["img"], cv2.COLOR_BGR2RGB)
            return results
        try:
            results["img"] = read_pixels(results["img_path"], results.pop("img_bytes", None))
        except InputError as error:
            raise InputError(
                f"cannot read image {error}; replace or delete it (`tokenformer-vit prepare-data "
                "--check FOLDER` lists all such files)"
            ) from error
        results["img_shape"] = results["ori_shape"] = results["img"].shape[:2]
        return results


@TRANSFORMS.register_module()
class PackLabels(PackInputs):
    """mmpretrain's ``PackInputs`` for training, with the label instead of a ``DataSample``.

    A model needs a ``LabelPreprocessor``, and a ``LabelHead`` or ``DistilledHead``.
    """

    _shape: tuple[int, ...] | None = None  # of the first image

    def transform(self, results: dict) -> dict:
        """Return the image as a (3, H, W) tensor, and its label as a number."""
        image = results["img"]
        self._shape = self._shape or image.shape
        if image.shape != self._shape:
            raise InputError(
                f"{results['img_path']} has the shape {image.shape}, but images before it have "
                f"{self._shape}: add a resize or a crop to the pipeline"
            )
        planes = image.transpose(2, 0, 1)
        if not planes.flags.c_contiguous:
            planes = np.empty_like(planes, order="C")
            cv2.split(image, list(planes))  # four times as fast as a copy of the transpose
        return {"inputs": torch.from_numpy(planes), "data_samples": results["gt_label"]}


@DATASETS.register_module()
class HuggingFaceImages(BaseDataset):
    """Images of a Hugging Face data set, read from memory-mapped files without unpacking them.

    They are in the order of the folders that ``tokenformer-vit prepare-data`` unpacks.

    Args:
        data_root: Folder with parquet files or of ``save_to_disk``, or a data set on the hub; see
            :func:`~tokenformer_vit.vision.datasets.open_images`.
        split: Name of the split, such as ``train`` or ``validation``.
        image_column: Name of the column of images, if it is unusual.
        label_column: Name of the column of labels, if it is unusual.
        indices: Number of images to take, the last ones if negative; or their indices.
        **kwargs: As for mmpretrain's ``BaseDataset``: ``pipeline``, ``classes``, ``test_mode``, ...
    """

    data_list: Any  # LabelledImages, which reads an image when it is used

    def __init__(
        self,
        data_root: str,
        split: str,
        image_column: str | None = None,
        label_column: str | None = None,
        indices: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        known = self._compat_classes(kwargs.pop("metainfo", None), kwargs.pop("classes", None))
        columns = (image_column, label_column)
        rows = self._rows = open_images(data_root, split, *columns, known.get("classes"))
        if isinstance(indices, int):
            rows.keep(slice(indices) if indices >= 0 else slice(indices, None))
        elif indices is not None:
            rows.keep(indices)
        # mmengine would join the root and the prefix as paths.
        kwargs |= {"data_prefix": f"{data_root}, {split}", "serialize_data": False}
        super().__init__("", {**known, "classes": rows.classes}, **kwargs)

    def load_data_list(self) -> Any:
        """Return the images; none is read."""
        return self._rows

    @force_full_init
    def get_gt_labels(self) -> np.ndarray:
        """Return the labels, (N,) int64; no image is read."""
        return self.data_list.labels.numpy()

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the label of an image in a list."""
        return [int(self.get_gt_labels()[idx])]


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the processor to a device; a GPU goes on computing meanwhile."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@FUNCTIONS.register_module()
def collate_fetched(batch: Any) -> dict[str, Any]:
    """Return a batch that was fetched whole as it is, and collate a list of samples."""
    return batch if isinstance(batch, dict) else default_collate(batch)


@DATASETS.register_module()
class ImagesInMemory(CustomDataset):
    """mmpretrain's ``CustomDataset``, which decodes each image once and augments a batch at a time.

    The images are on the GPU if there is one, and must have one size. They are loaded, perhaps
    resized, then perhaps changed by ``v2/RandomCrop``, ``v2/RandomHorizontalFlip`` and ``Cutout``.

    Args:
        share: Share of the images, such as 0.1, of each class alike.
        **kwargs: As for ``CustomDataset``.
    """

    def __init__(self, *args: Any, share: float = 1.0, **kwargs: Any) -> None:
        self._share = share
        super().__init__(*args, **kwargs)

    def load_data_list(self) -> list[dict]:
        """Find the images, sorted by class, and choose evenly spaced ones."""
        samples = super().load_data_list()
        count = max(1, round(self._share * len(samples)))
        return [samples[index * len(samples) // count] for index in range(count)]

    def full_init(self) -> None:
        """Find the images, and read them."""
        super().full_init()
        if hasattr(self, "_images"):
            return
        once, self._augment = divide(self.pipeline.transforms[:-1])
        self._labels = torch.from_numpy(self.get_gt_labels())
        load: Any = Compose(once)
        indices = tqdm(range(len(self)), "reading", unit="image", leave=False, disable=None)
        images: Any = [PackLabels.format_input(load(self.get_data_info(i))["img"]) for i in indices]
        self._images = torch.stack(images).to("cuda" if torch.cuda.is_available() else "cpu")

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Fetch a batch: ``inputs``, (N, 3, H, W) uint8, and ``data_samples`` as the pipeline ends.

        These are a list of N, or with ``PackLabels`` the labels, (N,) int64.
        """
        rows, pack = torch.tensor(indices), self.pipeline.transforms[-1]
        images = self._images.index_select(0, without_waiting(rows, self._images.device))
        for augment in self._augment:
            images = augment(images)
        labels: Any = without_waiting(self._labels[rows], self._images.device)
        if not isinstance(pack, PackLabels):
            labels = [pack(self.get_data_info(index))["data_samples"] for index in indices]
        return {"inputs": images, "data_samples": labels}


def divide(transforms: Sequence[Any]) -> tuple[list[Any], list[Callable[[Tensor], Tensor]]]:
    """Return the transforms that are done once, and those of each batch."""
    once, batched = [], []
    for step in transforms:
        inner = getattr(step, "inner", step)  # torchvision's
        if type(inner) in _OF_A_BATCH:
            batched.append(partial(_OF_A_BATCH[type(inner)], inner))
        elif isinstance(step, _ONCE) and not batched:
            once.append(step)
        else:
            raise InputError(
                f"{type(inner).__name__} cannot be applied here to images in memory, which are "
                "loaded and resized, then cropped, flipped and cut out: use type='CustomDataset'"
            )
    return once, batched


def _crop(crop: Any, images: Tensor) -> Tensor:
    if crop.padding is not None:
        images = v2.functional.pad(images, crop.padding, crop.fill, crop.padding_mode)
    height, width = crop.size
    windows = images.unfold(2, height, 1).unfold(3, width, 1)  # (N, 3, tops, lefts, H', W')
    drawn = torch.stack([torch.randint(count, (len(images),)) for count in windows.shape[2:4]])
    tops, lefts = without_waiting(drawn, images.device)
    return windows[torch.arange(len(images), device=images.device), :, tops, lefts]


def _flip(flip: Any, images: Tensor) -> Tensor:
    flipped = without_waiting(torch.rand(len(images), 1, 1, 1) < flip.p, images.device)
    return torch.where(flipped, images.flip(3), images)


def _cut_out(cutout: Any, images: Tensor) -> Tensor:
    """Cut out a rectangle around a random pixel of each image, as far as it is inside."""
    count, (height, width) = len(images), images.shape[2:]
    shape, sides = torch.tensor(cutout.shape).expand(2), torch.tensor([height, width])
    starts = (torch.rand(count, 2) * sides - shape / 2).clamp(min=0).long()
    # Those that are not drawn end where they start.
    ends = starts + shape * (torch.rand(count, 1) < cutout.prob)
    bounds = without_waiting(torch.cat([starts, ends], 1), images.device).T[:, :, None]
    rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
    tall = (rows >= bounds[0]) & (rows < bounds[2])  # (N, H)
    wide = (columns >= bounds[1]) & (columns < bounds[3])
    value = torch.tensor(cutout.pad_val, dtype=images.dtype).reshape(-1, 1, 1)
    inside = tall[:, None, :, None] & wide[:, None, None]
    return torch.where(inside, without_waiting(value, images.device), images)


_ONCE = (LoadImage, EvalTransform, stock.ResizeEdge, stock.CenterCrop)
_OF_A_BATCH: dict[type, Any] = {
    v2.RandomCrop: _crop,
    v2.RandomHorizontalFlip: _flip,
    stock.Cutout: _cut_out,
}
