"""Images in memory equal the files, and their augmentation does not depend on the batch."""

import copy
import itertools

import numpy as np
import pytest
import torch
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmpretrain.datasets import CustomDataset
from mmpretrain.registry import MODELS, TRANSFORMS
from PIL import Image
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import ImagesInMemory
from tokenformer_vit.training.batch_transforms import BatchTransforms
from tokenformer_vit.training.config import load_config

POLICIES = {
    "type": "RandAugment",
    "policies": "timm_increasing",
    "num_policies": 2,
    "total_level": 10,
    "magnitude_level": 7,
    "magnitude_std": 2.5,
    "hparams": {"pad_val": [114, 123, 125], "interpolation": "bicubic"},
}
CROP = {"type": "RandomCrop", "crop_size": 8, "padding": 2}
FLIP = {"type": "RandomFlip", "prob": 0.5, "direction": "horizontal"}
ROTATE = {"type": "Rotate", "angle": 10.0, "prob": 0.5}
RESIZED = {"type": "FastRandomResizedCrop", "scale": 24, "interpolation": "bicubic"}
JITTER = {"type": "FastColorJitter", "brightness": 0.3, "contrast": 0.3, "saturation": 0.3}
BLUR = {"type": "GaussianBlur", "magnitude_range": (0.1, 2.0), "magnitude_std": "inf", "prob": 1.0}
GRAY = {"type": "ColorTransform", "magnitude": -1.0, "random_negative_prob": 0.0, "prob": 1.0}
THREE = {
    "type": "RandomChoice",
    "transforms": [[GRAY], [{"type": "Solarize", "thr": 128, "prob": 1.0}], [BLUR]],
}
LOAD, PACK = {"type": "LoadImage"}, {"type": "PackInputs"}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def build(*transforms):
    return BatchTransforms([TRANSFORMS.build(transform) for transform in transforms])


def smooth_images(number, size):
    """Images with edges and areas: neighbouring pixels are alike."""
    coarse = torch.rand(number, 3, size // 3, size // 3)
    images = nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    return (255 * images.clamp(0, 1)).to(torch.uint8)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [0.15, 0.8])
@pytest.mark.parametrize("index", range(15))
def test_an_operation_does_what_mmpretrain_does(index, share, sign):
    # The operation with one value for all images, as mmpretrain draws it for each.
    operation = TRANSFORMS.build({**POLICIES, "magnitude_std": 0}).transforms[index]
    operation.prob, operation.magnitude_level = 1.0, 10 * share
    if operation.random_negative_prob:
        operation.random_negative_prob = float(sign < 0)
    images = smooth_images(20, 24)
    mine = BatchTransforms([operation])
    changed = mine(images.clone(), torch.rand(20, mine.num_draws, dtype=torch.float64))
    for image, other in zip(images, changed, strict=True):
        expected = operation.transform({"img": image.permute(1, 2, 0).numpy().copy()})["img"]
        gap = (torch.from_numpy(expected).permute(2, 0, 1).int() - other.int()).abs()
        if type(operation).__name__ == "Sharpness":
            gap = gap[:, 1:-1, 1:-1]  # as Pillow's, torchvision's leaves the border as it is
        assert gap.max() <= 3
        assert gap.float().mean() < 1.5


def test_a_blur_is_that_of_pillow():
    blur = TRANSFORMS.build(BLUR)
    images, mine = smooth_images(40, 24), BatchTransforms([blur])
    draws = torch.rand(40, mine.num_draws).double()
    for image, own, other in zip(images, draws, mine(images.clone(), draws), strict=True):
        blur.random_magnitude = lambda own=own: 0.1 + 1.9 * own[2].item()  # a uniform radius
        expected = blur.transform({"img": image.permute(1, 2, 0).numpy()})["img"]
        gap = (torch.from_numpy(expected).permute(2, 0, 1).int() - other.int()).abs()
        assert gap.max() <= 3


def test_colours_are_jittered_as_by_mmpretrain():
    jitter = TRANSFORMS.build({**JITTER, "type": "ColorJitter", "backend": "cv2"})
    images, mine = smooth_images(60, 9), BatchTransforms([jitter])
    draws = torch.rand(60, mine.num_draws).double()
    seen = set()
    for image, own, other in zip(images, draws, mine(images.clone(), draws), strict=True):
        order = list(itertools.permutations(range(3)))[int(6 * own[0])]
        factors = [0.7 + 0.6 * draw.item() for draw in own[1:]]
        jitter._rand_params = lambda order=order, factors=factors: (order, *factors, None)
        seen.add(order)
        expected = jitter.transform({"img": image.permute(1, 2, 0).numpy()})["img"]
        gap = (torch.from_numpy(expected).permute(2, 0, 1).int() - other.int()).abs()
        assert gap.max() <= 3
    assert len(seen) > 3


@pytest.mark.parametrize("shape", [(24, 24), (8, 24)])  # the second has few crops that fit
@pytest.mark.parametrize(
    "scale", [24, (30, 40)]
)  # to shrink, Pillow 13 begins with either direction
def test_crops_are_chosen_and_resized_as_by_mmpretrain(shape, scale, monkeypatch):
    options = {"type": "RandomResizedCrop", "scale": scale, "max_attempts": 2}
    crop = TRANSFORMS.build({**RESIZED, **options, "backend": "pillow"})
    images = smooth_images(30, 24)[:, :, : shape[0], : shape[1]]
    mine = BatchTransforms([crop])
    draws = torch.rand(30, mine.num_draws).double()
    for image, own, other in zip(images, draws, mine(images.clone(), draws), strict=True):
        tries, places = iter(own[:-2].tolist()), iter(own[-2:].tolist())
        with monkeypatch.context() as patched:
            patched.setattr(np.random, "uniform", lambda a, b, of=tries: a + (b - a) * next(of))
            patched.setattr(
                np.random, "randint", lambda a, b, of=places: int(a + (b - a) * next(of))
            )
            expected = crop.transform({"img": image.permute(1, 2, 0).numpy().copy()})["img"]
        gap = (torch.from_numpy(expected.copy()).permute(2, 0, 1).int() - other.int()).abs()
        assert gap.max() <= 2


def test_one_of_several_operations_is_chosen_for_each_image():
    image = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    augment = build(THREE)
    changed = augment(
        image.expand(3000, -1, -1, -1).clone(), torch.rand(3000, augment.num_draws).double()
    )
    gray = (changed[:, :1] == changed).flatten(1).all(1)
    solarized = (changed == torch.where(image < 128, image, 255 - image)).flatten(1).all(1)
    for part in (gray, solarized, ~gray & ~solarized):
        assert part.float().mean().item() == pytest.approx(1 / 3, abs=0.05)


def test_a_rotation_reads_the_nearest_pixel_as_mmpretrain_does():
    # With a single pad_val mmcv fills the first channel alone.
    always = {"prob": 1.0, "random_negative_prob": 0.0, "pad_val": [128] * 3}
    rotation = TRANSFORMS.build({**ROTATE, "angle": 25.0, **always})
    images = smooth_images(20, 9)
    changed = BatchTransforms([rotation])(images.clone(), torch.rand(20, 4, dtype=torch.float64))
    for image, other in zip(images, changed, strict=True):
        expected = rotation.transform({"img": image.permute(1, 2, 0).numpy().copy()})["img"]
        gap = torch.from_numpy(expected).permute(2, 0, 1) != other
        assert gap.float().mean() < 0.03  # where a place lies between two pixels


@pytest.mark.parametrize("size", [8, 13, 32])
def test_an_image_does_not_see_the_rest_of_its_batch(size):
    augment = build(
        *({**CROP, "crop_size": size}, FLIP, POLICIES, ROTATE),
        *({**RESIZED, "scale": size}, {"type": "FastRandomFlip", "prob": 0.5}, THREE, JITTER),
    )
    images, draws = smooth_images(300, size), torch.rand(300, augment.num_draws).double()
    whole = augment(images.clone(), draws)
    assert whole.shape == images.shape
    order = torch.randperm(300)
    for rows in order.split([1, 2, 50, 97, 150]):
        assert torch.equal(augment(images[rows], draws[rows]), whole[rows])


def test_crops_and_flips_are_those_of_the_padded_image_and_equally_frequent():
    image = torch.randint(1, 256, (1, 3, 8, 8), dtype=torch.uint8)
    padded = nn.functional.pad(image, (2, 2, 2, 2))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)[0].permute(1, 2, 0, 3, 4).flatten(0, 1)
    crops = build(CROP)(image.expand(5000, -1, -1, -1).clone(), torch.rand(5000, 2).double())
    place = (crops[:, None] == windows).flatten(2).all(2).int()
    assert (place.sum(1) == 1).all()
    assert place.sum(0).min() > 100  # of 5000 in 25 places
    flipped = build(FLIP)(image.expand(2000, -1, -1, -1).clone(), torch.rand(2000, 1).double())
    as_it_was = (flipped == image).flatten(1).all(1)
    assert torch.equal(flipped[~as_it_was], image.flip(3).expand(int((~as_it_was).sum()), 3, 8, 8))
    assert 850 < as_it_was.sum() < 1150


def test_randaugment_chooses_as_mmpretrain_does():
    """Each of two rounds acts in half of the cases, and all operations are equally frequent."""
    augment = build(
        {**POLICIES, "policies": [{"type": "Invert"}, {"type": "Equalize", "prob": 0.0}]}
    )
    image = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    images = image.expand(4000, -1, -1, -1).clone()
    changed = augment(images.clone(), torch.rand(4000, augment.num_draws).double())
    inverted = (changed == 255 - image).flatten(1).all(1)
    assert ((changed == image).flatten(1).all(1) | inverted).all()
    # Inverted in one round and not in the other: 2 x 1/4 x 3/4.
    assert inverted.float().mean().item() == pytest.approx(0.375, abs=0.05)


def make(data_root, *transforms, pack=PACK, split="train", **kwargs):
    seeded = [{"type": "SeededTransforms", "transforms": list(transforms)}] if transforms else []
    pipeline = [LOAD, *seeded, pack]
    return ImagesInMemory(data_root=str(data_root), data_prefix=split, pipeline=pipeline, **kwargs)


def set_epoch(dataset, seed, epoch):
    dataset.pipeline.transforms[1].set_epoch(seed, epoch)


def test_images_and_labels_are_those_of_the_files(data_root):
    stock = CustomDataset(str(data_root), "val", pipeline=[LOAD, PACK])
    batch = make(data_root, split="val").__getitems__([5, 40, 0])
    for index, image, sample in zip(
        [5, 40, 0], batch["inputs"], batch["data_samples"], strict=True
    ):
        assert torch.equal(image, stock[index]["inputs"])
        assert sample.gt_label == stock[index]["data_samples"].gt_label
    labels = make(data_root, split="val", pack={"type": "PackLabels"}).__getitems__([5, 40, 0])
    assert labels["data_samples"].tolist() == [0, 2, 0]


def test_a_pipeline_that_is_switched_is_refused(data_root):
    dataset = make(data_root, CROP)
    dataset.__getitems__([0])
    dataset.pipeline = make(data_root, FLIP).pipeline  # as mmpretrain's SwitchRecipeHook does
    with pytest.raises(InputError, match=r"pipeline of ImagesInMemory was replaced.*without InMem"):
        dataset.__getitems__([0])


def test_a_share_of_the_images_has_as_many_of_each_class(data_root, seed):
    chosen = {}
    for share in (0.25, 0.5, 0.01):
        dataset = make(data_root, share=share, share_seed=seed)
        assert np.bincount(dataset.get_gt_labels()).tolist() == [max(1, round(16 * share))] * 3
        chosen[share] = {dataset.get_data_info(index)["img_path"] for index in range(len(dataset))}
    assert chosen[0.01] < chosen[0.25] < chosen[0.5]
    other = make(data_root, share=0.5, share_seed=seed + 1)
    assert {other.get_data_info(index)["img_path"] for index in range(24)} != chosen[0.5]


def test_a_config_only_names_the_data_set(data_root, config, monkeypatch):
    cfg = load_config(config, {"train_dataloader.dataset.type": "ImagesInMemory"}, str(data_root))
    loader = Runner.build_dataloader(cfg.train_dataloader, seed=0)
    batches = list(loader)
    assert [batch["inputs"].shape for batch in batches] == [(8, 3, 8, 8)] * 6
    assert batches[0]["data_samples"].dtype == torch.int64
    # As what looks at single images collates them.
    assert torch.equal(
        loader.collate_fn([loader.dataset[1], loader.dataset[2]])["data_samples"],
        loader.dataset.__getitems__([1, 2])["data_samples"],
    )
    monkeypatch.setattr("tokenformer_vit.training.in_memory.get_worker_info", lambda: "a worker")
    with pytest.raises(InputError, match="num_workers=0"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ([LOAD, FLIP, PACK], "^RandomFlip is random"),
        ([LOAD, {"type": "FastRandomFlip", "prob": 0.5}, PACK], "FastRandomFlip is random"),
        ([LOAD, {"type": "FastRandomResizedCrop", "scale": 8}, PACK], "ResizedCrop is random"),
        ([LOAD, {**POLICIES, "type": "FastRandAugment"}, PACK], "FastRandAugment is random"),
        ([LOAD, {"type": "SeededTransforms", "transforms": [FLIP]}, LOAD, PACK], "Seeded.* random"),
        ([LOAD], "ends with LoadImage"),
        ([{"type": "RandomErasing"}], "RandomErasing cannot be applied"),
        ([{**CROP, "pad_if_needed": True}], "RandomCrop with pad_if_needed=True cannot"),
        ([{**FLIP, "direction": "diagonal"}], "direction='diagonal' cannot"),
        ([{**ROTATE, "interpolation": "lanczos"}], "interpolation='lanczos' cannot"),
        ([{**RESIZED, "interpolation": "bilinear"}], "interpolation='bilinear' cannot"),
        ([{"type": "RandomResizedCrop", "scale": 8, "interpolation": "bicubic"}], "backend='cv2'"),
        ([{"type": "ColorJitter", "hue": 0.1}], "ColorJitter with hue"),
        ([{**THREE, "prob": [0.5, 0.25, 0.25]}], "RandomChoice with prob"),
    ],
)
def test_what_cannot_be_done_by_the_batch_is_said(data_root, pipeline, message):
    if pipeline[0] is not LOAD:
        pipeline = [LOAD, {"type": "SeededTransforms", "transforms": pipeline}, PACK]
    with pytest.raises(InputError, match=message):
        ImagesInMemory(data_root=str(data_root), data_prefix="train", pipeline=pipeline)


def test_images_without_labels_are_for_another_data_set(data_root):
    with pytest.raises(InputError, match=r"with_label.*CustomDataset"):
        make(data_root, with_label=False)


def test_images_of_another_size_are_named(tmp_path):
    for name, size in (("a", 8), ("b", 9)):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        Image.fromarray(np.zeros((size, 8, 3), np.uint8)).save(folder / "0.png")
    with pytest.raises(InputError, match=r"b/0\.png has 9x8 pixels, but the first image has 8x8"):
        make(tmp_path)
    resized = [LOAD, {"type": "ResizeEdge", "scale": 6}, {"type": "CenterCrop", "crop_size": 6}]
    dataset = ImagesInMemory(
        data_root=str(tmp_path), data_prefix="train", pipeline=[*resized, PACK]
    )
    assert dataset.__getitems__([0, 1])["inputs"].shape == (2, 3, 6, 6)


@pytest.mark.parametrize("augments", [None, [{"type": "Mixup", "alpha": 0.8}]])
def test_labels_as_one_tensor_give_the_loss_of_data_samples(data_root, config, augments):
    cfg = load_config(config)
    cfg.model.train_cfg = {"augments": augments} if augments else None
    model = MODELS.build({**cfg.model, "data_preprocessor": cfg.data_preprocessor})
    nn.init.normal_(model.head.fc.weight)
    indices, found = list(range(0, 48, 5)), []
    for pack in ("PackInputs", "PackLabels"):
        batch = make(data_root, pack={"type": pack}).__getitems__(indices)
        twin = copy.deepcopy(model).train()
        twin.backbone.eval()  # no drop path
        np.random.seed(0)  # noqa: NPY002  # mixup draws from it
        torch.manual_seed(0)
        twin(**twin.data_preprocessor(batch, True), mode="loss")["loss"].backward()
        found.append([parameter.grad for parameter in twin.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "options", [{"model.head.type": "LinearClsHead"}, {"data_preprocessor.type": None}]
)
def test_labels_that_a_model_does_not_take_are_refused(config, options):
    with pytest.raises(InputError, match="end the pipeline with PackInputs"):
        load_config(config, options)
    load_config(config, {**options, "train_dataloader.dataset.pipeline.2.type": "PackInputs"})
