"""The fast transforms draw and give what mmpretrain's own do."""

import copy

import cv2
import numpy as np
import pytest
from mmcv.transforms.utils import cache_random_params
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from mmpretrain.registry import TRANSFORMS

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import load_config

MEAN = 0.1  # difference of 255, over the pixels of all images
ROUNDING = 2  # levels, for a pixel after a resize
AUGMENT = {
    "policies": "timm_increasing",
    "num_policies": 2,
    "total_level": 10,
    "magnitude_level": 9,
    "magnitude_std": 0.5,
    "hparams": {"pad_val": [104, 116, 124], "interpolation": "bicubic"},
}
PILLOW = {"backend": "pillow", "interpolation": "bicubic"}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def photograph(rng, height, width):
    """Smooth shapes with some noise."""
    few = rng.uniform(0, 255, (6, 6, 3)).astype(np.float32)
    smooth = cv2.resize(few, (int(width), int(height)), interpolation=cv2.INTER_CUBIC)
    return (smooth + rng.normal(0, 5, smooth.shape)).clip(0, 255).astype(np.uint8)


def transformed(transform, image, seed):
    """The image that a transform gives, and the next random number."""
    np.random.seed(seed)  # noqa: NPY002
    image = transform({"img": image.copy()})["img"]
    assert image.dtype == np.uint8
    return image, np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("given", [(0.3, 0.3, 0.3), (0.0, (0.5, 0.6), 0.9)])
def test_colours_are_jittered_as_by_mmpretrain(rng, seed, given):
    options = dict(zip(("brightness", "contrast", "saturation"), given, strict=True))
    fast = TRANSFORMS.build({"type": "FastColorJitter", **options})
    stock = TRANSFORMS.build({"type": "ColorJitter", "backend": "cv2", **options})
    for number in range(6):
        assert_alike(fast, stock, photograph(rng, 41, 30), seed + number, levels=1)


def assert_alike(fast, stock, image, seed, levels=0):
    (image_fast, next_fast), (image_stock, next_stock) = (
        transformed(each, image, seed) for each in (fast, stock)
    )
    assert next_fast == next_stock
    assert image_fast.shape == image_stock.shape
    assert np.abs(image_fast.astype(int) - image_stock).max() <= levels


def build(kind, **options):
    return TRANSFORMS.build({"type": kind, **options})


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_resized_crop(interpolation, rng):
    options = {"scale": (48, 64), "interpolation": interpolation}
    fast = build("FastRandomResizedCrop", **options)
    stock = build("RandomResizedCrop", backend="pillow", **options)
    for number in range(20):
        image = photograph(rng, *rng.integers(30, 200, 2))
        assert_alike(fast, stock, image, number, ROUNDING)


SIZES = [
    (96, 130),
    (160, 65),
    (64, 64),
    (65, 64),
    (63, 90),
    (30, 21),
    (64, 500),
    (7, 8),
    (128, 128),
]


@pytest.mark.parametrize("crop", [48, 64])
@pytest.mark.parametrize("size", SIZES)
def test_center_crop(size, crop, rng):
    fast = build("FastCenterCrop", scale=64, crop_size=crop)
    stock = Compose(
        [
            build("ResizeEdge", scale=64, edge="short", **PILLOW),
            build("CenterCrop", crop_size=crop),
        ]
    )
    assert_alike(fast, stock, photograph(rng, *size), 0, ROUNDING)


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_random_flip(prob, rng):
    fast = build("FastRandomFlip", prob=prob)
    stock = build("RandomFlip", prob=prob, direction="horizontal")
    for number in range(20):
        assert_alike(fast, stock, photograph(rng, 6, 9), number)


def test_random_numbers_can_be_kept_for_several_images(rng, seed):
    np.random.seed(seed)  # noqa: NPY002
    flip = build("FastRandomFlip", prob=0.5)
    image = photograph(rng, 6, 9)
    found = set()
    for _ in range(20):
        with cache_random_params(flip):
            flips = [flip({"img": image})["flip"] for _ in range(5)]
        assert len(set(flips)) == 1
        found |= set(flips)
    assert found == {True, False}


def test_every_operation_of_randaugment(rng):
    fast, stock = build("FastRandAugment", **AUGMENT), build("RandAugment", **AUGMENT)
    assert len(fast.transforms) == 15
    images = [photograph(rng, 40, 50) for _ in range(6)]
    images += [np.full((9, 9, 3), 77, np.uint8), np.zeros((5, 5, 3), np.uint8)]
    for operation, own in zip(stock.transforms, fast.transforms, strict=True):
        alone = copy.copy(fast)
        alone.transforms, alone.num_policies = [own], 1
        alone.policies = fast.policies[:1]
        for number, image in enumerate(images):

            def chosen(results, operation=operation):
                np.random.choice(np.arange(1), size=1)  # noqa: NPY002
                return operation(results)

            assert_alike(alone, chosen, image, number)


def test_randaugment(rng):
    fast, stock = build("FastRandAugment", **AUGMENT), build("RandAugment", **AUGMENT)
    for number in range(40):
        assert_alike(fast, stock, photograph(rng, 32, 32), number)


def test_randaugment_with_fixed_values(rng):
    policies = [
        {"type": "Rotate", "angle": 12.0, "prob": 0.8},
        {"type": "Posterize", "bits": 3},
        {"type": "Solarize", "thr": 90},
        {"type": "SolarizeAdd", "magnitude": 50, "thr": 100},
        {"type": "Cutout", "shape": 5},  # left to mmpretrain
    ]
    options = {**AUGMENT, "policies": policies, "num_policies": 3}
    fast, stock = build("FastRandAugment", **options), build("RandAugment", **options)
    for number in range(20):
        assert_alike(fast, stock, photograph(rng, 20, 24), number)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": "FastCenterCrop", "scale": 20, "crop_size": 24}, ["24", "20", "at most"]),
        (
            {"type": "FastRandomResizedCrop", "scale": 8, "interpolation": "lanczos"},
            ["lanczos", "bicubic"],
        ),
    ],
)
def test_what_cannot_be_made_is_refused(options, said):
    with pytest.raises(InputError) as raised:
        TRANSFORMS.build(options)
    assert all(part in str(raised.value) for part in said)


def as_mmpretrain(pipeline):
    """The pipeline with mmpretrain's own transforms in place of the fast ones."""
    steps = []
    for step in pipeline:
        kind = step["type"].removeprefix("Fast")
        plain = {**step, "type": kind}
        if "transforms" in step:
            plain["transforms"] = as_mmpretrain(step["transforms"])
        if step["type"] == "FastCenterCrop":
            steps.append({"type": "ResizeEdge", "scale": plain.pop("scale"), **PILLOW})
            plain.pop("interpolation")
        elif step["type"] == "FastRandomResizedCrop":
            plain |= PILLOW
        elif step["type"] == "FastRandomFlip":
            plain["direction"] = "horizontal"
        steps.append(plain)
    return steps


@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader"])
def test_the_images_of_imagenet(loader, shared_data):
    files = sorted(shared_data("imagenet_samples").glob("val/*/*"))[::20]
    pipeline = load_config("imagenet_base.py").to_dict()[loader]["dataset"]["pipeline"]
    kinds = [step["type"] for step in pipeline]
    assert (
        kinds != [step["type"] for step in as_mmpretrain(pipeline)] or "SeededTransforms" in kinds
    )
    fast, stock = (
        Compose([TRANSFORMS.build(step) for step in copy.deepcopy(steps)])
        for steps in (pipeline, as_mmpretrain(pipeline))
    )
    differences = []
    for index, file in enumerate(files):
        made = [
            each({"img_path": str(file), "gt_label": 1, "sample_idx": index})["inputs"].int()
            for each in (fast, stock)
        ]
        differences.append((made[0] - made[1]).abs().float().mean().item())
    assert len(files) == 50
    assert np.mean(differences) <= MEAN
