"""Small images that stay in memory, and are fetched and augmented a batch at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmcv.transforms.utils import cache_randomness
from mmengine.dataset import default_collate
from mmengine.registry import FUNCTIONS
from mmpretrain.datasets import BaseDataset, CustomDataset, PackInputs
from mmpretrain.registry import DATASETS
from mmpretrain.structures import DataSample
from torch import Tensor
from torch.utils.data import get_worker_info
from tqdm import tqdm

from tokenformer_vit.errors import InputError

from .batch_crops import without_waiting
from .batch_transforms import BatchTransforms
from .hugging_face import HuggingFaceImages
from .labels import PackLabels
from .transforms import SeededTransforms


@FUNCTIONS.register_module()
def collate_fetched(batch: Any) -> dict[str, Any]:
    """Return a batch that was fetched whole as it is, and collate a list of samples."""
    return batch if isinstance(batch, dict) else default_collate(batch)


class _InMemory(BaseDataset):
    """Part of a data set that decodes each image once.

    The pipeline is that of the data set. What precedes ``SeededTransforms`` is done once for
    each image, at the start; the results must have one size. The transforms in ``SeededTransforms``
    are applied to a batch at a time.

    The images are on the GPU if there is one. The data loader needs ``num_workers=0``,
    ``pin_memory=False`` and :func:`collate_fetched`; ``load_config`` sets all three.

    Raises:
        InputError: If the pipeline cannot be applied to batches, or is replaced during a run, an
            image cannot be read, or two images have different sizes.
    """

    _images: Tensor | None = None  # (number of images, 3, H, W) uint8, BGR

    def full_init(self) -> None:
        """Find the images, and read them."""
        super().full_init()
        if self._images is not None:
            return
        self._read_by = self.pipeline
        once, self._seeded = _split(self.pipeline.transforms)
        self._augment = BatchTransforms(self._seeded.transforms if self._seeded else [])
        self._labels = torch.from_numpy(self.get_gt_labels())
        self._images = self._read(once).to("cuda" if torch.cuda.is_available() else "cpu")

    def _read(self, once: Sequence[Any]) -> Tensor:
        """Apply to each image the transforms that are not random."""
        images: list[Tensor] = []
        numbers = tqdm(range(len(self)), desc="reading", unit="image", leave=False, disable=None)
        for index in numbers:
            sample: Any = self.get_data_info(index)
            path = sample["img_path"]
            for transform in once:
                sample = transform(sample)
            images.append(sample["inputs"])
            if images[-1].shape != images[0].shape:
                own, first = ("x".join(map(str, images[i].shape[1:])) for i in (-1, 0))
                raise InputError(
                    f"{path} has {own} pixels, but the first image has {first}: images in memory "
                    "need one size. Begin the pipeline with ResizeEdge and CenterCrop, or use a "
                    "data set without InMemory in its name"
                )
        return torch.stack(images)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Fetch a batch.

        Args:
            indices: N indices of images.

        Returns:
            ``inputs``, (N, 3, H, W) uint8 BGR, and ``data_samples``: a list of N, or with
            ``PackLabels`` the labels, (N,) int64.
        """
        if get_worker_info() is not None:
            raise InputError(
                "images in memory are fetched without workers: set num_workers=0 in the data loader"
            )
        if self.pipeline is not self._read_by:  # mmpretrain's SwitchRecipeHook replaces it
            raise InputError(
                f"the pipeline of {type(self).__name__} was replaced during the run, but its "
                "images are in memory: use a data set without InMemory in its name"
            )
        assert self._images is not None
        rows = torch.tensor(indices)
        images = self._images.index_select(0, without_waiting(rows, self._images.device))
        if self._seeded is not None:
            numbers = torch.rand(len(rows), self._augment.num_draws, dtype=torch.float64)
            images = self._augment(images, numbers)
        labels: Any = self._labels[rows]
        if not isinstance(self.pipeline.transforms[-1], PackLabels):
            labels = [DataSample().set_gt_label(label) for label in labels]
        return {"inputs": images, "data_samples": labels}


@DATASETS.register_module()
class ImagesInMemory(_InMemory, CustomDataset):
    """mmpretrain's ``CustomDataset`` with its images in memory.

    Args:
        share: Share of the images of each class, such as 0.1 to train with a tenth of the labels.
            At least one image of each class is kept.
        share_seed: Seed that chooses these images, whatever the seed of the run.
        **kwargs: As for ``CustomDataset``.

    Raises:
        InputError: If ``with_label`` is False, when the images are listed.
    """

    def __init__(self, *args: Any, share: float = 1.0, share_seed: int = 0, **kwargs: Any) -> None:
        self._share, self._share_seed = share, share_seed
        super().__init__(*args, **kwargs)

    def load_data_list(self) -> list[dict]:
        """Find the images, and choose a share of each class; a larger share has them all."""
        if not self.with_label:
            raise InputError(
                "with_label of ImagesInMemory is False, but it needs images in class folders: use "
                "type='CustomDataset'"
            )
        samples = super().load_data_list()
        if self._share == 1:
            return samples
        labels, random = [s["gt_label"] for s in samples], np.random.default_rng(self._share_seed)
        chosen: list[int] = []
        for label in np.unique(labels):
            own = random.permutation(np.flatnonzero(np.equal(labels, label)))
            chosen += own[: max(1, round(self._share * len(own)))].tolist()
        return [samples[index] for index in sorted(chosen)]


@DATASETS.register_module()
class HuggingFaceImagesInMemory(_InMemory, HuggingFaceImages):
    """The data set ``HuggingFaceImages`` with its images in memory.

    Args:
        **kwargs: As for ``HuggingFaceImages``.
    """


IN_MEMORY = (ImagesInMemory.__name__, HuggingFaceImagesInMemory.__name__)


def _split(transforms: Sequence[Any]) -> tuple[list[Any], SeededTransforms | None]:
    """Return the transforms that are done once, and those that are done in each epoch.

    Raises:
        InputError: If the pipeline has another form.
    """
    *first, last = transforms
    seeded = first.pop() if first and isinstance(first[-1], SeededTransforms) else None
    for transform in first:
        members = [member for kind in type(transform).__mro__ for member in vars(kind).values()]
        if isinstance(transform, SeededTransforms) or any(
            isinstance(member, cache_randomness) for member in members
        ):
            raise InputError(
                f"{type(transform).__name__} is random, but images in memory are made once: put it "
                "into one SeededTransforms, just before PackInputs"
            )
    if not isinstance(last, PackInputs):
        raise InputError(
            f"the pipeline of images in memory ends with {type(last).__name__}: end it with "
            "PackInputs or PackLabels"
        )
    return [*first, last], seeded
