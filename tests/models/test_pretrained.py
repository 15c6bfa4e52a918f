"""The trained model in the package: it loads offline and behaves as timm's pretrained models do."""

import io
import json
import socket
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_input_data_config

import tokenformer_vit
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.vision.prediction import class_names

NAME = "tokenformer_cifar10_micro"
FILE = Path(tokenformer_vit.__file__).parent / f"models/pretrained/{NAME}/model.safetensors"
RECORD = Path(__file__).resolve().parents[2] / "configs/results/cifar10_micro_pretrained.json"


def create(**kwargs):
    return timm.create_model(NAME, pretrained=True, **kwargs).eval()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("the weights are in the package")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_timm_and_the_exported_folder_give_the_same_model(images):
    model, exported = create(), load_model(None, FILE.parent)
    assert sum(parameter.numel() for parameter in model.parameters()) == 611_242
    stored = load_file(FILE)
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    own, its = (resolve_input_data_config(each) for each in (model, exported))
    assert its == own
    assert class_names(model) == class_names(exported)
    x = images(32)
    assert torch.equal(model(x), exported(x))


def test_other_heads_channels_sizes_and_features(images):
    model = create()
    weights = model.patch_embed.proj.weight
    other = create(num_classes=100, in_chans=1, img_size=64)
    assert other(images(64, channels=1)).shape == (2, 100)
    torch.testing.assert_close(other.patch_embed.proj.weight, weights.sum(1, keepdim=True))
    old, new = (dict(each.blocks.named_parameters()) for each in (model, other))
    assert all(torch.equal(old[name], new[name]) for name in old)
    maps = create(features_only=True)(images(32))
    assert [tuple(each.shape) for each in maps] == [(2, 96, 4, 4)] * 3


def test_accuracy_on_test_images(shared_data):
    parquet = pytest.importorskip("pyarrow.parquet")
    file = shared_data("cifar10/plain_text/test-00000-of-00001.parquet")
    rows = parquet.ParquetFile(file).read_row_group(0).slice(0, 500).to_pylist()
    model = create()
    transform = create_transform(**resolve_input_data_config(model))
    pictures = [transform(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows]
    with torch.inference_mode():
        answers = model(torch.stack(pictures)).argmax(-1)
    right = (answers == torch.tensor([row["label"] for row in rows])).float().mean().item()
    expected = json.loads(RECORD.read_text())["accuracy/top1"] / 100
    assert right == pytest.approx(expected, abs=0.06)  # three standard errors of 500 images


def test_the_card_has_the_record_s_accuracy():
    card = (FILE.parent / "README.md").read_text(encoding="utf-8")
    assert f"{json.loads(RECORD.read_text())['accuracy/top1']:.4g} %" in card
