"""Configs of mmpretrain train by their path, as they are."""

import json
from pathlib import Path

import mmpretrain
import numpy as np
import pytest
from PIL import Image

CONFIGS = Path(mmpretrain.__file__).parent / ".mim" / "configs"
# Only what makes a run short: length, schedule, batch and processes.
SHORT = ("train_cfg.max_epochs=1", "param_scheduler=[]", "train_dataloader.num_workers=0")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Images of a few of ImageNet's classes, with lists of them as ImageNet's meta/ has."""
    root, rng = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    (root / "meta").mkdir()
    for split, count in (("train", 4), ("val", 2)):
        (root / split).mkdir()
        for index in range(count):
            pixels = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / f"{index}.JPEG")
        lines = "".join(f"{index}.JPEG {7 * index}\n" for index in range(count))
        (root / "meta" / f"{split}.txt").write_text(lines)
    return root


@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v2/mobilenet-v2_8xb32_in1k",
        pytest.param("deit/deit-tiny_4xb256_in1k", marks=slow),
        pytest.param("resnet/resnet50_8xb32_in1k", marks=slow),
        pytest.param("swin_transformer/swin-tiny_16xb64_in1k", marks=slow),
        pytest.param("convnext/convnext-tiny_32xb128_in1k", marks=slow),
        pytest.param("vision_transformer/vit-base-p16_32xb128-mae_in1k", marks=slow),
        pytest.param("mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k", marks=slow),
    ],
)
def test_a_config_of_mmpretrain_trains_as_it_is(name, imagenet, tmp_path, command):
    words = ["--data-root", imagenet, "--work-dir", tmp_path, "--batch-size", 2]
    words += ["--amp"] if "amp" in name else []  # mmengine's own autocast needs a GPU
    words += ["--cfg-options", *SHORT]
    words += [] if "mae_vit" in name else ["val_dataloader.num_workers=0"]
    done = command("train", CONFIGS / f"{name}.py", *words)
    assert done.status == 0, done.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["iterations"] == 2
    assert "not a model of timm" in record["not_exported"]
    assert (tmp_path / "epoch_1.pth").is_file()
    words.insert(0, "--resume")
    assert "Epoch(train)" not in command("train", CONFIGS / f"{name}.py", *words).output
    if "mae_vit" in name:
        return
    words = ["--data-root", imagenet, "--cfg-options", "test_dataloader.num_workers=0"]
    done = command("test", CONFIGS / f"{name}.py", tmp_path / "epoch_1.pth", *words)
    assert done.status == 0, done.output
    measured = json.loads((tmp_path / "test" / "metrics.json").read_text())
    assert measured["metrics"]["accuracy/top1"] == record["accuracy/top1"]
