"""Pre-training by masked image modelling: what the encoder sees, the loss, the recipe."""

import math

import pytest
import torch
from mmpretrain.models import MAE as StockMAE
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from safetensors.torch import load_file
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import COMPUTATION, load_model, save_model
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.export import as_timm_model
from tokenformer_vit.training.models.mae import MaskedAutoencoder

from .conftest import BACKBONE

pytestmark = pytest.mark.usefixtures("scope")
TOKENFORMER = {**BACKBONE, "img_size": 16, "depth": 2}
VIT = {**TOKENFORMER, "model_name": "vit_tiny_patch16_224"}
SHAPE = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
NECK = {"type": "MAEPretrainDecoder", **SHAPE}
LOSS = {"type": "PixelReconstructionLoss", "criterion": "L2"}
HEAD = {"type": "MAEPretrainHead", "norm_pix": True, "loss": LOSS}


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


def stock_mae(model):
    """mmpretrain's own MAE with the weights of a masked autoencoder around timm's ViT."""
    arch = {"embed_dims": 24, "num_layers": 2, "num_heads": 2, "feedforward_channels": 96}
    backbone = {"type": "MAEViT", "arch": arch, "img_size": 16, "patch_size": 4}
    sizes = {"patch_size": 4, "num_patches": 16, "embed_dim": 24}
    stock = StockMAE(backbone, {**NECK, **sizes}, {**HEAD, "patch_size": 4})
    names = {"blocks.": "layers.", "mlp.fc1": "ffn.layers.0.0", "mlp.fc2": "ffn.layers.1"}
    names |= {"norm": "ln", "patch_embed.proj": "patch_embed.projection"}
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
    own, its = model.backbone.model.patch_embed.proj, stock.backbone.patch_embed.projection
    torch.testing.assert_close(own.weight.grad, its.weight.grad)


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

    torch.manual_seed(seed)
    first, second = masks(), masks()
    assert not torch.equal(first, second)
    torch.manual_seed(seed)
    assert torch.equal(masks(), first)
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


@pytest.mark.parametrize("file", ["model.safetensors", "epoch_1.pth"])
def test_fine_tuning_starts_from_the_encoder_with_a_new_norm(file, tmp_path):
    model = build().float()
    nn.init.normal_(model.backbone.model.norm.weight)
    save_model(as_timm_model(model), tmp_path)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "epoch_1.pth")
    written = load_file(tmp_path / "model.safetensors")
    start = {**TOKENFORMER, "checkpoint_path": str(tmp_path / file)}
    tuned = MODELS.build({**start, "global_pool": "avg"}).model
    own = tuned.state_dict()
    assert {*written} - {*own} == {"norm.weight", "norm.bias", COMPUTATION}
    assert all(torch.equal(own[name], written[name]) for name in written.keys() & own.keys())
    assert torch.equal(own["fc_norm.weight"], torch.ones(24))
    assert tuned.pos_embed.requires_grad
    assert torch.equal(MODELS.build(start).model.norm.weight, written["norm.weight"])
    # For use as it is, a model without its trained norm is refused.
    with pytest.raises(InputError, match=r"fc_norm.weight is absent in the file"):
        load_model(None, tmp_path, global_pool="avg")


# The recipe of MAE as mmpretrain runs it, in tables 8 to 10 of arXiv:2111.06377.
NAMES = ("mae_base_pretrain", "mae_base_finetune", "mae_base_linear")
RECIPE = {
    "model.backbone.drop_path_rate": (0.0, 0.1, 0.0),
    "optim_wrapper.optimizer.type": ("AdamW", "AdamW", "LARS"),
    "optim_wrapper.optimizer.lr": (1.5e-4 * 4096 / 256, 2e-3, 6.4),
    "optim_wrapper.optimizer.weight_decay": (0.05, 0.05, 0.0),
    "param_scheduler.0.end": (40, 5, 10),
    "param_scheduler.1.eta_min": (0.0, 1e-6, 0.0),
    "train_cfg.max_epochs": (800, 100, 90),
    "auto_scale_lr.base_batch_size": (4096, 1024, 16384),
}
OF_ONE = {
    "mae_base_pretrain": {
        "model.mask_ratio": 0.75,
        "model.neck.decoder_embed_dim": 512,
        "model.neck.decoder_depth": 8,
        "model.neck.decoder_num_heads": 16,
        "model.neck.mlp_ratio": 4.0,
        "model.head.norm_pix": True,
        "model.head.loss.criterion": "L2",
        "model.train_cfg": None,
        "optim_wrapper.type": "AutocastOptimWrapper",
        "optim_wrapper.optimizer.betas": (0.9, 0.95),
    },
    "mae_base_finetune": {
        "model.backbone.global_pool": "avg",
        "model.head.init_cfg.std": 2e-5,
        "model.head.loss.label_smooth_val": 0.1,
        "model.train_cfg.augments.0.alpha": 0.8,
        "model.train_cfg.augments.1.alpha": 1.0,
        "optim_wrapper.optimizer.betas": (0.9, 0.999),
        "optim_wrapper.paramwise_cfg.layer_decay_rate": 0.65,
        "param_scheduler.0.start_factor": 1e-4,
    },
    "mae_base_linear": {
        "model.backbone.frozen": True,
        "model.neck.type": "ClsBatchNormNeck",
        "model.head.init_cfg.std": 0.01,
        "model.head.loss.type": "CrossEntropyLoss",
        "model.train_cfg": None,
        "optim_wrapper.optimizer.momentum": 0.9,
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_of_mae_value_by_value(name):
    cfg = load_config(f"{name}.py")
    common = {key: values[NAMES.index(name)] for key, values in RECIPE.items()}
    for key, value in {**common, **OF_ONE[name]}.items():
        found = cfg
        for part in key.split("."):
            found = found[int(part) if part.isdecimal() else part]
        assert found == value, key
    assert cfg.default_hooks.ema is None
    assert all(part.convert_to_iter_based for part in cfg.param_scheduler)
    _, crop, flip, *others, _ = cfg.train_dataloader.dataset.pipeline
    assert (crop.type, crop.size, crop.interpolation) == ("v2/RandomResizedCrop", 224, "bicubic")
    # The default is (0.08, 1).
    assert crop.get("scale") == ((0.2, 1.0) if name == "mae_base_pretrain" else None)
    assert (flip.type, flip.p) == ("v2/RandomHorizontalFlip", 0.5)
    kinds = [step.type for step in others]
    assert kinds == (["FastRandAugment", "RandomErasing"] if name == "mae_base_finetune" else [])
