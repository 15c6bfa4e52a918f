"""Pre-training by masked image modelling: what the encoder sees, the loss, and whole runs."""

import json
import math
import shutil

import pytest
import timm
import torch
from mmengine.registry import DefaultScope
from mmpretrain.models import MAE as StockMAE
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from safetensors.torch import load_file
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.export import as_timm_model
from tokenformer_vit.training.models.mae import MaskedAutoencoder
from tokenformer_vit.training.reports import read_scalars

TOKENFORMER = {
    "type": "TimmClassificationBackbone",
    "model_name": "tokenformer_tiny",
    **{"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2},
}
VIT = {**TOKENFORMER, "model_name": "vit_tiny_patch16_224"}
SHAPE = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
NECK = {"type": "MAEPretrainDecoder", **SHAPE}
LOSS = {"type": "PixelReconstructionLoss", "criterion": "L2"}
HEAD = {"type": "MAEPretrainHead", "norm_pix": True, "loss": LOSS}


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def build(backbone=TOKENFORMER, head=HEAD, **kwargs):
    model = MaskedAutoencoder(backbone, NECK, head, **kwargs)
    model.neck.init_weights()  # positions and mask token
    return model.double()


def images(number=5):
    return torch.randn(number, 3, 16, 16, dtype=torch.float64)


@pytest.mark.parametrize("backbone", [TOKENFORMER, VIT, {**VIT, "reg_tokens": 3}])
def test_the_blocks_see_only_the_class_token_and_the_visible_patches(backbone):
    model, seen = build(backbone), []
    vit = model.backbone.model
    for block in vit.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    x = images()
    encoded, mask, restore = model.encode(x)
    assert seen == [vit.num_prefix_tokens + 4] * 2  # a quarter of 16 patches
    assert encoded.shape == (5, 1 + 4, 24)
    assert mask.sum(dim=1).tolist() == [12] * 5
    # The first four places of the decoder's order are the visible patches.
    assert torch.equal(mask, (restore >= 4).double())
    # What is masked cannot change what is encoded.
    model.eval()
    before, mask, _ = model.encode(x)
    hidden = mask.view(5, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3).bool()
    assert torch.equal(model.encode(x.masked_fill(hidden, 7.0))[0], before)
    assert not torch.allclose(model.encode(x.masked_fill(~hidden, 7.0))[0], before)


def test_with_all_patches_visible_the_encoder_is_the_timm_model():
    model, x = build(), images()
    model._num_visible = 16
    encoded, _, restore = model.encode(x)
    order = torch.cat([torch.zeros(5, 1, dtype=torch.long), 1 + restore], dim=1)
    tokens = encoded.take_along_dim(order[:, :, None], dim=1)
    torch.testing.assert_close(tokens, model.backbone.model.forward_features(x))


def stock_mae(model):
    """mmpretrain's own MAE with the weights of a masked autoencoder around timm's ViT."""
    arch = {"embed_dims": 24, "num_layers": 2, "num_heads": 2, "feedforward_channels": 96}
    backbone = {"type": "MAEViT", "arch": arch, "img_size": 16, "patch_size": 4}
    sizes = {"patch_size": 4, "num_patches": 16, "embed_dim": 24}
    stock = StockMAE(backbone, {**NECK, **sizes}, {**HEAD, "patch_size": 4})
    names = {
        "blocks.": "layers.",
        "mlp.fc1": "ffn.layers.0.0",
        "mlp.fc2": "ffn.layers.1",
        "norm": "ln",
        "patch_embed.proj": "patch_embed.projection",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        new = name.replace("backbone.model.norm", "backbone.ln1").replace(".model.", ".")
        if new.startswith("backbone."):
            for old, other in names.items():
                new = new.replace(old, other)
        weights[new] = tensor
    stock.load_state_dict(weights)
    return stock.double()


def test_the_loss_is_that_of_mmpretrains_mae(seed):
    model = build(VIT)
    stock, x = stock_mae(model), images()
    losses = []
    for each in (model, stock):
        torch.manual_seed(seed)  # the same masks
        losses.append(each.loss(x, None)["loss"])
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(
        model.backbone.model.patch_embed.proj.weight.grad,
        stock.backbone.patch_embed.projection.weight.grad,
    )


@pytest.mark.parametrize("pool", ["token", "avg"])  # the norm is before or after the pooling
def test_positions_are_fixed_and_every_other_parameter_learns(pool):
    model = build({**TOKENFORMER, "global_pool": pool})
    model.loss(images())["loss"].backward()
    fixed = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert fixed == {"backbone.model.pos_embed", "neck.decoder_pos_embed"}
    for name, value in model.named_parameters():
        assert name in fixed or value.grad.abs().sum() > 0, name
    positions = model.backbone.model.pos_embed[0]
    assert not positions[0].any()  # of the class token
    norms = positions[1:].norm(dim=1)  # a sine and a cosine for each frequency
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(12)))
    assert len(positions.unique(dim=0)) == 17


def test_masks_follow_the_seed_in_training_and_the_image_in_evaluation(seed):
    model, x = build(), images()

    def masks():
        return model.encode(x)[1]

    first, second = masks(), masks()
    assert not torch.equal(first, second)
    torch.manual_seed(seed)
    third = masks()
    torch.manual_seed(seed)
    assert torch.equal(masks(), third)
    model.eval()
    state = torch.get_rng_state()
    fixed = masks()
    assert torch.equal(model.encode(x[2:], indices=range(2, 5))[1], fixed[2:])  # in any batch
    assert len(fixed.unique(dim=0)) > 1
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_of_each_image_averages_to_that_of_the_batch():
    model, x = build().eval(), images()
    samples = [DataSample(metainfo={"sample_idx": index}) for index in range(5)]
    losses = [sample["error"] for sample in model(x, samples, mode="predict")]
    torch.testing.assert_close(torch.stack(losses).mean(), model.loss(x)["loss"])
    torch.testing.assert_close(model(x[3:], samples[3:], mode="predict")[0]["error"], losses[3])


@pytest.mark.parametrize(
    ("backbone", "kwargs", "message"),
    [
        ({**VIT, "class_token": False, "global_pool": "avg"}, {}, "class token"),
        ({**VIT, "pos_embed": "none"}, {}, "position .*vit_base_patch16_224"),
        (VIT, {"train_cfg": {"augments": [{"type": "Mixup"}]}}, "train_cfg=None"),
    ],
)
def test_models_that_cannot_be_masked_are_refused(backbone, kwargs, message):
    with pytest.raises(InputError, match=message):
        build(backbone, **kwargs)


# The recipe of MAE as mmpretrain runs it, in tables 8 to 10 of arXiv:2111.06377.
RECIPE = {
    "mae_base_pretrain": {
        "model.mask_ratio": 0.75,
        "model.backbone.drop_path_rate": 0.0,
        "model.neck.decoder_embed_dim": 512,
        "model.neck.decoder_depth": 8,
        "model.neck.decoder_num_heads": 16,
        "model.neck.mlp_ratio": 4.0,
        "model.head.norm_pix": True,
        "model.head.loss.criterion": "L2",
        "model.train_cfg": None,
        "optim_wrapper.type": "AutocastOptimWrapper",
        "optim_wrapper.optimizer.type": "AdamW",
        "optim_wrapper.optimizer.lr": 1.5e-4 * 4096 / 256,
        "optim_wrapper.optimizer.betas": (0.9, 0.95),
        "optim_wrapper.optimizer.weight_decay": 0.05,
        "param_scheduler.0.end": 40,
        "param_scheduler.1.eta_min": 0.0,
        "train_cfg.max_epochs": 800,
        "auto_scale_lr.base_batch_size": 4096,
    },
    "mae_base_finetune": {
        "model.backbone.drop_path_rate": 0.1,
        "model.backbone.global_pool": "avg",
        "model.head.init_cfg.std": 2e-5,
        "model.head.loss.label_smooth_val": 0.1,
        "model.train_cfg.augments.0.alpha": 0.8,
        "model.train_cfg.augments.1.alpha": 1.0,
        "optim_wrapper.optimizer.type": "AdamW",
        "optim_wrapper.optimizer.lr": 2e-3,
        "optim_wrapper.optimizer.betas": (0.9, 0.999),
        "optim_wrapper.optimizer.weight_decay": 0.05,
        "optim_wrapper.paramwise_cfg.layer_decay_rate": 0.65,
        "param_scheduler.0.start_factor": 1e-4,
        "param_scheduler.0.end": 5,
        "param_scheduler.1.eta_min": 1e-6,
        "train_cfg.max_epochs": 100,
        "auto_scale_lr.base_batch_size": 1024,
    },
    "mae_base_linear": {
        "model.backbone.frozen": True,
        "model.backbone.drop_path_rate": 0.0,
        "model.neck.type": "ClsBatchNormNeck",
        "model.head.init_cfg.std": 0.01,
        "model.head.loss.type": "CrossEntropyLoss",
        "model.train_cfg": None,
        "optim_wrapper.optimizer.type": "LARS",
        "optim_wrapper.optimizer.lr": 6.4,
        "optim_wrapper.optimizer.momentum": 0.9,
        "optim_wrapper.optimizer.weight_decay": 0.0,
        "param_scheduler.0.end": 10,
        "param_scheduler.1.eta_min": 0.0,
        "train_cfg.max_epochs": 90,
        "auto_scale_lr.base_batch_size": 16384,
    },
}
CROPS = {"mae_base_pretrain": (0.2, 1.0), "mae_base_finetune": None, "mae_base_linear": None}


def value_of(cfg, key):
    for part in key.split("."):
        cfg = cfg[int(part)] if isinstance(cfg, list) else cfg[part]
    return cfg


@pytest.mark.parametrize("name", RECIPE)
def test_the_recipe_of_mae_value_by_value(name):
    cfg = load_config(f"{name}.py")
    found = {key: value_of(cfg, key) for key in RECIPE[name]}
    assert found == RECIPE[name]
    assert cfg.default_hooks.ema is None
    assert all(part.convert_to_iter_based for part in cfg.param_scheduler)
    _, crop, flip, *others, _ = cfg.train_dataloader.dataset.pipeline
    assert (crop.type, crop.size, crop.interpolation) == ("v2/RandomResizedCrop", 224, "bicubic")
    assert crop.get("scale") == CROPS[name]  # the default is (0.08, 1)
    assert (flip.type, flip.p) == ("v2/RandomHorizontalFlip", 0.5)
    kinds = [step.type for step in others]
    assert kinds == (["FastRandAugment", "RandomErasing"] if name == "mae_base_finetune" else [])


# Four patches of 2 x 2 px in a row: 16, 4 visible. The images have no labels.
CONFIG = """
_base_ = {base!r}
model = dict(
    type="MaskedAutoencoder",
    backbone=dict(patch_size=2, drop_path_rate=0.0),
    neck=dict(_delete_=True, **{neck!r}),
    head=dict(_delete_=True, **{head!r}),
    train_cfg=None,
)
data_preprocessor = dict(num_classes=None)
pipeline = [dict(type="LoadImage"), dict(type="PackInputs")]
train_dataloader = dict(dataset=dict(with_label=False, pipeline=pipeline))
val_pipeline = _base_.val_dataloader.dataset.pipeline
val_pipeline[-1].meta_keys = ("sample_idx",)
val_dataloader = dict(dataset=dict(with_label=False, pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type="ReconstructionError")
test_evaluator = val_evaluator
default_hooks = dict(ema=None, checkpoint=dict(by_epoch=False, interval=4))
custom_hooks = [dict(type="CostHook")]
train_cfg = dict(max_epochs=2)
"""


@pytest.fixture(scope="session")
def masked(train, config, data_root, tmp_path_factory):
    """Pre-train for two epochs of six iterations on images without folders of classes."""
    folder = tmp_path_factory.mktemp("mae")
    for file in data_root.glob("*/*/*.png"):
        split = folder / "data" / file.parts[-3]
        split.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, split / f"{file.parent.name}_{file.name}")
    (folder / "mae.py").write_text(CONFIG.format(base=str(config), neck=NECK, head=HEAD))
    train.of(folder / "mae.py")(folder / "run", "--data-root", str(folder / "data"))
    return folder / "run"


def test_a_run_leaves_an_encoder_for_timm_and_a_record(masked):
    run = masked
    record = json.loads((run / "record.json").read_text())
    _, val = read_scalars(run.glob("*/vis_data/scalars.json"))
    assert record["reconstruction/error"] == round(val[2]["reconstruction/error"], 3)
    model = MODELS.build({**load_config(run.parent / "mae.py").model, "data_preprocessor": None})
    assert record["flops"] == 2 * 48 * model.training_flops()
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    assert (model.num_classes, model.global_pool) == (0, "token")
    trained = torch.load(run / "iter_12.pth", weights_only=True)["state_dict"]
    own = {f"backbone.model.{name}": tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(trained[name], tensor) for name, tensor in own.items())
    assert {name.split(".")[0] for name in trained.keys() - own.keys()} == {"neck"}
    card = (run / "README.md").read_text()
    assert "Reconstruction loss" in card
    assert "image-feature-extraction" in card


def classifier(config, checkpoint, **more):
    """Build the classifier of a fine-tuning config."""
    cfg = load_config(config)
    backbone = {**cfg.model.backbone, "checkpoint_path": str(checkpoint), **more}
    return MODELS.build({**cfg.model, "backbone": backbone})


def test_fine_tuning_starts_from_the_encoder_with_a_new_norm(masked, config):
    run = masked
    how = {"patch_size": 2, "drop_path_rate": 0.0}
    files = [run / "model.safetensors", run / "iter_12.pth"]
    for file in files:
        model = classifier(config, file, global_pool="avg", **how).backbone.model
        written = load_file(files[0])
        own = model.state_dict()
        assert {*written} - {*own} == {"norm.weight", "norm.bias"}
        assert all(torch.equal(own[name], written[name]) for name in written.keys() & own.keys())
        assert torch.equal(own["fc_norm.weight"], torch.ones(24))
        assert model.pos_embed.requires_grad
        kept = classifier(config, file, **how).backbone.model
        assert torch.equal(kept.norm.weight, written["norm.weight"])
    # For use as it is, a model without its trained norm is refused.
    with pytest.raises(InputError, match=r"fc_norm.weight is absent in the file"):
        load_model(None, run, global_pool="avg")


def test_the_norm_of_a_linear_probe_becomes_a_part_of_the_exported_head():
    neck = {"type": "ClsBatchNormNeck", "input_features": 24}
    head = {"type": "LabelHead", "num_classes": 3, "in_channels": 24}
    parts = {"backbone": TOKENFORMER, "neck": neck, "head": head}
    probe = MODELS.build({"type": "ImageClassifier", **parts})
    probe.neck.bn.running_mean.normal_()
    probe.neck.bn.running_var.uniform_(0.1, 3.0)
    nn.init.normal_(probe.head.fc.weight)
    x = images().float()
    expected = probe.eval().head(probe.extract_feat(x))
    torch.testing.assert_close(as_timm_model(probe).eval()(x), expected, atol=1e-5, rtol=1e-4)
