"""Every language config builds what it says; configs of the paper have its recipe."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra [language]")
pytest.importorskip("datasets", reason="language models need the extra [language]")

from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, LOOPS
from mmpretrain.registry import DATA_SAMPLERS, DATASETS, METRICS, MODELS

from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import lm_config
from tokenformer_vit.training.config import check_config, load_config

pytestmark = pytest.mark.usefixtures("scope")
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("lm_*.py"))


def build(name):
    cfg = load_config(CONFIGS / f"{name}.py")
    model = dict(cfg.model)
    if model["checkpoint"]:  # of another run, which is not there: the sizes after growth
        sizes = dict(load_config(CONFIGS / "lm_openwebtext_124m.py").model.config)
        sizes |= {key: value for key, value in model["growth"].items() if key != "init"}
        model |= {"config": sizes, "checkpoint": "", "growth": {}}
    with torch.device("meta"):
        return cfg, MODELS.build(model)


@pytest.mark.parametrize("name", NAMES)
def test_every_part_is_built(name):
    cfg, model = build(name)
    check_config(cfg)
    for hook in (*cfg.default_hooks.values(), *cfg.custom_hooks):
        HOOKS.build(hook)
    assert LOOPS.get(cfg.train_cfg.type) is not None
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        assert DATASETS.get(loader.dataset.type) is not None
        assert DATA_SAMPLERS.get(loader.sampler.type) is not None
    evaluators = cfg.val_evaluator
    for evaluator in evaluators if isinstance(evaluators, list) else [evaluators]:
        METRICS.build(evaluator)
    splits = [cfg[f"{name}_dataloader"].dataset.split for name in ("train", "val")]
    assert splits == ["train", "val"]  # never what is trained on
    count = sum(parameter.numel() for parameter in model.parameters())
    title = " ".join((CONFIGS / f"{name}.py").read_text().split("#\n")[0].split())
    if stated := re.search(r"([\d,]{5,}) parameters", title):
        assert int(stated[1].replace(",", "")) == count
    elif stated := re.search(r"([\d.]+) M parameters", title):
        assert round(count / 1e6, len(stated[1].partition(".")[2])) == float(stated[1])

    # Matrices decay, and nothing else.
    optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    for parameter in model.parameters():
        group = groups[id(parameter)]
        decay = cfg.optim_wrapper.optimizer.weight_decay if parameter.ndim > 1 else 0
        assert group["weight_decay"] == decay
        assert group["lr"] == cfg.optim_wrapper.optimizer.lr
    assert cfg.optim_wrapper.clip_grad == {"max_norm": 1.0}


def test_recipe_of_the_released_models():
    cfg = load_config(CONFIGS / "lm_pile_150m.py")
    assert lm_config(**cfg.model.config) == lm_config("150m", pattention_args={"init": "released"})
    _, model = build("lm_pile_150m")
    layer = next(each for each in model.modules() if isinstance(each, Pattention))
    assert (layer.key_init_std, layer.value_init_std) == (0.02, 2 / (12 * 768**0.5))
    adamw = {"type": "AdamW", "lr": 6e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    assert cfg.optim_wrapper.optimizer == {**adamw, "fused": None}
    assert cfg.train_cfg.max_iters == 143_000
    assert cfg.auto_scale_lr.base_batch_size == 1024
    warmup, cosine = cfg.param_scheduler
    assert (warmup.type, warmup.end, warmup.by_epoch) == ("LinearLR", 1430, False)
    assert (cosine.type, cosine.begin, cosine.eta_min) == ("CosineAnnealingLR", 1430, 6e-5)


def test_the_transformer_is_trained_as_the_tokenformer_is():
    names = ("lm_openwebtext_124m.py", "lm_openwebtext_transformer.py")
    own, others = (load_config(CONFIGS / name) for name in names)
    for key in ("optim_wrapper", "param_scheduler", "train_cfg", "train_dataloader"):
        assert own[key] == others[key]
