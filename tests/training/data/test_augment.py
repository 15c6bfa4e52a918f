"""Transforms of images: timm's, torchvision's and mmpretrain's are the references."""

import cv2
import numpy as np
import pytest
import torch
from mmpretrain.registry import TRANSFORMS
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import auto_augment_policy
from torchvision.transforms import InterpolationMode, v2

from tokenformer_vit.training.config import load_config

pytestmark = pytest.mark.usefixtures("scope")


def photograph(rng, height, width):
    """Smooth shapes with some noise."""
    few = rng.uniform(0, 255, (6, 6, 3)).astype(np.float32)
    smooth = cv2.resize(few, (int(width), int(height)), interpolation=cv2.INTER_CUBIC)
    return (smooth + rng.normal(0, 5, smooth.shape)).clip(0, 255).astype(np.uint8)


def build(kind, **options):
    return TRANSFORMS.build({"type": kind, **options})


def test_a_pipeline_names_transforms_of_torchvision(generator, seed):
    options = {"size": 24, "scale": (0.2, 1.0)}
    ours = build("v2/RandomResizedCrop", **options, interpolation="bicubic")
    reference = v2.RandomResizedCrop(**options, interpolation=InterpolationMode.BICUBIC)
    for number in range(4):
        pixels = photograph(generator, 40, 33)[:, ::-1]  # as mmcv flips
        torch.manual_seed(seed + number)
        results = ours({"img": pixels})
        torch.manual_seed(seed + number)
        expected = reference(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        assert results["img_shape"] == results["img"].shape[:2]
        np.testing.assert_array_equal(results["img"], expected.permute(1, 2, 0))


SIZES = [(96, 130), (160, 65), (64, 64), (65, 64), (63, 90), (30, 21), (64, 500), (7, 8)]


@pytest.mark.parametrize("height", [48, 36])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("crop_pct", [0.875, 1.0])
def test_evaluation_is_that_of_timm(crop_pct, crop_mode, interpolation, height, generator):
    """Up to Pillow's rounding where PyTorch resizes, and exactly elsewhere."""
    config = {"crop_pct": crop_pct, "crop_mode": crop_mode, "interpolation": interpolation}
    ours = build("EvalTransform", input_size=(3, height, 48), **config)
    reference = create_transform((3, height, 48), normalize=False, **config)
    for size in (*SIZES, (48, 48)):
        pixels = photograph(generator, *size)
        expected = reference(Image.fromarray(pixels)).permute(1, 2, 0).numpy()
        results = ours({"img": pixels.copy()})
        by_pytorch = crop_mode == "center" and interpolation != "lanczos" and height == 48
        untouched = min(size) == int(48 / crop_pct)
        assert results["img_shape"] == (height, 48)
        gap = np.abs(results["img"].astype(int) - expected)
        assert gap.max() <= (2 if by_pytorch and not untouched else 0)


def test_randaugment_is_that_of_mmpretrain(generator):
    """Of images in RGB, where mmpretrain's are in BGR; and the next random number is the same."""
    pipeline = load_config("imagenet_base.py").train_dataloader.dataset.pipeline
    (config,) = (each.to_dict() for each in pipeline if each["type"] == "FastRandAugment")
    fast = TRANSFORMS.build(config)
    bgr = {**config["hparams"], "pad_val": config["hparams"]["pad_val"][::-1]}
    stock = TRANSFORMS.build({**config, "type": "RandAugment", "hparams": bgr})
    assert len(fast.transforms) == 15
    images = [photograph(generator, 40, 50) for _ in range(6)]
    images += [np.full((9, 9, 3), 77, np.uint8), np.zeros((5, 5, 3), np.uint8)]
    for seed in range(400):  # more than 50 of each operation
        found = []
        for transform, channels in ((fast, 1), (stock, -1)):
            np.random.seed(seed)  # noqa: NPY002
            changed = transform({"img": images[seed % 8][:, :, ::channels].copy()})["img"]
            assert changed.dtype == np.uint8
            found.append((changed[:, :, ::channels], np.random.rand()))  # noqa: NPY002
        np.testing.assert_array_equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]


def test_three_augment_is_timms(monkeypatch, generator):
    steps = load_config("deit3_small").train_dataloader.dataset.pipeline
    *_, choice, _, _ = map(TRANSFORMS.build, steps)
    pixels = generator.integers(0, 256, (24, 20, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    def gap(result, expected):
        return np.abs(result.astype(int) - np.asarray(expected)).max()

    solarize, gray, blur = (operations[0] for operations in auto_augment_policy("3a"))
    choice.transforms[2].transforms[0].random_magnitude = lambda: 1.3
    monkeypatch.setattr("random.uniform", lambda low, high: 1.3)
    for index, operation in enumerate((gray, solarize, blur)):
        choice.random_pipeline_index = lambda index=index: index
        assert gap(choice({"img": pixels.copy()})["img"], operation(image)) <= (index == 0)
