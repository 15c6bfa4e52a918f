"""mmpretrain's data set for images in Hugging Face's forms: parquet, ``save_to_disk``, the hub."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mmengine.dataset import force_full_init
from mmpretrain.datasets import BaseDataset
from mmpretrain.registry import DATASETS

from tokenformer_vit.vision.image_rows import check_source, open_images


@DATASETS.register_module()
class HuggingFaceImages(BaseDataset):
    """Images of a Hugging Face data set, read from memory-mapped files without unpacking them.

    The order is that of the folders that ``tokenformer-vit prepare-data`` unpacks, so both train
    alike: by label, then by row.

    Args:
        data_root: Folder with parquet files or of ``save_to_disk``, or a data set on the hub; see
            :func:`~tokenformer_vit.vision.image_rows.open_images`.
        split: Name of the split, such as ``train`` or ``validation``.
        image_column: Name of the column of images, if it is unusual.
        label_column: Name of the column of labels, if it is unusual.
        indices: Number of images to take: the first ones, or the last ones if negative; or the
            indices of images. Default: all.
        **kwargs: As for mmpretrain's ``BaseDataset``: ``pipeline``, ``classes``, ``test_mode``, ...

    Raises:
        InputError: As ``open_images`` does.
    """

    data_list: Any  # ImageRows, which reads an image when it is used

    def __init__(
        self,
        data_root: str,
        split: str,
        image_column: str | None = None,
        label_column: str | None = None,
        indices: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._open = partial(open_images, data_root, split, image_column, label_column)
        self._kept = indices
        # mmengine would join the root and the prefix as paths.
        super().__init__(
            ann_file="", data_prefix=f"{data_root}, {split}", serialize_data=False, **kwargs
        )

    @classmethod
    def check_files(cls, data_root: str, split: str, **_: Any) -> None:
        """Check that there are files, before a run begins."""
        check_source(data_root, split)

    def load_data_list(self) -> Any:
        """Open the images; no image is read."""
        rows = self._open(self._metainfo.get("classes"))
        if self._kept is not None:
            rows.keep(self._kept)
        self._metainfo["classes"] = rows.classes
        return rows

    @force_full_init
    def get_gt_labels(self) -> np.ndarray:
        """Return the labels, (N,) int64; no image is read."""
        return self.data_list.labels.numpy()

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the label of an image in a list."""
        return [int(self.get_gt_labels()[idx])]

    @force_full_init
    def fingerprint(self) -> str:
        """Return a SHA-256 of the labels and the sizes of all images, to check on resume."""
        return self.data_list.fingerprint()
