"""Image loading that names a corrupt file, and a list of transforms."""

from typing import Any

from mmcv.transforms import BaseTransform
from mmpretrain.registry import TRANSFORMS

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.images import read_bgr


@TRANSFORMS.register_module()
class LoadImage(BaseTransform):
    """Decode an image file as prediction does; a corrupt image stops the run.

    Nothing is skipped silently: a run on a part of the data would go unnoticed, and a random
    replacement could not be repeated on resume. mmcv decodes some files differently. With OpenCV,
    its default, the missing part of a truncated JPEG becomes grey without a warning. With Pillow,
    it clips 16-bit values to white, and gives only some transparent images a grey background.

    Raises:
        InputError: If the file cannot be decoded; the message names it.
    """

    def transform(self, results: dict) -> dict | None:
        """Add ``img`` (H, W, 3) uint8 BGR and its shape to ``results``.

        Args:
            results: A sample with ``img_path``, and perhaps ``img_bytes``, the content of the file.
        """
        if "img" in results:  # mmpretrain's inferencers decode their inputs themselves
            return results
        content = results.pop("img_bytes", None)
        try:
            results["img"] = read_bgr(results["img_path"], content)
        except InputError as error:
            way_out = (
                "replace or delete it (`tokenformer-vit prepare-data --check DATA_ROOT` lists all "
                "such files)"
                if content is None
                else "download the file again, or remove the row"
            )
            raise InputError(f"cannot read image {error}; {way_out}") from error
        results["img_shape"] = results["ori_shape"] = results["img"].shape[:2]
        return results


@TRANSFORMS.register_module()
class SeededTransforms(BaseTransform):
    """Apply a list of transforms, which ``Seeded`` gives their random numbers.

    Args:
        transforms: Configs of the transforms.
    """

    def __init__(self, transforms: list[dict]) -> None:
        self.transforms = [TRANSFORMS.build(transform) for transform in transforms]

    def transform(self, results: dict) -> dict | None:
        """Apply the transforms to one sample."""
        transformed: Any = results
        for transform in self.transforms:
            transformed = transform(transformed)
        return transformed

    def __repr__(self) -> str:
        """List the transforms."""
        return f"{type(self).__name__}({', '.join(map(repr, self.transforms))})"
