"""The measured accuracies equal those of the models made by hand, on separate images."""

import copy
import json
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.utils import reparameterize_model

from tokenformer_vit.cli import compress
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, nest, refit
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.vision.compression import flops_of

from ..samples import write_images

SHAPE: Any = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
CLASSES = ["cat", "ant", "bee"]  # of models, which count them in another order than folders


def build(name="tokenformer_tiny", num_classes=3):
    model: Any = timm.create_model(name, num_classes=num_classes, **SHAPE)
    model.pretrained_cfg["crop_pct"] = 0.875
    if num_classes:
        torch.nn.init.normal_(model.head.weight)  # timm's is nearly 0: images would look alike
    return model.eval()


@pytest.fixture(scope="module")
def data(tmp_path_factory, session_seed):
    """Ten images to fit to and eleven to measure with, of three classes."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(session_seed)
    for split, counts in (("train", (4, 3, 3)), ("val", (5, 4, 2))):
        write_images(root / split, (40, 50), dict(zip(CLASSES, counts, strict=True)), rng)
    return root


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    compress.main([str(argument) for argument in arguments])


def failure(*arguments):
    with pytest.raises(InputError) as error:
        run(*arguments)
    return str(error.value)


def points_in(folder):
    record = json.loads((folder / "compression.json").read_text())
    with Image.open(folder / "compression.png") as image:
        image.load()
    return record, {point["name"]: point for point in record["points"]}


def images_in(folder):
    transform: Any = create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")
    paths = sorted(folder.glob("*/*.png"))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    return images, torch.tensor([CLASSES.index(path.parent.name) for path in paths])


def load(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@torch.no_grad()
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("name", ["tokenformer_tiny", "deit_tiny_patch16_224"])
def test_the_record_agrees_with_models_that_are_made_by_hand(name, data, tmp_path, capsys):
    whole, out = build(name), tmp_path / "out"
    save_model(whole, tmp_path / "in", CLASSES)
    run(tmp_path / "in", data, "--keep", 0.5, 1, 0.25, "--batch-size", 4, "--save", out)
    record, points = points_in(out)
    assert (record["images"], record["fit_images"]) == (11, 10)
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    assert list(points) == ["whole", "keep_0.5", "keep_1", "keep_0.25"]
    images, labels = images_in(data / "val")
    ours = whole if name == "tokenformer_tiny" else from_vit(whole)
    for keep in (0.5, 1, 0.25):
        own, point = load(out / f"keep_{keep}"), points[f"keep_{keep}"]
        counts = [round(keep * pairs) for pairs in (32, 32, 128)]
        by_hand = refit(copy.deepcopy(ours), [images_in(data / "train")[0]], *counts)
        difference = (own(images) - by_hand(images)).norm() / by_hand(images).norm()
        assert difference < 1e-3  # images are fitted to in another order
        order = [model.blocks[0].mlp.key_param_tokens for model in (own, by_hand)]
        torch.testing.assert_close(*order)
        assert own.pretrained_cfg["label_names"] == CLASSES
        classes = own(images).argmax(-1)
        assert point["top1"] == pytest.approx((classes == labels).double().mean().item() * 100)
        same = (classes == whole(images).argmax(-1)).double().mean().item()
        assert point["agreement"] == pytest.approx(100 * same)
        fused = reparameterize_model(own)
        assert point["parameters"] == sum(each.numel() for each in fused.parameters())
        assert point["flops_per_image"] == flops_of(fused)
    shared = "top1", "parameters", "flops_per_image"
    assert [points["whole"][key] for key in shared] == [points["keep_1"][key] for key in shared]
    printed = capsys.readouterr().out
    assert f"{points['keep_0.5']['parameters']:,}" in printed
    assert "Accuracy is not" not in printed


@torch.no_grad()
def test_a_vit_leaves_as_a_smaller_vit(data, tmp_path, capsys):
    save_model(vit := build("deit_tiny_patch16_224"), tmp_path / "in", CLASSES)
    run(tmp_path / "in", data / "val", "--flops", 0.7, "--to-vit", "--save", "out")
    record, points = points_in(tmp_path / "out")
    assert (record["fit_images"], record["images"]) == (5, 6)  # no train beside it
    smaller = load(tmp_path / "out/flops_0.7")
    assert type(smaller) is type(vit)
    part = points["flops_0.7"]["flops_per_image"] / flops_of(vit)
    assert 0.68 < part <= 0.7
    assert flops_of(smaller) == points["flops_0.7"]["flops_per_image"]
    assert "tokenformer" not in (tmp_path / "out/flops_0.7/config.json").read_text()


@torch.no_grad()
def test_photos_and_a_backbone_need_no_classes(data, tmp_path, capsys):
    save_model(build(num_classes=0), tmp_path / "in")
    photos = tmp_path / "photos"
    photos.mkdir()
    for index, path in enumerate(sorted(data.glob("*/*/*.png"))):
        (photos / f"{index}.png").symlink_to(path)
    run(tmp_path / "in", photos)
    points = points_in(tmp_path / "compression")[1]
    assert list(points) == ["whole", "flops_0.67", "flops_0.5"]
    assert 0 < points["flops_0.5"]["agreement"] < points["whole"]["agreement"] + 1e-3
    assert "top1" not in points["whole"]
    assert "Accuracy is not measured: the images have no classes" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "compression").iterdir() if path.is_dir()] == []


@torch.no_grad()
def test_a_nested_model_keeps_its_first_pairs(data, tmp_path):
    nested = nest(build(), (0.25, 0.5))
    save_model(nested, tmp_path / "run", CLASSES)
    run(tmp_path / "run", data, "--save", "out")
    points = points_in(tmp_path / "out")[1]
    assert list(points) == ["whole", "keep_0.25", "keep_0.5"]
    images = images_in(data / "val")[0]
    for keep in (0.5, 0.25):
        saved = load(tmp_path / f"out/keep_{keep}")
        torch.testing.assert_close(saved(images), extract(nested, keep)(images), rtol=0, atol=0)
    run(tmp_path / "run", data, "--flops", 0.5, "--save", "fitted")
    assert list(points_in(tmp_path / "fitted")[1]) == ["whole", "flops_0.5"]
    assert load(tmp_path / "fitted/flops_0.5").sizes == (1.0,)


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(data, tmp_path):
    exported, model = tmp_path / "exported", build()
    save_model(model, exported, CLASSES)
    for words in (["--keep", 0], ["--flops", 1.5], ["--flops", "nan"]):
        assert "is not a share above 0" in failure(exported, data, *words)
    assert str(tmp_path / "x.pth") in failure(tmp_path / "x.pth", data)
    with torch.no_grad():
        model.head.weight[0] = torch.finfo().max  # finite, as the reader of weights demands
    save_model(model, tmp_path / "run", CLASSES)
    assert "output is not finite" in failure(tmp_path / "run", data, "--keep", 0.5)
    for split in ("train", "val"):
        cut = data / split / "cat" / "cut.png"
        cut.write_bytes((data / "val" / "cat" / "0.png").read_bytes()[:900])
        assert str(cut) in failure(exported, data, "--save", tmp_path / "out")
        cut.unlink()
        assert not (tmp_path / "out" / "compression.json").exists()
