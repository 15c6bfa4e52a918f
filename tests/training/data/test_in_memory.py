"""Images in memory equal the files; crops, flips and cutouts are those of the whole pipeline."""

import numpy as np
import pytest
import torch
from mmpretrain.datasets import CustomDataset
from mmpretrain.registry import TRANSFORMS
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.data.images import ImagesInMemory, divide

from ...samples import write_images

pytestmark = pytest.mark.usefixtures("scope")
CROP = {"type": "v2/RandomCrop", "size": 8, "padding": 2}
FLIP = {"type": "v2/RandomHorizontalFlip", "p": 0.5}
CUTOUT = {"type": "Cutout", "shape": 4, "pad_val": (1, 2, 3), "prob": 0.75}
LOAD, LABELS = {"type": "LoadImage"}, {"type": "PackLabels"}


def make(data_root, *transforms, pack=LABELS, split="train", **kwargs):
    pipeline = [LOAD, *transforms, pack]
    return ImagesInMemory(data_root=str(data_root), data_prefix=split, pipeline=pipeline, **kwargs)


def apply(transform, image, count):
    """Apply a transform to so many copies of an image."""
    _, (change,) = divide([TRANSFORMS.build(transform)])
    return change(image.expand(count, -1, -1, -1).clone())


def test_images_and_labels_are_those_of_the_files(data_root):
    pack = {"type": "PackInputs"}
    stock = CustomDataset(str(data_root), "val", pipeline=[LOAD, pack])
    batch = make(data_root, split="val", pack=pack).__getitems__([5, 40, 0])
    pairs = zip(batch["inputs"], batch["data_samples"], strict=True)
    for index, (image, sample) in zip([5, 40, 0], pairs, strict=True):
        assert torch.equal(image.cpu(), stock[index]["inputs"])
        own = stock[index]["data_samples"]
        assert (sample.gt_label, sample.img_path) == (own.gt_label, own.img_path)
        assert sample.sample_idx == index  # it decides the mask of an autoencoder
    labels = make(data_root, split="val").__getitems__([5, 40, 0])
    assert labels["data_samples"].tolist() == [0, 2, 0]


def test_crops_and_flips_are_equally_frequent():
    image = torch.randint(1, 256, (1, 3, 8, 8), dtype=torch.uint8)
    windows = nn.functional.pad(image, (2, 2, 2, 2)).unfold(2, 8, 1).unfold(3, 8, 1)
    windows = windows[0].permute(1, 2, 0, 3, 4).flatten(0, 1)
    for transform, possible in ((CROP, windows), (FLIP, torch.cat((image, image.flip(3))))):
        changed = apply(transform, image, 200 * len(possible))
        found = (changed[:, None] == possible).flatten(2).all(2).int()
        assert (found.sum(1) == 1).all()
        assert found.sum(0).min() > 100  # of 200


def test_cutouts_are_those_of_mmpretrain():
    image = torch.full((1, 3, 9, 8), 100, dtype=torch.uint8)
    stock, pixels = TRANSFORMS.build(CUTOUT), image[0].permute(1, 2, 0).numpy()
    expected = {stock({"img": pixels.copy()})["img"].tobytes() for _ in range(4000)}
    changed = apply(CUTOUT, image, 4000).permute(0, 2, 3, 1).contiguous().numpy()
    assert {each.tobytes() for each in changed} == expected
    untouched = (changed.reshape(4000, -1) == 100).all(1).mean()
    assert untouched == pytest.approx(0.25, abs=0.03)


def test_a_share_of_the_images_has_as_many_of_each_class(data_root):
    for share in (0.25, 0.5):
        dataset = make(data_root, share=share)
        assert np.bincount(dataset.get_gt_labels()).tolist() == [16 * share] * 3
        paths = {dataset.get_data_info(index)["img_path"] for index in range(len(dataset))}
        assert len(paths) == len(dataset)


def test_other_transforms_are_refused(data_root):
    with pytest.raises(InputError, match=r"^RandomResizedCrop cannot .*CustomDataset"):
        make(data_root, FLIP, {"type": "v2/RandomResizedCrop", "size": 8})


def test_images_of_several_sizes_are_resized(tmp_path, generator):
    for size in (8, 9):
        write_images(tmp_path / "train", (size, 8), {str(size): 1}, generator)
    resized = make(tmp_path, {"type": "EvalTransform", "input_size": (3, 6, 6), "crop_pct": 1.0})
    assert resized.__getitems__([0, 1])["inputs"].shape == (2, 3, 6, 6)
