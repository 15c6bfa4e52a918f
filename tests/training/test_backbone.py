"""A classifier with our backbone has the outputs of its timm model, and is exported as it."""

import pytest
import timm
import torch
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmpretrain.registry import MODELS
from timm.data import resolve_model_data_config
from timm.optim import param_groups_layer_decay

from tokenformer_vit.errors import InputError
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.export import (
    as_timm_model,
    export_classifier,
    preprocessing,
    resizes_with_opencv,
)

pytestmark = pytest.mark.usefixtures("scope")
SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2}
BACKBONES = {
    "default": {"model_name": "tokenformer_tiny"},
    "softmax": {"model_name": "tokenformer_tiny", "theta": "softmax", "norm": "bias"},
    "shared": {
        "model_name": "tokenformer_tiny",
        "theta": "gelu_l1",
        "pattention_args": ConfigDict(learn_tau=True, eps=1e-3, key_init_std=0.5),
    },
    "vit5": {"model_name": "tokenformer_small_rope_reg4", "global_pool": "avg"},
    "distilled": {"model_name": "tokenformer_small_distilled"},
    "ordinary": {"model_name": "vit_tiny_patch16_224"},  # of timm, without a TokenFormer in it
}


TOKENFORMER = BACKBONES["default"]
GROWTH = {
    **{"num_qkv_param_tokens": 28, "num_proj_param_tokens": 26, "num_ffn_param_tokens": 100},
    "freeze": "old",
}


def build_untouched(drop_path_rate=0.2, **backbone):
    backbone = {**SIZES, "drop_path_rate": drop_path_rate, **backbone}
    distilled = backbone["model_name"].endswith("_distilled")
    head = {"type": "DistilledHead" if distilled else "LinearClsHead", "num_classes": 5}
    parts = {
        "backbone": {"type": "TimmClassificationBackbone", **backbone},
        "head": {**head, "in_channels": 24},
    }
    return MODELS.build({"type": "ImageClassifier", **parts})


def build(**backbone):
    """Build a classifier whose parameters are all random; none is zero or one."""
    classifier = build_untouched(**backbone)
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return classifier


@pytest.fixture(params=BACKBONES.values(), ids=BACKBONES)
def backbone(request):
    return request.param


def test_layer_wise_learning_rates_are_timms(backbone):
    classifier = build(**backbone)
    wrapper = {
        "type": "OptimWrapper",
        "optimizer": {"type": "AdamW", "lr": 1e-3, "weight_decay": 0.1},
        "constructor": "LearningRateDecayOptimWrapperConstructor",
        "paramwise_cfg": {"layer_decay_rate": 0.5},
    }
    optimizer = build_optim_wrapper(classifier, wrapper).optimizer
    rates = {group["param_name"]: group["lr"] for group in optimizer.param_groups}
    assert set(rates) == {name for name, _ in classifier.named_parameters()}

    model = as_timm_model(classifier)
    scales = {
        id(parameter): group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.5)
        for parameter in group["params"]
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {names[key]: 1e-3 * scale for key, scale in scales.items()}
    assert timm_state_dict(rates) == pytest.approx(expected)


@pytest.fixture
def cfg(config):
    cfg = load_config(config)
    # Unlike in this config, and unlike timm's defaults.
    step = cfg.test_dataloader.dataset.pipeline[1]
    step.update(input_size=(3, 16, 16), crop_pct=0.8, interpolation="bilinear")
    cfg.data_preprocessor.update(mean=[51.0, 102.0, 127.5], std=[25.5, 51.0, 76.5])
    return cfg


def test_a_resize_and_a_crop_are_exported(cfg):
    expected = preprocessing(cfg)
    resize = {"type": "ResizeEdge", "scale": 20, "interpolation": "bilinear"}
    pipeline = cfg.test_dataloader.dataset.pipeline
    pipeline[1:2] = [resize, {"type": "CenterCrop", "crop_size": 16}]
    assert preprocessing(cfg) == expected
    assert resizes_with_opencv(cfg)  # and the exported model with Pillow, so there is a warning
    assert (expected["crop_pct"], expected["input_size"]) == (0.8, (3, 16, 16))
    pipeline[1:3] = [{"type": "Resize", "scale": (24, 16)}]  # width, height
    assert preprocessing(cfg)["input_size"] == (3, 16, 24)
    pipeline[1]["keep_ratio"] = True
    with pytest.raises(InputError, match=r"no such test pipeline \(Resize\)"):
        preprocessing(cfg)
    pipeline[:2] = [{"type": "LoadImageFromFile"}]
    with pytest.raises(InputError, match="BGR"):
        preprocessing(cfg)


def test_the_exported_folder_is_the_model(backbone, tmp_path, cfg):
    images = torch.randn(4, 3, 16, 16)
    classifier = build(**backbone).eval()
    names = ["ant", "bee", "cat", "dog", "eel"]
    export_classifier(classifier, cfg, {"classes": tuple(names)}, tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == names
    found = resolve_model_data_config(model)
    assert found["mean"] == pytest.approx((0.2, 0.4, 0.5))
    assert found["std"] == pytest.approx((0.1, 0.2, 0.3))
    how = (found["input_size"], found["crop_pct"], found["interpolation"])
    assert how == ((3, 16, 16), 0.8, "bilinear")
    with torch.no_grad():
        logits = classifier(images, mode="tensor")
        torch.testing.assert_close(model(images), logits)
        features = torch.stack(classifier.backbone(images)).mean(dim=0)  # of one or two tokens
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
        torch.testing.assert_close(features, expected)
    assert logits.std(dim=0).min() > 1e-3  # every logit depends on the image


def trained(classifier):
    return {name for name, parameter in classifier.named_parameters() if parameter.requires_grad}


def test_of_a_grown_backbone_the_new_pairs_and_the_head_train():
    classifier = build_untouched(**TOKENFORMER, growth=GROWTH)
    old = {name for name in trained(classifier) if ".new_" not in name}
    assert old == {"head.fc.weight", "head.fc.bias"}
    count = sum(p.numel() for p in classifier.parameters() if p.requires_grad)
    assert count == 3 * 2 * 24 * (3 * 4 + 2 + 4) + 25 * 5
    values = []
    for growth in (GROWTH, {**GROWTH, "seed": 5}):
        torch.manual_seed(5)  # of the run
        grown = build_untouched(**TOKENFORMER, growth=growth).backbone.model
        values.append(grown.blocks[0].mlp.value_param_tokens[96:])
    assert torch.equal(*values)


def test_a_frozen_backbone_computes_in_training_as_in_validation():
    classifier = build_untouched(**TOKENFORMER, frozen=True, drop_path_rate=0.5).train()
    assert trained(classifier) == {"head.fc.weight", "head.fc.bias"}
    images = torch.randn(8, 3, 16, 16)
    assert classifier.head.training
    in_training, measured = classifier.backbone(images), classifier.eval().backbone(images)
    assert torch.equal(in_training[0], measured[0])


def test_the_norm_of_a_linear_probe_becomes_a_part_of_its_head():
    head = torch.nn.Linear(4, 3).double()
    for affine in (False, True):
        norm = torch.nn.BatchNorm1d(4, eps=1e-6, affine=affine).double()
        for tensor in norm.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2)
        named = {f"head.fc.{name}": each for name, each in head.state_dict().items()}
        named |= {f"neck.bn.{name}": each for name, each in norm.state_dict().items()}
        folded = timm_state_dict({**named, "backbone.model.x": torch.ones(1)})
        x = torch.randn(5, 4).double()
        found = torch.nn.functional.linear(x, folded["head.weight"], folded["head.bias"])
        torch.testing.assert_close(found, head(norm.eval()(x)))
