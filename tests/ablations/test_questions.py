"""Every question can be asked of its base, and what it compares can be compared."""

import copy
from typing import Any

import pytest
import sweep
import timm
from models import build, flops, lasting, matched_vit, sizes_of
from report import questions

from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.training.config import load_config

BASES = {"mae": "mae_cifar10_micro_finetune", "tuning": "tuning_imagenette"}
BASES |= {"lm_continue": "lm_newstest", "lm_languages": "lm_newstest"}
QUESTIONS = questions()


def configs_of(question, *options):
    base = "lm_micro" if question.metric == "perplexity" else "cifar10_micro_50k"
    words = ["--config", BASES.get(question.name, base), "--allow-dirty"]
    lengths = {"stages": "train_cfg.max_epochs=20", "lm_stages": "train_cfg.max_iters=4000"}
    if question.name in lengths:
        options = (lengths[question.name],)
    words += ["--cfg-options", *options] if options else []
    return sweep.Sweep(*sweep.parse([question], words)).configs


@pytest.mark.parametrize("base", ["cifar10_micro_50k", "cifar10_stem"])
def test_a_recipe_is_what_its_label_says(base):
    words = ["recipes", "--config", base, "--allow-dirty"]
    own = [QUESTIONS["recipes"], QUESTIONS["budget"]]
    for name, cfg in sweep.Sweep(*sweep.parse(own, words)).configs.items():
        types = {"adamw": "AdamW", "muon": "timm.optim.Muon", "deit3": "timm.optim.Lamb"}
        assert cfg["optim_wrapper"]["optimizer"]["type"] == types[name.rpartition("_")[2]]


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_every_variant_has_a_config_of_its_own(question, tmp_path):
    if question.metric == "perplexity":
        pytest.importorskip("transformers")
    options = ()
    if question.name.startswith(("tuning", "converted", "distilled")):
        size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
        vit: Any = timm.create_model("vit_base_patch16_224", **size)
        save_model(vit, tmp_path / "vit_seed0")
        save_model(from_vit(vit), tmp_path / "large_seed0")
        options = (f"model.backbone.checkpoint_path={tmp_path}/large_seed0/model.safetensors",)
    names = [variant.name for variant in question.variants]
    assert len({*names}) == len(names)
    for place, variant in enumerate(question.variants):
        assert {*variant.compare} <= {*names} - {variant.name}
        assert variant.start is None or variant.start in names[:place]
    configs = configs_of(question, *options)
    if question.name.startswith("converted"):
        assert {cfg["model"]["head"]["in_channels"] for cfg in configs.values()} == {48}
    starts = {variant.name: variant.start for variant in question.variants}
    distinct = {str((starts[name], config)) for name, config in configs.items()}
    # Images: x3_shared_10 costs what x3_sunk_20 costs, and is the same training.
    assert len(configs) - len(distinct) == (question.name == "stages")
    if question.name == "tuning":  # appended pairs and LoRA add as many parameters
        count = {name: sweep.count(configs[name])["parameters"] for name in configs}
        new = count["lora_large"] - count["vit_full"]
        assert count["tokens_large"] - count["full"] == pytest.approx(new, rel=0.01)


@pytest.mark.parametrize("name", ["cifar10_micro", "imagenet_base", "imagenet_tiny"])
def test_the_vit_has_as_many_weights_and_costs_as_much(name):
    cfg = load_config(f"configs/{name}.py").to_dict()
    other = copy.deepcopy(cfg)
    matched_vit(other, sizes_of(cfg))

    def weights(cfg):
        blocks = build(cfg).backbone.model.blocks
        return [sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in blocks]

    assert weights(cfg) == weights(other)
    assert flops(cfg) == flops(other)


def test_stages_cost_what_they_are_compared_with():
    configs = configs_of(QUESTIONS["stages"])

    def cost(name):
        return flops(configs[name]) * configs[name]["train_cfg"]["max_epochs"]

    for name, small in (("x3_sunk_20", 0), ("x3_shared_20", 1 / 3), ("x3_counted_20", 1)):
        half_an_epoch = flops(configs[name]) / 2
        assert abs(cost(name) - cost("x3") / 5 - small * cost("small")) <= half_an_epoch


def test_a_late_decay_moves_with_the_length():
    begins = {"begin": 1}, {"begin": 17.0, "convert_to_iter_based": True}, {"begin": 17}
    other_unit = {"begin": 20, "by_epoch": False}
    cfg = {"train_cfg": {"max_epochs": 20}, "param_scheduler": [*begins, other_unit]}
    lasting(0.6)(cfg, None)
    assert cfg["train_cfg"] == {"max_epochs": 12}
    assert [part["begin"] for part in cfg["param_scheduler"]] == pytest.approx([1, 10.2, 10, 20])
