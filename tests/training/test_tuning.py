"""Tuning trains only the stated parameters, and its result is a plain timm model."""

import shutil

import pytest
import timm
import torch
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from safetensors.torch import load_file, save_file

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import load_config

SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
TOKENFORMER = {"model_name": "tokenformer_tiny", **SIZES}
VIT = {"model_name": "vit_tiny_patch16_224", **SIZES}
GROWTH = {
    "num_qkv_param_tokens": 28,
    "num_proj_param_tokens": 26,
    "num_ffn_param_tokens": 100,
    "freeze": "old",
}


def of_timm(**model):
    return {"type": "TimmClassificationBackbone", **model}


def build(backbone):
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        return MODELS.build(
            {
                "type": "ImageClassifier",
                "backbone": backbone,
                "head": {"type": "LinearClsHead", "num_classes": 3, "in_channels": 24},
            }
        )


def trained(classifier):
    return {name for name, parameter in classifier.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("model", [TOKENFORMER, VIT], ids=["tokenformer", "vit"])
def test_of_a_frozen_backbone_the_head_alone_trains(model):
    assert trained(build(of_timm(**model, frozen=True))) == {"head.fc.weight", "head.fc.bias"}
    assert len(trained(build(of_timm(**model)))) > 10


def test_of_a_grown_backbone_the_new_pairs_and_the_head_train():
    classifier = build(of_timm(**TOKENFORMER, growth=GROWTH))
    names = trained(classifier)
    assert {name for name in names if ".new_" not in name} == {
        "head.fc.weight",
        "head.fc.bias",
    }
    count = sum(p.numel() for p in classifier.parameters() if p.requires_grad)
    assert count == 2 * 2 * 24 * (3 * 4 + 2 + 4) + 25 * 3


def test_new_pairs_are_those_of_the_runs_seed():
    def values(**own):
        torch.manual_seed(5)
        classifier = build(of_timm(**TOKENFORMER, growth={**GROWTH, **own}))
        return classifier.backbone.model.blocks[0].mlp.value_param_tokens[96:]

    assert torch.equal(values(), values(seed=5))
    assert not torch.equal(values(), values(seed=6))


def test_a_frozen_backbone_computes_in_training_as_in_validation():
    classifier = build(of_timm(**TOKENFORMER, frozen=True, drop_path_rate=0.5)).train()
    images = torch.randn(8, 3, 8, 8)
    assert classifier.head.training
    trained, measured = classifier.backbone(images), classifier.eval().backbone(images)
    assert torch.equal(trained[0], measured[0])


def test_pairs_that_could_not_learn_are_refused():
    with pytest.raises(InputError, match="set one of the two"):
        build(of_timm(**TOKENFORMER, frozen=True, growth=GROWTH))


def test_missing_weights_are_named():
    with pytest.raises(InputError, match=r"no checkpoint file nowhere\.safetensors"):
        build(of_timm(**TOKENFORMER, checkpoint_path="nowhere.safetensors"))


@pytest.mark.slow
def test_a_run_moves_nothing_else_and_goes_on_exactly(train, config, data_root, tmp_path):
    start = tmp_path / "start.safetensors"
    before = timm.create_model("tokenformer_tiny", num_classes=7, **SIZES).state_dict()
    save_file(before, start)
    own = tmp_path / "tuning.py"
    backbone = {
        "_delete_": True,
        **of_timm(**TOKENFORMER, growth=GROWTH, checkpoint_path=str(start)),
    }
    own.write_text(
        f"_base_ = {str(config)!r}\n"
        f"model = dict(backbone={backbone!r}, train_cfg=None)\n"
        "train_cfg = dict(max_epochs=2)\n"
    )
    train = train.of(own)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole)

    after = load_file(whole / "model.safetensors")
    assert after.keys() == before.keys()
    moved, grown = set(), set()
    for name, old in before.items():
        if not name.startswith("head."):
            if after[name].shape != old.shape:
                grown.add(name)
            if not torch.equal(after[name][: len(old)] if old.ndim else after[name], old):
                moved.add(name)
    assert not moved
    assert grown == {name for name in before if name.endswith("_param_tokens")}
    for name in grown:
        assert after[name][len(before[name]) :].abs().max() > 0, name
    assert after["head.weight"].abs().max() > 0  # it starts from zero

    # What is exported is the averaged model of the last checkpoint, of timm alone.
    classifier = build(load_config(own).model.backbone).eval()
    checkpoint = torch.load(whole / "epoch_2.pth", weights_only=True)
    classifier.load_state_dict(checkpoint["state_dict"])
    exported = timm.create_model(f"local-dir:{whole}", pretrained=True).eval()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(exported(images), classifier(images, mode="tensor"))

    resumed.mkdir()
    shutil.copy(whole / "epoch_1.pth", resumed)
    (resumed / "last_checkpoint").write_text("epoch_1.pth")
    train(resumed, "--resume")
    one, other = (
        torch.load(folder / "epoch_2.pth", weights_only=True) for folder in (whole, resumed)
    )
    for part in ("state_dict", "ema_state_dict"):
        assert one[part].keys() == other[part].keys()
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
