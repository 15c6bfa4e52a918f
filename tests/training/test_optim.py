"""Optimisers: merged groups take mmengine's and timm's steps; averages; autocast."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import timm.layers
import timm.optim
import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import OptimWrapper, ReduceOnPlateauLR, build_optim_wrapper
from mmpretrain.registry import MODELS
from torch import nn

from tokenformer_vit.layers import Pattention
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training import optim
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.export import as_timm_model
from tokenformer_vit.training.optim import (
    AccumulationEMAHook,
    AutocastOptimWrapper,
    ForeachMovingAverage,
)
from tokenformer_vit.training.reports import validated_model
from tokenformer_vit.training.runner import TrainingRunner, scale_rates

pytestmark = pytest.mark.usefixtures("scope")
# mmpretrain's and mmengine's constructors do not ask a model what should not decay.
UNDECAYED = {name: {"decay_mult": 0.0} for name in (".cls_token", ".pos_embed")}
LAYER_DECAY = {"layer_decay_rate": 0.5, "norm_decay_mult": 0.0, "bias_decay_mult": 0.0}
LAYER_DECAY["custom_keys"] = UNDECAYED
CONSTRUCTORS = [
    ("MergedOptimWrapperConstructor", "DefaultOptimWrapperConstructor", {}),
    (
        "MergedLayerDecayConstructor",
        "LearningRateDecayOptimWrapperConstructor",
        {"paramwise_cfg": LAYER_DECAY},
    ),
]


def make(config, constructor, **options):
    cfg = load_config(config)
    cfg.optim_wrapper.optimizer.update(options.pop("optimizer", {}))
    torch.manual_seed(1)
    model = MODELS.build({**cfg.model, "data_preprocessor": cfg.data_preprocessor})
    wrapper = {**cfg.optim_wrapper, **options, "constructor": constructor}
    return model, build_optim_wrapper(model, wrapper).optimizer


def names_by_setting(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("ours", "stock", "options"), CONSTRUCTORS)
def test_steps_are_those_of_the_stock_constructors_to_the_last_bit(config, ours, stock, options):
    model, optimizer = make(config, ours, **options)
    other, loop = make(config, stock, optimizer={"fused": True}, **options)
    settings = names_by_setting(model, optimizer)
    assert settings == names_by_setting(other, loop)
    assert len(optimizer.param_groups) == len(set(settings.values()))
    assert len(loop.param_groups) == len(settings)
    for _ in range(5):
        step(other, loop)
        for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad = yours.grad.clone()
        optimizer.step()
    for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours)


@pytest.mark.parametrize(("ours", "stock", "options"), CONSTRUCTORS)
def test_biases_do_not_decay_and_have_the_rate_of_their_block(own, ours, stock, options):
    theta = {"_delete_": True, "qkv": "linear", "proj": "linear", "ffn": "gelu"}
    how = {"theta": theta, "norm": "rms+weight", "pattention_args": {"bias": True}}
    wrapper = {**options.get("paramwise_cfg", {}), "flat_decay_mult": 0.0}
    settings = names_by_setting(
        *make(own(f"model = dict(backbone=dict({how}))"), ours, paramwise_cfg=wrapper)
    )
    for name, (rate, decay) in settings.items():
        tokens = name.rpartition(".")[0] + ".key_param_tokens"
        if name.endswith("bias") and tokens in settings:
            assert decay == 0 < settings[tokens][1]
            assert rate == settings[tokens][0]
    assert sum(name.endswith("score_bias") for name in settings) > 0


@pytest.mark.parametrize(("ours", "stock", "options"), CONSTRUCTORS)
def test_what_the_model_names_does_not_decay_unless_the_config_says_so(own, ours, stock, options):
    name = {"model_name": "tokenformer_small_distilled"}
    config = own(f"model = dict(backbone=dict({name}), head=dict(type='DistilledHead'))")
    how = {**options.get("paramwise_cfg", {}), "custom_keys": {".pos_embed": {"decay_mult": 0.5}}}
    settings = names_by_setting(*make(config, ours, paramwise_cfg=how))
    tokens = {name: settings[f"backbone.model.{name}"][1] for name in ("cls_token", "dist_token")}
    assert tokens == {"cls_token": 0, "dist_token": 0}
    matrix = settings["backbone.model.blocks.0.mlp.key_param_tokens"][1]
    assert settings["backbone.model.pos_embed"][1] == 0.5 * matrix > 0


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("lamb", "Lamb", {}),
        ("cadamw", "AdamWLegacy", {"caution": True}),
        ("muon", "Muon", {}),
        ("nadamuon", "Muon", {"algo": "adamuon", "nesterov": True}),
    ],
)
def test_an_optimiser_of_timm_takes_the_steps_that_timm_makes(config, name, kind, options):
    common = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.05, "eps": 1e-8}
    own = {"type": f"timm.optim.{kind}", **common, **options}
    model, optimizer = make(config, "MergedOptimWrapperConstructor", optimizer=own)
    assert type(optimizer) is getattr(timm.optim, kind)
    other = as_timm_model(model)
    names = timm_state_dict(dict(model.named_parameters()))
    if kind == "Muon":
        common |= {"momentum": 0.95, "fallback_list": ("patch_embed.*", "head.*")}
    stock = timm.optim.create_optimizer_v2(other, name, **common)
    for _ in range(3):
        for name, parameter in other.named_parameters():
            names[name].grad = torch.randn_like(parameter)
            parameter.grad = names[name].grad.clone()
        optimizer.step()
        stock.step()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(names[name], parameter)


def test_a_plateau_also_lowers_the_rates_of_new_pairs():
    layers = [nn.Linear(2, 2) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": each.parameters()} for each in layers[:2]], lr=1.0)
    wrapper = OptimWrapper(optimizer)
    plateau = ReduceOnPlateauLR(wrapper, monitor="loss", rule="less", patience=0, factor=0.5)
    optimizer.add_param_group({"params": layers[2].parameters(), "lr": 0.1})
    optim.align_schedulers(SimpleNamespace(optim_wrapper=wrapper, param_schedulers=[plateau]))
    for _ in range(2):  # the second is no better
        plateau.step({"loss": 1.0})
    assert wrapper.get_lr() == {"base_lr": [0.5], "lr": [0.5, 0.5, 0.05]}


def test_scaling_the_rate_counts_accumulated_images_and_moves_its_floor(
    config, data_root, tmp_path
):
    options = {"optim_wrapper.accumulative_counts": 4, "auto_scale_lr.base_batch_size": 16}
    options["auto_scale_lr.enable"] = True
    cfg = load_config(config, options, str(data_root), work_dir=str(tmp_path))
    before = cfg.optim_wrapper.optimizer.lr, cfg.param_scheduler[1].eta_min
    scale_rates(cfg)
    scale_rates(cfg)  # nothing more
    factor = 4 * 8 / 16
    rates = cfg.optim_wrapper.optimizer.lr, cfg.param_scheduler[1].eta_min
    assert rates == pytest.approx([factor * rate for rate in before])


@pytest.mark.parametrize("options", [{}, {"interval": 3}, {"update_buffers": True}])
@pytest.mark.parametrize("momentum", [1e-4, 2e-2, 0.3])
def test_averages_are_mmengines(momentum, options):
    model = nn.Sequential(Pattention(7, 5, 11), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[2].bias.requires_grad_(False)
    mine, stock = (
        kind(model, momentum, **options)
        for kind in (ForeachMovingAverage, ExponentialMovingAverage)
    )
    for step in range(8):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 10.0 ** (step % 3))
        model[0].tau.mul_(1.5)
        model[1](torch.randn(4, 5))
        mine.update_parameters(model)
        stock.update_parameters(model)
        for name, tensor in stock.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], tensor, msg=name)


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("validated", [True, False])
def test_the_hook_validates_and_saves_the_average_or_the_model(validated, later):
    model, updates = nn.Linear(3, 2), iter([True, False, True])
    wrapper = SimpleNamespace(should_update=lambda: next(updates))
    runner = SimpleNamespace(model=model, iter=0, optim_wrapper=wrapper)
    hook = AccumulationEMAHook(momentum=0.5, validated=validated)
    hook.before_run(runner)
    hook.after_train_iter(runner, 0)
    average = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(2)
    hook.after_train_iter(runner, 1)  # gradients are accumulated
    hook.after_train_iter(runner, 2)
    average, own = average + 1, average + 2
    used = average if validated else own
    hook.before_val_epoch(runner)
    torch.testing.assert_close(model.weight.detach(), used)
    hook.after_val_epoch(runner)
    torch.testing.assert_close(model.weight.detach(), own)

    checkpoint = {"state_dict": model.state_dict(), "meta": {}}
    hook.before_save_checkpoint(runner, checkpoint)
    assert checkpoint["meta"] == {"averaged": validated}
    torch.testing.assert_close(checkpoint["state_dict"]["weight"], used)
    resumed = AccumulationEMAHook(momentum=0.5, validated=later)
    resumed.before_run(SimpleNamespace(model=nn.Linear(3, 2)))
    loaded = copy.deepcopy(checkpoint)
    resumed.after_load_checkpoint(SimpleNamespace(_resume=True), loaded)
    assert resumed.ema_model.steps == 2
    torch.testing.assert_close(resumed.ema_model.module.weight.detach(), average)
    torch.testing.assert_close(loaded["state_dict"]["weight"], own)
    assert validated_model(SimpleNamespace(model=model, hooks=[hook])) is (
        hook.ema_model.module if validated else model
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="fused attention is fast on a GPU")
@pytest.mark.parametrize("kind", ["AutocastOptimWrapper", "LazyOptimWrapper"])
def test_a_model_for_bfloat16_on_a_cpu_has_no_fused_attention(config, tmp_path, kind):
    fused = timm.layers.use_fused_attn()
    cfg = load_config(config, {"optim_wrapper.type": kind}, work_dir=str(tmp_path))
    runner: Any = TrainingRunner.from_cfg(cfg)
    for block in runner.model.backbone.model.blocks:
        assert block.attn.fused_attn == (kind == "LazyOptimWrapper")
    assert timm.layers.use_fused_attn() == fused


@pytest.mark.parametrize("times", [2, 60])
def test_a_cpu_that_is_slow_in_bfloat16_is_told_what_to_give(times, monkeypatch, recwarn):
    seconds = {torch.bfloat16: times, torch.float32: 1}
    monkeypatch.setattr(optim, "get_device", lambda: "cpu")
    monkeypatch.setattr(optim, "seconds_of", lambda call, device: seconds[call().dtype])
    optim.bfloat16_slowdown.cache_clear()
    AutocastOptimWrapper(torch.optim.SGD(nn.Linear(4, 3).parameters(), 0.1))
    optim.bfloat16_slowdown.cache_clear()
    told = [str(each.message) for each in recwarn if "bfloat16" in str(each.message)]
    assert len(told) == (times == 60)
    assert all("60 times" in each and "type=LazyOptimWrapper" in each for each in told)
