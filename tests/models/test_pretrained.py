"""The trained model in the package: it loads offline and behaves as timm's pretrained models do."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.data import resolve_input_data_config
from timm.layers import resample_abs_pos_embed

import tokenformer_vit
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.vision.prediction import class_names

FOLDER = Path(tokenformer_vit.__file__).parent / "models/pretrained"
RECORDS = Path(__file__).resolve().parents[2] / "configs/results"
# Name, record, parameters, first convolution, and shape of its features.
MODELS = {
    "tokenformer_cifar10_micro": ("cifar10_micro_pretrained", 611_242, "proj", (2, 96, 4, 4)),
    "tokenformer_cifar10_stem": ("cifar10_stem_adamw", 590_618, "proj.1", (2, 128, 8, 8)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def create(name, **kwargs):
    return timm.create_model(name, pretrained=True, **kwargs).eval()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("the weights are in the package")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@each_model
def test_timm_and_the_exported_folder_give_the_same_model(name, images):
    model, exported = create(name), load_model(None, FOLDER / name)
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name][1]
    stored = load_file(FOLDER / name / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    own, its = (resolve_input_data_config(each) for each in (model, exported))
    assert its == own
    assert class_names(model) == class_names(exported)
    x = images(32)
    assert torch.equal(model(x), exported(x))


@each_model
def test_other_heads_channels_sizes_and_features(name, images):
    model, (_, _, first, shape) = create(name), MODELS[name]
    other: Any = create(name, num_classes=100, in_chans=1, img_size=64)
    assert other(images(64, channels=1)).shape == (2, 100)
    weights, new = (each.patch_embed.get_submodule(first).weight for each in (model, other))
    torch.testing.assert_close(new, weights.sum(1, keepdim=True))
    size, prefix = [*other.patch_embed.grid_size], model.num_prefix_tokens
    positions = resample_abs_pos_embed(model.pos_embed, size, None, prefix)
    for each in (other, load_model(None, FOLDER / name, img_size=64)):
        torch.testing.assert_close(each.pos_embed, positions)
    old, new = (dict(each.blocks.named_parameters()) for each in (model, other))
    assert all(torch.equal(old[name], new[name]) for name in old)
    maps = create(name, features_only=True)(images(32))
    assert [tuple(each.shape) for each in maps] == [shape] * 3


@each_model
def test_the_card_has_the_accuracy_of_the_record(name):
    record = json.loads((RECORDS / f"{MODELS[name][0]}.json").read_text())
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    assert f"{record['accuracy/top1']:.4g} %" in card
