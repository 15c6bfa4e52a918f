"""Every question can be asked of its base, and what it compares can be compared."""

import parts
import pytest
import sweep
import timm
import torch
from base import Base
from questions import QUESTIONS
from timm.optim import Muon
from torch import nn
from torch.overrides import TorchFunctionMode

from tokenformer_vit.training.config import run_length
from tokenformer_vit.training.optim import LazyOptimWrapper

BASES = {"mae": "mae_cifar10_micro_finetune", "adapters": "tuning_imagenette"}
BASES["nested_tuning"] = "nested_imagenette"
ASKED = [(name, BASES.get(name, "cifar10_micro_50k")) for name in QUESTIONS]


@pytest.fixture(autouse=True)
def _data_are_elsewhere(monkeypatch):
    monkeypatch.setattr(sweep, "check", sweep.check_config)


def planned(question, base, *words):
    if base.startswith("lm"):
        pytest.importorskip("transformers")
    return sweep.Sweep(sweep.parse([question, "--config", base, *words]))


@pytest.mark.parametrize(("name", "base"), [*ASKED, ("one_step", "lm_micro")])
def test_every_variant_has_a_config_of_its_own(name, base):
    length = ["--cfg-options", "train_cfg.max_epochs=20"] if base.startswith("cifar") else []
    own = planned(name, base, *length)
    names = [*own.variants]
    for place, variant in enumerate(own.variants.values()):
        assert {*variant.compare} <= {*names}
        assert variant.start == "" or variant.start in names[:place]
        backbone = own.configs[names[place]].model.get("backbone", {})
        assert not (backbone.get("frozen") and backbone.get("growth"))
    assert len({str(cfg) + own.variants[each].start for each, cfg in own.configs.items()}) == len(
        names
    )


@pytest.mark.parametrize("name", ["cifar10_micro", "cifar10_stem", "imagenet_base"])
def test_the_vit_has_as_many_weights_and_costs_as_much(name):
    base = Base(f"configs/{name}.py", {})

    def weights(options):
        blocks = base.build(base.with_options(options)).backbone.model.blocks
        return [sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in blocks]

    assert weights({}) == weights(base.vit())
    assert base.flops({}) == base.flops(base.vit())


@pytest.mark.parametrize("name", ["cifar10_micro_50k", "lm_micro"])
def test_growth_costs_what_it_is_compared_with(name):
    own = planned("one_step", name)
    large, half = own.base.flops({}), own.base.flops(own.base.pairs(0.5))
    for when in (10, 25, 50, 80):
        share = when / 100 * own.base.length
        grown = share * half + (own.base.length - share) * large
        scratch, longer = (
            run_length(own.configs[f"{each}_{when}"]) for each in ("scratch", "longer")
        )
        assert abs(scratch * large - grown) <= large / 2
        assert abs(longer * half - grown) <= half / 2


def test_options_and_lengths_reach_the_config():
    growth = planned("one_step", "cifar10_micro_50k").configs["half"].param_scheduler
    assert (growth[0].end, growth[1].begin, growth[1].end_factor) == (1, 6.8, 0.02)
    own = planned("recipes", "cifar10_stem", "--cfg-options", "train_cfg.max_epochs=24")
    kinds = {name: cfg.optim_wrapper.optimizer.type for name, cfg in own.configs.items()}
    assert kinds["vit_adamw"] == kinds["tokenformer_adamw"] == "AdamW"
    assert kinds["vit_muon"] == kinds["tokenformer_muon"] == "timm.optim.Muon"
    assert {cfg.train_cfg.max_epochs for cfg in own.configs.values()} == {24}
    assert own.configs["vit_muon"].model.backbone.model_name == "vit_conv_stem"


def test_a_nested_vit_is_exported_as_a_vit_and_adapters_start_with_its_outputs():
    images, small = torch.randn(2, 3, 16, 16), {"img_size": 16, "depth": 2}
    nested = parts.NestedViT([0.5], model_name="test_vit", **small).eval()
    vit = timm.create_model("test_vit", num_classes=0, **small).eval()
    vit.load_state_dict(nested.exported(nested.model.state_dict()))
    torch.testing.assert_close(vit(images), nested(images)[0])
    own = {"model_name": "tokenformer_vit", "theta": "linear", "embed_dim": 32, "num_heads": 2}
    growth = {"num_qkv_param_tokens": 40, "freeze": "old"}
    lora = parts.LoRA(growth=growth, patch_size=8, **own, **small).eval()
    query = lora.model.blocks[0].attn.query
    assert query.new_key_param_tokens.any()
    grown = lora(images)[0]
    with torch.no_grad():
        query.new_key_param_tokens.zero_()
    torch.testing.assert_close(lora(images)[0], grown)


def test_muon_multiplies_in_float32_and_updates_as_before():
    dtypes, weights = [], []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.addmm:
                dtypes[-1].add(args[0].dtype)
            return function(*args, **kwargs or {})

    start, gradient = torch.randn(2, 16, 32)
    for wrapper in (LazyOptimWrapper, parts.Float32OptimWrapper):
        dtypes.append(set())
        layer = nn.Linear(32, 16, bias=False)
        layer.weight.data, layer.weight.grad = start.clone(), gradient.clone()
        with Seen():
            wrapper(Muon(layer.parameters(), lr=0.1)).step()
        weights.append(layer.weight.detach() - start)
    assert dtypes == [{torch.bfloat16}, {torch.float32}]
    torch.testing.assert_close(*weights, rtol=0.05, atol=1e-3)
