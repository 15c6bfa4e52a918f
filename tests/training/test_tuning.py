"""Tuning trains only the stated parameters, and its result is a plain timm model."""

import pytest
import timm
import torch
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from safetensors.torch import load_file, save_file

from tokenformer_vit.errors import InputError

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
def test_a_run_moves_nothing_else(train, config, data_root, tmp_path):
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
    train(tmp_path / "run")

    after = load_file(tmp_path / "run" / "model.safetensors")
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
