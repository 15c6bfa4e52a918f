"""The measured accuracies equal those of the models run by hand, on separate images."""

import copy
import json
import shutil
import signal
import time

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform

from tokenformer_vit.cli import compress
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, measure_usage, pattention_layers, prune
from tokenformer_vit.models.checkpoints import save_model

SHAPE = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
CLASSES = ["ant", "[bold]bee", "cat"]
FOLDERS = sorted(CLASSES)


def build(num_classes=3):
    model = timm.create_model("tokenformer_tiny", num_classes=num_classes, **SHAPE).eval()
    torch.nn.init.normal_(model.head.weight)  # timm's is nearly 0: every image would look alike
    return model


@pytest.fixture(scope="module")
def model(session_seed):
    torch.manual_seed(session_seed)
    return build()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save_model(model, folder, FOLDERS)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, session_seed):
    """Ten images to measure on and eleven to test with, of three classes."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(session_seed)
    for split, counts in (("train", (4, 3, 3)), ("val", (5, 4, 2))):
        for name, count in zip(FOLDERS, counts, strict=True):
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
    assert "\n" not in str(error.value)
    return str(error.value)


def images_in(folder):
    transform = create_transform((3, 32, 32), crop_pct=0.875, interpolation="bicubic")
    paths = sorted(folder.glob("*/*.png"))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    return images, torch.tensor([FOLDERS.index(path.parent.name) for path in paths])


@torch.no_grad()
def correct_by_hand(model, data):
    images, labels = images_in(data / "val")
    return int((model(images).argmax(-1) == labels).sum())


def test_record_agrees_with_models_compressed_by_hand(model, exported, data, tmp_path, capsys):
    arguments = ["--keep", 0.5, 1, 0.25, "--batch-size", 4, "--save", "--out", tmp_path]
    run(exported, data, "--method", "prune", "top-k", "random", *arguments)
    record = json.loads((tmp_path / "compression.json").read_text())
    assert record["images"] == 11
    assert record["measured_images"] == 10
    assert record["measured_on"] == str(data / "train")
    assert record["data"] == str(data / "val")
    assert {"commit", "date", "hardware", "versions", "command"} <= record.keys()
    points = {(point["method"], point["keep"]): point for point in record["points"]}
    assert list(points) == [
        ("dense", 1),
        *(("prune", 0.5), ("prune", 0.25)),
        *(("top-k", 0.5), ("top-k", 0.25)),
        *(("random", 0.5), ("random", 0.25)),
    ]
    assert points["dense", 1]["correct"] == correct_by_hand(model, data)
    assert points["dense", 1]["top1"] == pytest.approx(100 * correct_by_hand(model, data) / 11)

    usage = measure_usage(model, [images_in(data / "train")[0]])
    for keep in (0.5, 0.25):
        numbers = [round(keep * pairs) for pairs in (32, 32, 128)]
        pairs = dict(zip(("qkv", "proj", "ffn"), numbers, strict=True))
        saved = timm.create_model(f"local-dir:{tmp_path}/prune_{keep}", pretrained=True).eval()
        by_hand = build()
        by_hand.load_state_dict(model.state_dict())
        prune(by_hand, usage, *numbers)
        images = images_in(data / "val")[0]
        torch.testing.assert_close(saved(images), by_hand(images))
        assert points["prune", keep]["correct"] == correct_by_hand(saved, data)
        assert saved.pretrained_cfg["label_names"] == FOLDERS
        parameters = sum(parameter.numel() for parameter in saved.parameters())
        for method in ("prune", "random"):
            assert points[method, keep]["parameters"] == parameters
        assert points["top-k", keep]["parameters"] == points["dense", 1]["parameters"]

        # Of 17 tokens: 2 FLOPs for each entry of the keys, and as many for one of the values.
        gone = 3 * (32 - numbers[0]) + (32 - numbers[1]) + (128 - numbers[2])
        dense = points["dense", 1]["flops_per_image"]
        for method, sides in (("prune", 2), ("random", 2), ("top-k", 1)):
            assert points[method, keep]["pairs"] == pairs
            saved_flops = dense - points[method, keep]["flops_per_image"]
            assert saved_flops == 2 * 17 * sides * 2 * gone * 32

    out = capsys.readouterr().out
    assert out.count("prune") == 2 + 2  # rows of the table, folders
    assert "[bold]" not in out
    assert "…" not in out  # no number is cut
    with Image.open(tmp_path / "compression.png") as image:
        image.load()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("compression.json", "compression.png", "prune_0.5", "prune_0.25")
    }


def test_kinds_that_are_not_named_stay_whole(exported, data, tmp_path):
    run(exported, data, "--kinds", "ffn", "--keep", 0.5, "--out", tmp_path, "--seed", 3)
    record = json.loads((tmp_path / "compression.json").read_text())
    assert record["kinds"] == ["ffn"]
    assert [point["pairs"] for point in record["points"][1:]] == 2 * [
        {"qkv": 32, "proj": 32, "ffn": 64}
    ]


def test_top_k_alone_needs_no_training_images(exported, data, tmp_path):
    (tmp_path / "val").symlink_to(data / "val")
    checkpoint = exported / "model.safetensors"
    out = tmp_path / "deep" / "out"
    run(checkpoint, tmp_path, "--method", "top-k", "--keep", 0.01, "--out", out)
    record = json.loads((out / "compression.json").read_text())
    assert record["measured_on"] is None
    assert record["points"][1]["pairs"] == {"qkv": 1, "proj": 1, "ffn": 1}


def test_results_lie_beside_the_checkpoint(exported, data):
    run(exported / "model.safetensors", data, "--method", "top-k", "--keep", 0.5)
    assert (exported / "compression" / "compression.json").is_file()


def points_in(folder):
    record = json.loads((folder / "compression.json").read_text())
    return record, {(point["method"], point["keep"]): point for point in record["points"]}


def test_budgets_are_chosen_on_held_out_images(model, exported, data, tmp_path, capsys):
    run(exported, data, "--budget", 0.5, "--save", "--out", tmp_path, "--batch-size", 16)
    record, points = points_in(tmp_path)
    assert list(points) == [("dense", 1), ("prune", 0.5), ("by-usage", 0.5), ("by-loss", 0.5)]
    assert (record["choosing_images"], record["images"]) == (5, 6)
    assert record["chosen_on"] == str(data / "val")
    pair = 2 * 17 * 2 * 32  # FLOPs of a pair of one layer
    for method in ("by-usage", "by-loss"):
        point = points[method, 0.5]
        less = points["prune", 0.5]["flops_per_image"] - point["flops_per_image"]
        assert 0 <= less < 3 * pair
        assert any(isinstance(numbers, list) for numbers in point["pairs"].values())
        folder = tmp_path / f"{method}_0.5"
        reloaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        expected = {
            kind: numbers if isinstance(numbers, list) else [numbers] * 2
            for kind, numbers in point["pairs"].items()
        }
        layers = pattention_layers(reloaded)
        for index in range(2):
            assert layers[f"blocks.{index}.attn.key"].num_param_tokens == expected["qkv"][index]
            assert layers[f"blocks.{index}.attn.proj"].num_param_tokens == expected["proj"][index]
            assert layers[f"blocks.{index}.mlp"].num_param_tokens == expected["ffn"][index]
    assert "by-loss" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        *("prune_0.5", "by-usage_0.5", "by-loss_0.5")
    }


def test_nested_sizes_and_early_exits(data, tmp_path):
    nested = timm.create_model("tokenformer_tiny", num_classes=3, nested=(0.25, 0.5), **SHAPE)
    torch.nn.init.normal_(nested.eval().head.weight)
    save_model(nested, tmp_path / "run", FOLDERS)
    arguments = ["--early", "--choose-on", data / "train", "--save", "--out", tmp_path / "out"]
    run(tmp_path / "run", data, *arguments)
    record, points = points_in(tmp_path / "out")
    fixed = [("dense", 1), ("nested", 0.5), ("nested", 0.25)]
    assert list(points) == [*fixed, ("early", 1), ("early", 0.5)]
    assert (record["choosing_images"], record["images"], record["measured_on"]) == (10, 11, None)
    x = images_in(data / "val")[0]
    for keep in (0.5, 0.25):
        smaller = extract(nested, keep)
        saved = timm.create_model(f"local-dir:{tmp_path}/out/nested_{keep}", pretrained=True)
        torch.testing.assert_close(saved.eval()(x), smaller(x), rtol=0, atol=0)
        assert points["nested", keep]["correct"] == correct_by_hand(smaller, data)
    costs = {1.0: "dense", 0.5: "nested", 0.25: "nested"}
    for keep in (1.0, 0.5):
        point = points["early", keep]
        assert sum(point["exits"]) == 11
        flops = [points[costs[size], size]["flops_per_image"] for size in point["sizes"]]
        spent = sum(n * sum(flops[: i + 1]) for i, n in enumerate(point["exits"]))
        assert point["flops_per_image"] == pytest.approx(spent / 11)
    assert record["chosen_on"] == str(data / "train")


def test_choices_that_cannot_be(exported, data, tmp_path):
    message = failure(exported, data, "--early", "--choose-on", data / "val/cat")
    assert "overlap" in message
    assert "--choose-on" in message
    assert "at least 0.0196" in failure(exported, data, "--budget", 0.001, "--out", tmp_path)
    message = failure(exported, data, "--method", "nested", "--out", tmp_path / "out")
    assert "no nested sizes" in message
    assert "prune" in message


@pytest.mark.parametrize("option", [["--early"], ["--budget", 0.5]])
def test_one_image_cannot_both_choose_and_test(option, data, tmp_path):
    save_model(build(num_classes=1), tmp_path / "model", FOLDERS[:1])
    image = data / "val" / FOLDERS[0] / "0.png"
    (tmp_path / "val" / FOLDERS[0]).mkdir(parents=True)
    shutil.copy(image, tmp_path / "val" / FOLDERS[0])
    message = failure(tmp_path / "model", tmp_path, *option)
    assert "1 image" in message
    assert "--choose-on" in message


@pytest.mark.parametrize("measured", ["val", "", "val/ant"])
def test_usage_is_not_measured_on_the_images_of_the_accuracy(measured, exported, data, tmp_path):
    message = failure(exported, data, "--measure-on", data / measured, "--out", tmp_path)
    assert "overlap" in message
    assert "--measure-on" in message


def test_a_sample_of_training_images(exported, data, tmp_path, seed):
    arguments = ["--measure-images", 4, "--keep", 0.5, "--seed", seed]
    for name in ("a", "b"):
        run(exported, data, *arguments, "--out", tmp_path / name)
    records = [json.loads((tmp_path / name / "compression.json").read_text()) for name in "ab"]
    assert records[0]["measured_images"] == 4
    assert records[0]["points"] == records[1]["points"]


def test_another_number_of_classes(data, tmp_path):
    save_model(build(num_classes=5), tmp_path / "five")
    message = failure(tmp_path / "five", data)
    assert f"{data / 'val'} has 3 class folders" in message
    assert "5 classes" in message


def test_missing_folders(exported, data, tmp_path):
    assert f"there are no class folders in {tmp_path / 'val'};" in failure(exported, tmp_path)
    (tmp_path / "val").symlink_to(data / "val")
    assert str(tmp_path / "train") in failure(exported, tmp_path)
    (tmp_path / "val").unlink()
    for name in FOLDERS:
        (tmp_path / "val" / name).mkdir(parents=True)
    assert "there is no image in" in failure(exported, tmp_path)


def test_missing_checkpoint_and_model(exported, data, tmp_path):
    assert str(tmp_path / "x.pth") in failure(tmp_path / "x.pth", data)
    save_model(timm.create_model("vit_tiny_patch16_224", num_classes=3, **SHAPE), tmp_path / "vit")
    assert "no Pattention layer" in failure(tmp_path / "vit", data)


def test_folder_that_cannot_be_made(exported, data, tmp_path):
    (tmp_path / "file").touch()
    message = failure(exported, data, "--out", tmp_path / "file" / "out")
    assert f"cannot make {tmp_path / 'file' / 'out'}" in message
    assert "choose another --out" in message


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_cannot_be_read(split, exported, data, tmp_path):
    for each in ("train", "val"):
        for name in FOLDERS:
            (tmp_path / each / name).mkdir(parents=True)
            for path in (data / each / name).iterdir():
                (tmp_path / each / name / path.name).symlink_to(path)
    cut = tmp_path / split / "cat" / "cut.png"
    cut.write_bytes((data / "val" / "cat" / "0.png").read_bytes()[:900])
    assert f"cannot read image {cut}: " in failure(exported, tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "compression.json").exists()


@pytest.mark.parametrize("methods", [["prune"], ["top-k"]])
def test_diverged_weights_are_not_given_an_accuracy(methods, model, data, tmp_path):
    diverged = build()
    diverged.load_state_dict(model.state_dict())
    with torch.no_grad():
        diverged.head.weight[0] = torch.finfo().max  # finite, as the reader of weights demands
    save_model(diverged, tmp_path / "run")
    assert "output is not finite" in failure(tmp_path / "run", data, "--method", *methods)


@pytest.mark.parametrize("keep", ["0", "1.5", "half", "nan"])
def test_shares_that_cannot_be(keep, exported, data):
    assert "argument --keep" in failure(exported, data, "--keep", keep)


@pytest.mark.slow
def test_ctrl_c_ends_it_in_one_line(exported, data, tmp_path, command):
    for split in ("train", "val"):
        for name in FOLDERS:
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(3000):  # enough to be interrupted at
                link = tmp_path / split / name / f"{index}.png"
                link.symlink_to(data / "val" / name / "0.png")
    words = ["--out", tmp_path / "out", "--measure-images", 9000]
    process = command.start("compress", exported, tmp_path, *words)
    while not process.stderr.read(1):  # it says what it is about to do
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err


def test_what_cannot_be_saved_is_said_before_hours_of_work():
    words = ["folder", "data", "--save", "--method"]
    with pytest.raises(InputError, match="--save writes the models of prune and nested, not of"):
        compress.parse([*words, "top-k", "random"])
    for more in (["prune"], ["--budget", "0.5"], ["--early"]):
        assert compress.parse([*words, "random", *more]).save
    assert compress.parse(words[:-1]).save


def test_no_number_of_the_table_is_cut():
    pairs = {"qkv": 768, "proj": [100, 768], "ffn": 3072}
    point = {"method": "by-usage", "keep": 0.75, "pairs": pairs, "parameters": 114_759_400}
    point |= {"bytes": 459e6, "flops_per_image": 46.28e9, "top1": 100.0, "agreement": 99.99}
    text = compress.table({"data": "data/val", "images": 10_000, "points": [point]})
    assert text.splitlines()[-1].split() == [
        *("by-usage", "0.75", "768", "100–768", "3072", "114,759,400", "459", "46.28"),
        *("100.00", "99.99"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_scores_are_compared_with_those_of_the_original(model, exported, data, tmp_path, dtype):
    name = str(dtype).removeprefix("torch.")
    run(exported, data, "--method", "prune", "--keep", 0.5, "--dtype", name, "--out", tmp_path)
    record, points = points_in(tmp_path)
    assert record["dtype"] == name
    original = copy.deepcopy(model).to(dtype)
    smaller = copy.deepcopy(original)
    usage = measure_usage(smaller, [images_in(data / "train")[0].to(dtype)])
    prune(smaller, usage, 16, 16, 64)
    images, labels = images_in(data / "val")
    expected, scores = (each(images.to(dtype)).float() for each in (original, smaller))
    dense, point = points["dense", 1], points["prune", 0.5]
    change = scores - expected
    assert point["correct"] == int((scores.argmax(-1) == labels).sum())
    same = (scores.argmax(-1) == expected.argmax(-1)).float().mean().item()
    assert point["agreement"] == pytest.approx(100 * same)
    assert point["deviation"] == pytest.approx((change.norm() / expected.norm()).item(), 1e-3)
    assert point["largest_change"] == pytest.approx(change.abs().max().item(), 1e-3)
    size = sum(each.nbytes for each in (*original.parameters(), *original.buffers()))
    assert point["bytes"] < dense["bytes"] == size


def test_real_images(shared_data, tmp_path):
    classes = sorted(shared_data("imagenet_samples/val").iterdir())[:24]
    for split, folders in (("train", classes[:12]), ("val", classes[12:])):
        (tmp_path / split).mkdir()
        for folder in folders:
            (tmp_path / split / folder.name).symlink_to(folder.resolve())
    save_model(build(num_classes=12), tmp_path / "run")
    run(tmp_path / "run", tmp_path, "--method", "prune", "top-k", "--out", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["images"] == record["measured_images"] == 12
    assert len(record["points"]) == 7
