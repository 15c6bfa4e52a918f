"""DeiT III's recipe: a step is timm's own, and so is its augmentation."""

import copy

import numpy as np
import pytest
import timm
import timm.data
import timm.optim
import torch
from mmengine.optim import build_optim_wrapper
from mmpretrain.registry import MODELS, TRANSFORMS
from PIL import Image
from timm.data.auto_augment import auto_augment_policy
from torch import nn

from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.config import load_config

pytestmark = pytest.mark.usefixtures("scope")


SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}


@pytest.mark.parametrize("kind", ["Mixup", "CutMix"])
def test_a_step_is_that_of_timms_loss_mixing_and_optimiser(kind, monkeypatch, seed):
    cfg = load_config("deit3_small")
    cfg.model.backbone.update(SMALL)
    cfg.model.head.update(num_classes=10, in_channels=24)
    cfg.data_preprocessor.num_classes = 10
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


def test_three_augment_is_timms(monkeypatch, generator):
    steps = load_config("deit3_small").train_dataloader.dataset.pipeline
    *_, choice, _, _ = map(TRANSFORMS.build, steps)
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
