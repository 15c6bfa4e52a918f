"""The measured accuracies equal those of the models run by hand, on separate images."""

import copy
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

from tokenformer_vit.cli import compress
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, measure_usage, nest, pattention_layers, prune
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import save_model

SHAPE = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
CLASSES = ["ant", "bee", "cat"]


def build(num_classes=3, **changes):
    model = timm.create_model("tokenformer_tiny", num_classes=num_classes, **SHAPE, **changes)
    torch.nn.init.normal_(model.head.weight)  # timm's is nearly 0: every image would look alike
    return model.eval()


@pytest.fixture(scope="module")
def model(session_seed):
    torch.manual_seed(session_seed)
    return build()


def convert(num_classes=3):
    """Build a converted ViT with as many pairs as the others."""
    vit = timm.create_model("deit_tiny_patch16_224", num_classes=num_classes, **SHAPE)
    vit.pretrained_cfg["crop_pct"] = 0.875  # as the others'
    torch.nn.init.normal_(vit.head.weight)
    return from_vit(vit)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save_model(model, folder, CLASSES)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, session_seed):
    """Ten images to measure on and eleven to test with, of three classes."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(session_seed)
    for split, counts in (("train", (4, 3, 3)), ("val", (5, 4, 2))):
        for name, count in zip(CLASSES, counts, strict=True):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                noise = rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)
                noise[:, :, index % 3] //= 4
                Image.fromarray(noise).save(root / split / name / f"{index}.png")
    return root


def run(*arguments):
    compress.main([str(argument) for argument in arguments])


def failure(*arguments):
    with pytest.raises(InputError) as error:
        run(*arguments)
    return str(error.value)


def points_in(folder):
    record = json.loads((folder / "compression.json").read_text())
    return record, {(point["method"], point["keep"]): point for point in record["points"]}


def images_in(folder):
    transform = create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")
    paths = sorted(folder.glob("*/*.png"))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    return images, torch.tensor([CLASSES.index(path.parent.name) for path in paths])


@torch.no_grad()
def correct_by_hand(model, data):
    images, labels = images_in(data / "val")
    return int((model(images).argmax(-1) == labels).sum())


@pytest.mark.parametrize("make", [build, convert])
def test_record_agrees_with_models_compressed_by_hand(make, data, tmp_path, capsys):
    model, out = make(), tmp_path / "out"
    save_model(model, tmp_path / "in", CLASSES)
    arguments = ["--keep", 0.5, 1, 0.25, "--batch-size", 4, "--save", "--out", out]
    run(tmp_path / "in", data, "--method", "prune", "budget", "top-k", *arguments)
    record, points = points_in(out)
    assert (record["images"], record["measured_images"]) == (11, 10)
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    methods = ("prune", "budget", "top-k")
    assert list(points) == [("dense", 1), *((name, n) for name in methods for n in (0.5, 0.25))]
    assert points["dense", 1]["correct"] == correct_by_hand(model, data)
    assert points["dense", 1]["top1"] == pytest.approx(100 * correct_by_hand(model, data) / 11)
    usage = measure_usage(model, [images_in(data / "train")[0]])
    images, _ = images_in(data / "val")
    classes = model(images).argmax(-1)
    for keep in (0.5, 0.25):
        numbers = [round(keep * pairs) for pairs in (32, 32, 128)]
        saved, chosen = (
            timm.create_model(f"local-dir:{out}/{name}_{keep}", pretrained=True).eval()
            for name in ("prune", "budget")
        )
        by_hand = prune(copy.deepcopy(model), usage, *numbers)
        torch.testing.assert_close(saved(images), by_hand(images))
        assert saved.pretrained_cfg["label_names"] == CLASSES
        for method, own in (("prune", saved), ("budget", chosen)):
            point = points[method, keep]
            assert point["correct"] == correct_by_hand(own, data)
            assert point["parameters"] == sum(each.numel() for each in own.parameters())
            same = (own(images).argmax(-1) == classes).float().mean().item()
            assert point["agreement"] == pytest.approx(100 * same)
        counts = points["budget", keep]["pairs"]["ffn"]
        counts = counts if isinstance(counts, list) else [counts] * 2
        layers = pattention_layers(chosen)
        assert [layers[f"blocks.{i}.mlp"].num_param_tokens for i in range(2)] == counts
        weights = [sum(p.numel() for p in x.parameters() if p.ndim > 1) for x in (saved, chosen)]
        assert 0 <= weights[0] - weights[1] < 3 * 64  # of a pair of query, key and value
        # Of 17 tokens: 2 FLOPs for each entry of the keys, and as many for one of the values. To
        # multiply linear tokens out is cheaper.
        gone, (_, kept, ffn) = {}, numbers
        most = 32 if make is convert else 64
        gone["prune"] = 4 * (most - min(2 * kept, most)) + 2 * (128 - ffn)
        gone["top-k"] = 4 * (most - 32 - kept) + 128 - ffn
        for method, rows in gone.items():
            less = points["dense", 1]["flops_per_image"] - points[method, keep]["flops_per_image"]
            assert less == 2 * 17 * 2 * rows * 32
    printed = capsys.readouterr().out
    assert f"{points['prune', 0.5]['parameters']:,}" in printed
    with Image.open(out / "compression.png") as image:
        image.load()
    assert {path.name for path in out.iterdir() if path.is_dir()} == {
        *("prune_0.5", "prune_0.25", "budget_0.5", "budget_0.25")
    }


@pytest.mark.parametrize("make", [build, convert])
def test_nested_sizes_are_the_default_of_a_nested_model(make, data, tmp_path):
    nested = nest(make(), (0.25, 0.5))
    save_model(nested, tmp_path / "run", CLASSES)
    run(tmp_path / "run", data, "--method", "nested", "--save")
    record, points = points_in(tmp_path / "run" / "compression")
    assert list(points) == [("dense", 1), ("nested", 0.5), ("nested", 0.25)]
    assert record["measured_on"] is None
    x = images_in(data / "val")[0]
    for keep in (0.5, 0.25):
        smaller, folder = extract(nested, keep), tmp_path / f"run/compression/nested_{keep}"
        saved = timm.create_model(f"local-dir:{folder}", pretrained=True)
        torch.testing.assert_close(saved.eval()(x), smaller(x), rtol=0, atol=0)
        assert points["nested", keep]["correct"] == correct_by_hand(smaller, data)


def test_kinds_that_are_not_named_stay_whole_and_top_k_needs_no_training_images(
    exported, data, tmp_path
):
    (tmp_path / "val").symlink_to(data / "val")
    words = ["--method", "top-k", "--kinds", "ffn", "--keep", 0.5, "--out", tmp_path / "out"]
    run(exported / "model.safetensors", tmp_path, *words)
    _, points = points_in(tmp_path / "out")
    assert points["top-k", 0.5]["pairs"] == {"qkv": 32, "proj": 32, "ffn": 64}


def test_classes_are_compared_by_name(model, data, tmp_path):
    order = [2, 0, 1]  # the model counts its classes in another order than the folders
    turned = build()
    turned.load_state_dict(model.state_dict())
    with torch.no_grad():
        turned.head.weight.copy_(model.head.weight[order])
        turned.head.bias.copy_(model.head.bias[order])
    save_model(turned, tmp_path / "turned", [CLASSES[i] for i in order])
    run(tmp_path / "turned", data, "--keep", 0.5, "--method", "top-k")
    points = points_in(tmp_path / "turned" / "compression")[1]
    assert points["dense", 1]["correct"] == correct_by_hand(model, data)
    save_model(model, tmp_path / "other", ["ant", "bee", "cow"])
    assert "class 'cat', but the model has ant, bee, cow" in failure(tmp_path / "other", data)
    save_model(build(num_classes=5), tmp_path / "five")
    assert "but the model has class 0, class 1" in failure(tmp_path / "five", data)


def test_what_cannot_be_measured_is_one_line(exported, data, tmp_path):
    assert "--measure-on" in failure(exported, data, "--measure-on", data / "val")
    assert "use prune" in failure(exported, data, "--method", "nested", "--out", tmp_path)
    assert str(tmp_path / "x.pth") in failure(tmp_path / "x.pth", data)
    save_model(timm.create_model("vit_tiny_patch16_224", num_classes=3, **SHAPE), tmp_path / "vit")
    assert "no Pattention layer" in failure(tmp_path / "vit", data)
    for keep in ("0", "1.5", "nan"):
        assert "a share above 0" in failure(exported, data, "--keep", keep)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_cannot_be_read_gives_no_number(split, exported, data, tmp_path):
    for each in ("train", "val"):
        for name in CLASSES:
            (tmp_path / each / name).mkdir(parents=True)
            for path in (data / each / name).iterdir():
                (tmp_path / each / name / path.name).symlink_to(path)
    cut = tmp_path / split / "cat" / "cut.png"
    cut.write_bytes((data / "val" / "cat" / "0.png").read_bytes()[:900])
    assert str(cut) in failure(exported, tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "compression.json").exists()


@pytest.mark.parametrize("method", ["prune", "top-k"])
def test_diverged_weights_are_not_given_an_accuracy(method, model, data, tmp_path):
    diverged = build()
    diverged.load_state_dict(model.state_dict())
    with torch.no_grad():
        diverged.head.weight[0] = torch.finfo().max  # finite, as the reader of weights demands
    save_model(diverged, tmp_path / "run", CLASSES)
    assert "output is not finite" in failure(tmp_path / "run", data, "--method", method)


@pytest.mark.slow
def test_a_hugging_face_data_set(shared_data, arrow_cache, tmp_path):
    words = ["--method", "prune", "--keep", 0.75, "--measure-images", 64, "--batch-size", 256]
    folder = shared_data("cifar10")
    source = "tokenformer_vit/models/pretrained/tokenformer_cifar10_micro"
    run(source, folder, *words, "--out", tmp_path)
    points = points_in(tmp_path)[1]
    assert points["dense", 1]["top1"] == pytest.approx(69.35, abs=0.1)
