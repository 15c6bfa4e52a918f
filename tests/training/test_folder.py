"""A folder of images is enough for a first run, and the config that it writes for the next one."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from mmpretrain.registry import DATASETS, MODELS
from safetensors.torch import load_file
from timm.models import VisionTransformer

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.training.config import load_config, read_config
from tokenformer_vit.training.folder import Start, configure_folder

from ..samples import write_images

SHORT = ("--epochs", 2, "--cfg-options", "default_hooks.logger.interval=7")
SHORT += ("train_dataloader.num_workers=0", "val_dataloader.num_workers=0")
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


@pytest.fixture
def train(command):
    def run(folder, work_dir, *words):
        done = command("train", folder, "--work-dir", work_dir, *words, *SHORT)
        assert done.status == 0, done.output
        return done.output

    return run


@pytest.fixture
def exported(tmp_path):
    model = timm.create_model("tokenformer_tiny", **SIZES, num_classes=5)
    folder = tmp_path / "exported"
    how = {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.8, "interpolation": "bilinear"}
    save_model(model, folder, list("abcde"), how)
    return folder


def test_a_folder_trains_and_a_run_is_resumed_but_not_replaced(data_root, tmp_path, train, command):
    folder = tmp_path / "first"
    output = train(data_root, folder)
    assert json.loads((folder / "record.json").read_text())["train_images"] == 48
    config = folder / f"{data_root.name}.py"
    assert str(config) in output
    cfg = load_config(config)
    assert (cfg.model.head.num_classes, cfg.model.backbone.img_size) == (3, 8)
    assert (cfg.train_cfg.max_epochs, cfg.default_hooks.logger.interval) == (2, 7)
    assert config.read_text().startswith("# ")  # as the folder's own config
    assert command("test", folder).status == 0

    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    done = command("train", data_root, "--work-dir", folder)
    assert done.status == 2
    assert "--resume" in done.err
    # Nothing of a refused command remains.
    assert before == {path: path.read_bytes() for path in before}
    weights = load_file(folder / "model.safetensors")
    for name in ("epoch_2.pth", "last_checkpoint", "model.safetensors"):
        (folder / name).unlink()
    train(data_root, folder, "--resume", folder / "epoch_1.pth")
    resumed = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    cfg = read_config(config)  # a copy of it starts a new run
    assert (cfg.resume, cfg.load_from, cfg.get("work_dir")) == (False, None, None)


def test_the_same_command_resumes_a_run_whatever_it_started_from(data_root, tmp_path):
    """The run prints "to resume: the same command with --resume"."""
    fine_tuning = Start(checkpoint=Path("tokenformer_cifar10_micro"), freeze=True)
    path = configure_folder(data_root, tmp_path / "tuned", fine_tuning, None)
    backbone = load_config(path).model.backbone
    assert backbone.model_name == "tokenformer_cifar10_micro"
    assert Path(backbone.checkpoint_path).is_file()
    for start in (fine_tuning, Start()):
        assert configure_folder(data_root, tmp_path / "tuned", start, "auto") == path
    for other in (Start("vit_tiny_patch16_224"), Start(checkpoint=tmp_path / "other")):
        with pytest.raises(InputError, match="leave --model, --checkpoint"):
            configure_folder(data_root, tmp_path / "tuned", other, "auto")


@pytest.mark.parametrize(
    "key", ["a': open({!r}, 'w'), 'b", "a': 1}})\nopen({!r}, 'w')\nx = dict({{'b"]
)
def test_arguments_in_a_checkpoint_cannot_become_code(key, data_root, tmp_path):
    """A ViT without blocks builds no activation, so timm accepts any value for it."""
    folder, sign = tmp_path / "exported", tmp_path / "sign"
    vit = timm.create_model("vit_tiny_patch16_224", depth=0, img_size=16, patch_size=8)
    save_model(vit, folder)
    description = json.loads((folder / "config.json").read_text())
    description["model_args"]["act_layer"] = {key.format(str(sign)): 1}
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match="trust"):
        configure_folder(data_root, tmp_path / "run", Start(checkpoint=folder), None)
    assert not sign.exists()
    assert not (tmp_path / "run" / f"{data_root.name}.py").exists()


@pytest.mark.parametrize("freeze", [False, True])
def test_fine_tuning_starts_from_weights_and_prepares_images_as_they_were(
    freeze, exported, tmp_path, generator, train
):
    folder = write_images(tmp_path / "photos", (40, 50), {"cat": 6, "dog": 6}, generator)
    checkpoint = exported if freeze else exported / "model.safetensors"
    words = ["--checkpoint", checkpoint, *(["--freeze"] if freeze else [])]
    train(folder, tmp_path / "run", *words)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["label_names"] == ["cat", "dog"]
    described = config["pretrained_cfg"]
    assert described["mean"] == pytest.approx((0.1, 0.2, 0.3))
    assert described["input_size"] == [3, 16, 16]
    assert described["crop_pct"] == pytest.approx(0.8)
    assert described["interpolation"] == "bilinear"
    before, after = (load_file(each / "model.safetensors") for each in (exported, tmp_path / "run"))
    assert after["head.weight"].shape == (2, 24)
    same = [torch.equal(after[name], before[name]) for name in before if "token" in name]
    assert all(same) if freeze else not all(same)
    assert freeze or max((after[n] - before[n]).abs().max() for n in before if "token" in n) < 0.01


def test_a_grey_model_sees_grey_images_in_training_and_everywhere(
    tmp_path, generator, train, command
):
    folder = tmp_path / "photos"
    for split, counts in (("train", {"cat": 8, "dog": 8}), ("val", {"cat": 8})):
        write_images(folder / split, (24, 24), counts, generator)
    model = timm.create_model("tokenformer_tiny", **{**SIZES, "img_size": 24}, in_chans=1)
    how = {"mean": (0.4,), "std": (0.2,), "crop_pct": 1.0}
    save_model(model, tmp_path / "grey", None, how)
    train(folder, tmp_path / "run", "--checkpoint", tmp_path / "grey")
    model = load_model(None, tmp_path / "run")
    with torch.no_grad():  # trained for a moment, it would say the same of every image
        model.head.weight.normal_(0, 0.1)
    save_model(model, tmp_path / "run")
    assert command("test", tmp_path / "run/photos.py", tmp_path / "run").status == 0
    with (tmp_path / "run/test/predictions.csv").open() as file:
        tested = {Path(row["path"]).name: row for row in csv.DictReader(file)}
    done = command("predict", folder / "val", "--checkpoint", tmp_path / "run", "--json")
    assert len(tested) == len(done.out.splitlines()) == 8
    for answer in map(json.loads, done.out.splitlines()):
        row = tested[Path(answer["file"]).name]
        probability = {each["label"]: each["probability"] for each in answer["top"]}
        # torchvision's grey may be one level of 255 darker than Pillow's.
        assert float(row["score"]) == pytest.approx(probability[row["predicted"]], abs=0.02)
    assert len({row["score"] for row in tested.values()}) == 8


@pytest.mark.parametrize(
    ("size", "side", "recipe"),
    [
        ((15, 40), 12, "digits_demo"),
        ((28, 28), 32, "cifar10_tiny"),
        ((300, 400), 128, "imagenette_tiny"),
    ],
)
def test_the_size_of_the_images_chooses_the_recipe(size, side, recipe, tmp_path, generator, capsys):
    folder = write_images(tmp_path / "photos", size, {"cat": 3, "dog": 3}, generator)
    path = configure_folder(folder, tmp_path / "run", Start(), None)
    assert f"the recipe of {recipe} for" in capsys.readouterr().out
    cfg = load_config(path)
    assert cfg.model.backbone.img_size == side
    assert cfg.model.backbone.embed_dim == 96  # few images
    for loader in (cfg.train_dataloader, cfg.test_dataloader):
        assert re.search(rf"size': (\(3, {side}, )?{side}\b", str(loader.dataset.pipeline))
    assert (cfg.train_dataloader.batch_size, cfg.default_hooks.logger.interval) == (8, 1)


def test_the_config_is_short_and_names_change_nothing_in_it(tmp_path, generator):
    """mmengine replaces ``{{...}}`` in a config by values."""
    names = ("cat", "{{HOME:x}}", "class 1")
    folder = write_images(tmp_path / "{{photos}}", (8, 8), dict.fromkeys(names, 2), generator)
    path = configure_folder(folder, tmp_path / "run", Start(), None)
    lines = [line for line in path.read_text().splitlines() if re.match(r"[a-z_]+ = ", line)]
    assert len(lines) < 15
    cfg = load_config(path)
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    assert dataset.metainfo["classes"] == tuple(sorted(names))
    assert dataset[0]["inputs"].shape == (3, 8, 8)


def test_a_part_of_each_class_is_held_out_and_nothing_is_moved(tmp_path, generator):
    counts = {"cat": 10, "a dog": 7, "eel": 2}
    folder = write_images(tmp_path / "photos", (20, 30), counts, generator)
    before = {path: path.read_bytes() for path in folder.rglob("*.png")}
    path = configure_folder(folder, tmp_path / "run", Start(), None)
    lists = [(tmp_path / "run" / f"{split}.txt").read_text() for split in ("train", "val")]
    listed = [line.rsplit(" ", 1) for text in lists for line in text.splitlines()]
    for file, label in listed:
        assert file.split("/")[0] == ["a dog", "cat", "eel"][int(label)]
    assert sorted(file for file, _ in listed) == sorted(str(p.relative_to(folder)) for p in before)
    assert {path: path.read_bytes() for path in folder.rglob("*.png")} == before
    # The baseline is tested with the same images.
    path = configure_folder(folder, tmp_path / "vit", Start("vit_tiny_patch16_224"), None)
    assert (tmp_path / "vit" / "val.txt").read_text() == lists[1]
    with torch.device("meta"):
        backbone = MODELS.build(load_config(path).model.backbone)
    assert isinstance(backbone.model, VisionTransformer)
    assert backbone.model.patch_embed.patch_size == (4, 4)


@pytest.mark.parametrize(
    ("validated", "tested"), [("val", "testing"), ("validation", "test"), ("test", None)]
)
def test_sets_for_validation_and_test_may_lack_a_class(validated, tested, data_root, tmp_path):
    folder = shutil.copytree(data_root, tmp_path / "photos")
    if tested:
        shutil.copytree(folder / "val" / "dark", folder / tested / "dark")
    shutil.rmtree(folder / "val" / "bright")
    (folder / "val").rename(folder / validated)
    cfg = load_config(configure_folder(folder, tmp_path / "run", Start(), None))
    for loader, name, classes in (
        (cfg.val_dataloader, validated, {"dark 1", "split 2"}),
        (cfg.test_dataloader, tested or validated, {"dark 1"} if tested else {"dark 1", "split 2"}),
    ):
        lines = Path(loader.dataset.ann_file).read_text().splitlines()
        assert {line.split("/")[0] for line in lines} == {name}
        assert {line.split("/")[1] + line[-2:] for line in lines} == classes
    assert cfg.test_dataloader.dataset.pipeline == cfg.val_dataloader.dataset.pipeline


def test_one_image_of_each_class_is_for_both_and_what_to_expect_is_said(
    tmp_path, generator, capsys
):
    folder = write_images(tmp_path / "photos", (8, 8), {"cat": 1, "dog": 1}, generator)
    cfg = load_config(configure_folder(folder, tmp_path / "run", Start(), None))
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        assert len(DATASETS.build(loader.dataset)) == 2
    said = capsys.readouterr().out
    assert "No image can be held out: accuracy is that on the training images" in said
    assert "weights are random. With few images, fine-tune: --checkpoint tokenformer_ci" in said


def test_what_cannot_be_trained(data_root, tmp_path):
    folder = shutil.copytree(data_root, tmp_path / "photos")

    def refused(said, work_dir=tmp_path / "run", **start):
        with pytest.raises(InputError, match=said):
            configure_folder(folder, work_dir, Start(**start), None)
        assert not (tmp_path / "run").exists()

    refused("--checkpoint", freeze=True)
    refused("no linear classifier", model="swin_tiny_patch4_window7_224")
    refused("is among the classes of", folder / "val" / "work_dirs")
    (folder / "val" / "dark").rename(folder / "val" / "dork")
    refused("val has classes that train lacks: dork")
    shutil.rmtree(folder / "val")
    (folder / "train").rename(folder / " train")
    shutil.copytree(data_root / "train/dark", folder / "dark")
    refused("rename ' train/bright/0.png': no space first")


def test_the_recipe_of_the_digits_is_that_of_their_config(tmp_path, generator):
    folder = tmp_path / "digits"
    for split, count in (("train", 144), ("val", 36)):
        write_images(folder / split, (8, 8), {str(n): count for n in range(10)}, generator)
    cfg = load_config(configure_folder(folder, tmp_path / "run", Start(), None))
    expected = load_config("digits_demo")
    for key in ("optim_wrapper", "param_scheduler", "train_cfg", "data_preprocessor"):
        assert cfg[key] == expected[key], key
    assert cfg.default_hooks.ema == expected.default_hooks.ema
    for part in ("backbone", "head"):
        assert cfg.model[part] == expected.model[part]
    assert cfg.train_dataloader.batch_size == expected.train_dataloader.batch_size
