"""DeiT III's recipe: a step is timm's own, and a run resumes exactly, exports and continues."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import timm.optim
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS, TRANSFORMS
from PIL import Image
from timm.data.auto_augment import auto_augment_policy
from torch import nn
from torchvision.transforms import functional

from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.reports import read_scalars

from .conftest import Train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# The recipe of a shipped config for a small model and small images.
SMALL = """
_base_ = "{base}"
model = dict(
    backbone=dict(embed_dim=24, depth=2, num_heads=2, img_size={size}, patch_size=8),
    head=dict(num_classes=10, in_channels=24),
)
data_preprocessor = dict(num_classes=10)
train_pipeline, test_pipeline = _base_.train_pipeline, _base_.test_pipeline
train_pipeline[1].size = {size}
test_pipeline[1].input_size = (3, {size}, {size})
train_dataloader = dict(
    batch_size=32,
    dataset=dict(
        _delete_=True,
        type="HuggingFaceImages",
        data_root="",
        split="train",
        indices=list(range(0, 50000, 97))[:512],  # the rows are in the order of their classes
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        train_dataloader["dataset"],
        split="test",
        indices=list(range(0, 10000, 78))[:128],
        pipeline=test_pipeline,
    )
)
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2)
param_scheduler = _base_.param_scheduler
for scheduler in param_scheduler:
    scheduler["end" if scheduler.type == "LinearLR" else "begin"] = 1
default_hooks = dict(
    logger=dict(interval=1),
    checkpoint=dict(by_epoch=False, interval=5, max_keep_ckpts=-1),
)
log_processor = dict(window_size=1)
"""


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL.format(base=CONFIGS / "deit3_small.py", size=32))
    return path


_FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")


@pytest.mark.parametrize("kind", ["Mixup", "CutMix"])
def test_a_step_is_that_of_timms_loss_mixing_and_optimiser(config, kind, monkeypatch, seed):
    cfg = load_config(config)
    augments = [each for each in cfg.model.train_cfg.augments if each.type == kind]
    cfg.model.train_cfg.augments = augments
    classifier = MODELS.build({**cfg.model, "data_preprocessor": cfg.data_preprocessor})
    classifier.init_weights()
    wrapper = build_optim_wrapper(classifier, cfg.optim_wrapper)
    model = copy.deepcopy(classifier.backbone.model).train()
    model.head = copy.deepcopy(classifier.head.fc)
    for block in model.blocks:
        assert block.drop_path1.drop_prob == 0.05

    # With two images, a neighbour is also the image at the other end, which timm takes. Both draw
    # a share and, for a box of half the height and width, a place.
    share, place = 0.75, (9, 21)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    targets = torch.tensor([3, 8])
    monkeypatch.setattr(torch, "randperm", torch.arange)
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda *_: torch.tensor(share))
    with monkeypatch.context() as patched:
        columns_first = iter(place[::-1])
        patched.setattr(torch, "randint", lambda *_, **__: torch.tensor([next(columns_first)]))
        batch = classifier.data_preprocessor({"inputs": images, "data_samples": targets}, True)
    monkeypatch.setattr(np.random, "beta", lambda *_: share)
    rows_first = iter(place)
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(rows_first))
    torch.manual_seed(seed)
    loss = classifier(**batch, mode="loss")["loss"]
    logged = {"loss": loss.detach()}
    wrapper.update_params(loss)

    mean, std = (
        torch.tensor(cfg.data_preprocessor[name])[:, None, None] for name in ("mean", "std")
    )
    alphas = {"Mixup": (0.8, 0.0), "CutMix": (0.0, 1.0)}[kind]
    mix = timm.data.Mixup(*alphas, prob=1.0, label_smoothing=0.0, num_classes=10)
    mixed, scores = mix((images - mean) / std, targets)
    torch.manual_seed(seed)
    loss = nn.BCEWithLogitsLoss()(model(mixed), scores.gt(0.0).float())
    optimizer = timm.optim.create_optimizer_v2(model, "lamb", 4e-3, 0.05, eps=1e-8)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(logged["loss"], loss.detach())
    stepped = timm_state_dict(classifier.state_dict())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(stepped[name], tensor)


def test_three_augment_is_that_of_timm_and_torchvision(config, monkeypatch, generator):
    steps = load_config(config).train_dataloader.dataset.pipeline
    *_, choice, jitter, _ = map(TRANSFORMS.build, steps)
    pixels = generator.integers(0, 256, (24, 20, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    def gap(result, expected):
        return np.abs(result.astype(int) - np.asarray(expected)).max()

    solarize, gray, blur = (operations[0] for operations in auto_augment_policy("3a"))
    choice.transforms[2].transforms[0].random_magnitude = lambda: 1.3
    monkeypatch.setattr("random.uniform", lambda low, high: 1.3)
    for index, operation in enumerate((gray, solarize, blur)):
        choice.random_pipeline_index = lambda index=index: index
        assert gap(choice({"img": pixels.copy()})["img"], operation(image)) <= (index == 0)
    for order in ((2, 0, 1, 3), (1, 3, 2, 0)):
        factors = generator.uniform(0.7, 1.3, 3).tolist()
        drawn = dict(zip(_FACTORS, (*factors, None), strict=True), fn_idx=torch.tensor(order))
        jitter.inner.make_params = lambda _, drawn=drawn: drawn
        change = functional.adjust_brightness, functional.adjust_contrast
        change += (functional.adjust_saturation, lambda image, _: image)
        expected = image
        for index in order:
            expected = change[index](expected, [*factors, 1][index])
        assert gap(jitter({"img": pixels.copy()})["img"], expected) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "model_name", "drop_path"),
    [
        (("deit3_small", "deit3_base_224"), "tokenformer_small", 0.05),
        (("vit5_base", "vit5_base_224"), "tokenformer_base_rope_reg4", 0.2),
    ],
)
def test_both_stages_of_a_run_on_cifar10(
    stages, model_name, drop_path, tmp_path, command, shared_data, arrow_cache
):
    """Two epochs, resumed in the middle of each; the export; two epochs of the second stage."""
    config = tmp_path / "first.py"
    config.write_text(SMALL.format(base=CONFIGS / f"{stages[0]}.py", size=32))
    pytest.importorskip("datasets")
    data = shared_data("cifar10/plain_text")
    train = Train(config, data, command)
    first, resumed = tmp_path / "first", tmp_path / "resumed"
    train(first)
    for start in (5, 20):
        saved = (resumed if resumed.exists() else first) / f"iter_{start}.pth"
        train(resumed, "--resume", str(saved), "--cfg-options", "train_dataloader.num_workers=1")
    one, other = (
        torch.load((folder / "last_checkpoint").read_text(), weights_only=True)
        for folder in (first, resumed)
    )
    assert one["meta"]["iter"] == 32  # two epochs of 512 samples
    for part in ("state_dict", "ema_state_dict"):
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
    assert [int(group["step"]) for group in other["optimizer"]["param_groups"]] == [32, 32]
    losses, _ = read_scalars(first.glob("*/vis_data/scalars.json"))
    values = [record["loss"] for _, record in sorted(losses.items())]
    assert values[-1] < 0.95 * values[0]

    name = f"local-dir:{first}"
    exported: Any = timm.create_model(name, pretrained=True, drop_path_rate=drop_path)
    weights = exported.state_dict()
    for name, tensor in timm_state_dict(one["state_dict"]).items():
        assert torch.equal(weights[name], tensor), name
    averages = one["ema_state_dict"]
    assert not torch.equal(averages["module.head.fc.weight"], one["state_dict"]["head.fc.weight"])
    assert all(block.drop_path1.drop_prob == drop_path for block in exported.blocks)
    assert exported.pretrained_cfg["crop_pct"] == 1

    second = tmp_path / "second.py"
    second.write_text(
        SMALL.format(base=CONFIGS / f"{stages[1]}.py", size=48)
        + f"start = {str(first / 'model.safetensors')!r}\n"
        + "model['backbone'].update(checkpoint_path=start)\n"
        + f"model['backbone']['model_name'] = {model_name!r}\n"
        + "model['head']['init_cfg'] = dict(checkpoint=start)\n"
    )
    cfg = load_config(second)
    model = MODELS.build({**cfg.model, "data_preprocessor": cfg.data_preprocessor})
    model.init_weights()
    assert torch.equal(model.head.fc.weight, weights["head.weight"])
    assert model.backbone.model.pos_embed.shape == (1, 36, 24)
    block = model.backbone.model.blocks[1]
    assert torch.equal(block.mlp.key_param_tokens, weights["blocks.1.mlp.key_param_tokens"])
    train.of(second)(tmp_path / "second")
