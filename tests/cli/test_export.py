"""Checkpoints go from timm to mmpretrain and back without a changed bit."""

import pytest
import timm
import torch
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS
from timm.data import resolve_input_data_config

from tokenformer_vit import training  # noqa: F401  # registers the backbone
from tokenformer_vit.cli import export
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.vision.prediction import class_names

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def run(*words):
    export.main([str(word) for word in words])


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("tokenformer_tiny", {"num_ffn_param_tokens": 40}),
        ("tokenformer_tiny", {"theta": "softmax", "norm": "bias"}),
        ("tokenformer_small_rope_reg4", {}),
        ("vit_tiny_patch16_224", {}),
    ],
)
@pytest.mark.parametrize("given", ["folder", "file"])
def test_timm_to_mmpretrain_and_back(name, kwargs, given, tmp_path, capsys):
    model = timm.create_model(name, **SHAPE, **kwargs, num_classes=3).eval()
    torch.nn.init.normal_(model.head.weight)
    save_model(model, tmp_path / "timm", ["ant", "bee", "cat"], {"mean": (0.1, 0.2, 0.3)})
    source = tmp_path / "timm" / ("" if given == "folder" else "model.safetensors")
    target = tmp_path / "new" / "start.pth"
    run(source, target)
    assert str(target) in capsys.readouterr().out

    backbone = {"type": "TimmClassificationBackbone", "model_name": name, **SHAPE, **kwargs}
    head = {"type": "mmpretrain.LinearClsHead", "num_classes": 3, "in_channels": 24}
    of_parts = {"type": "mmpretrain.ImageClassifier", "backbone": backbone, "head": head}
    classifier = MODELS.build(of_parts).eval()
    content = load_checkpoint(classifier, str(target), strict=True)
    assert content["meta"]["dataset_meta"]["classes"] == ["ant", "bee", "cat"]
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(classifier(images, mode="tensor"), model(images))

    run(target, tmp_path / "back")
    before, after = (tmp_path / folder / "model.safetensors" for folder in ("timm", "back"))
    assert before.read_bytes() == after.read_bytes()
    before, after = (load_model(None, path) for path in (before, after))
    assert resolve_input_data_config(before) == resolve_input_data_config(after)
    assert class_names(before) == class_names(after) == ["ant", "bee", "cat"]


def test_the_folder_gets_the_name_that_is_given(tmp_path):
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    model = timm.create_model("tokenformer_tiny", **shape, num_classes=10)
    save_model(model, tmp_path / "trained", data_config={"mean": (0.1, 0.2, 0.3)})
    source = tmp_path / "trained/model.safetensors"
    run(source, tmp_path / "out", "--model", "tokenformer_cifar10_micro")
    again = load_model(None, tmp_path / "out")
    assert again.pretrained_cfg["architecture"] == "tokenformer_cifar10_micro"
    assert tuple(again.pretrained_cfg["mean"]) == (0.1, 0.2, 0.3)
    tensors = model.state_dict()
    assert all(torch.equal(tensors[name], each) for name, each in again.state_dict().items())


def test_what_is_no_classifier_or_stands_there_already(tmp_path):
    save_model(timm.create_model("tokenformer_tiny", **SHAPE, num_classes=0), tmp_path / "timm")
    with pytest.raises(InputError, match="no linear head"):
        run(tmp_path / "timm", tmp_path / "start.pth")
    assert not (tmp_path / "start.pth").exists()
    (tmp_path / "there.pth").write_text("mine")
    with pytest.raises(InputError, match=r"there\.pth already exists; choose"):
        run(tmp_path / "timm", tmp_path / "there.pth")
    assert (tmp_path / "there.pth").read_text() == "mine"
