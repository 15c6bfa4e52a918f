"""Recipes: what each variant trains with, as the runs read it."""

import pytest
from recipes import QUESTION

from tokenformer_vit.experiments.plan import plan
from tokenformer_vit.experiments.sweep import parse
from tokenformer_vit.training.config import load_config


@pytest.fixture
def planned(tmp_path, config, digits):
    """The config of each variant's run, by its name."""
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work", "lr": 2e-3}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    runs = plan(QUESTION, parse(QUESTION, words))
    for run in runs:
        run.write_config()
    return {run.about["variant"]: load_config(run.config) for run in runs}


def test_both_models_have_the_same_recipes(planned):
    optimizers = {"adamw": "AdamW", "muon": "timm.optim.Muon", "deit3": "timm.optim.Lamb"}
    for recipe, optimizer in optimizers.items():
        own, vit = planned[f"tokenformer_{recipe}"], planned[f"vit_{recipe}"]
        for part in ("optim_wrapper", "train_dataloader", "param_scheduler", "data_preprocessor"):
            assert own[part] == vit[part]
        assert own.model.head == vit.model.head
        assert (own.optim_wrapper.optimizer.type, own.optim_wrapper.optimizer.lr) == (
            optimizer,
            2e-3,
        )
        assert "paramwise_cfg" in own.optim_wrapper
        assert vit.model.backbone.model_name.startswith("vit")
    adamw, muon, deit3 = (planned[f"tokenformer_{recipe}"] for recipe in optimizers)
    assert muon.model == adamw.model
    assert muon.train_dataloader == adamw.train_dataloader
    for recipe in (deit3, planned["vit_deit3"]):
        assert recipe.model.backbone.init_values == 1e-4
        assert recipe.model.head.init_cfg == {"type": "TruncNormal", "layer": "Linear", "std": 0.02}
        assert recipe.model.head.loss == {"type": "BinaryCrossEntropy"}
        assert [each.type for each in recipe.model.train_cfg.augments] == ["Mixup", "CutMix"]
        assert recipe.train_dataloader.dataset.pipeline[1].size == 8
