"""DeiT III's augmentation is timm's; test_configs.py has the numbers of its recipe."""

import numpy as np
import pytest
from mmpretrain.registry import TRANSFORMS
from PIL import Image
from timm.data.auto_augment import auto_augment_policy

from tokenformer_vit.training.config import load_config

pytestmark = pytest.mark.usefixtures("scope")


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
