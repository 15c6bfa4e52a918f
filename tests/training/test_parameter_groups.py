"""An optimiser with one group for each setting takes the same steps as before."""

import copy
from types import SimpleNamespace

import pytest
import timm.optim
import torch
from mmengine.optim import LinearLR, OptimWrapper, build_optim_wrapper
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import optimizer as carrying
from tokenformer_vit.models import timm_state_dict
from tokenformer_vit.training.backbone import as_timm_model
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.parameter_groups import fit_groups, merge_separate_groups

LAYER_DECAY = {"layer_decay_rate": 0.5, "norm_decay_mult": 0.0, "bias_decay_mult": 0.0}
CONSTRUCTORS = [
    ("MergedOptimWrapperConstructor", "DefaultOptimWrapperConstructor", {}),
    (
        "MergedLayerDecayConstructor",
        "LearningRateDecayOptimWrapperConstructor",
        {"paramwise_cfg": LAYER_DECAY},
    ),
]


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


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
@pytest.mark.parametrize("kind", [{}, {"amsgrad": True}])
def test_steps_are_those_of_the_stock_constructors_to_the_last_bit(
    config, ours, stock, options, kind
):
    model, optimizer = make(config, ours, optimizer=kind, **options)
    other, loop = make(config, stock, optimizer={**kind, "fused": True}, **options)
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


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, {"foreach": None, "fused": True}),
        ({"foreach": True}, {"foreach": True, "fused": None}),
        ({"foreach": False}, {"foreach": False, "fused": None}),
        ({"type": "RAdam", "betas": (0.9, 0.99)}, {"foreach": None}),  # has no fused form
    ],
)
def test_the_config_of_an_optimiser_has_the_last_word(config, optimizer, expected):
    _, made = make(config, "MergedOptimWrapperConstructor", optimizer=optimizer)
    assert {key: made.defaults[key] for key in expected} == expected


def test_an_optimiser_of_timm_takes_the_steps_that_timm_makes(config):
    own = {"type": "timm.optim.Lamb", "lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.05}
    model, optimizer = make(config, "MergedOptimWrapperConstructor", optimizer=own)
    assert type(optimizer) is timm.optim.Lamb
    assert len(optimizer.param_groups) == 2
    other = as_timm_model(model)
    names = timm_state_dict(dict(model.named_parameters()))
    stock = timm.optim.create_optimizer_v2(other, "lamb", lr=3e-3, weight_decay=0.05, eps=1e-8)
    for _ in range(3):
        for name, parameter in other.named_parameters():
            names[name].grad = torch.randn_like(parameter)
            parameter.grad = names[name].grad.clone()
        optimizer.step()
        stock.step()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(names[name], parameter)


def test_an_unknown_optimiser_is_named(config):
    for name in ("timm.optim.Lmb", "Lmb"):
        with pytest.raises(InputError, match=rf"type is {name}, .*timm\.optim\.Lamb"):
            make(config, "MergedOptimWrapperConstructor", optimizer={"type": name})


def test_the_state_of_a_group_for_each_parameter_is_taken_over(config):
    model, loop = make(config, "DefaultOptimWrapperConstructor", optimizer={"fused": True})
    step(model, loop)
    schedule = LinearLR(loop, start_factor=0.5, end=10)
    other, merged = make(config, "MergedOptimWrapperConstructor")
    other.load_state_dict(model.state_dict())
    schedules = LinearLR(merged, start_factor=0.5, end=10)
    number = len(merged.param_groups)

    saved = copy.deepcopy(loop.state_dict())
    fit_groups(merged, other, saved["param_groups"])
    merged.load_state_dict(saved)
    schedules.load_state_dict(copy.deepcopy(schedule.state_dict()))
    runner = SimpleNamespace(optim_wrapper=OptimWrapper(merged), param_schedulers=[schedules])
    merge_separate_groups(runner)
    assert len(merged.param_groups) == len(schedules.base_values) == number
    for _ in range(3):
        step(model, loop)
        for mine, yours in zip(other.parameters(), model.parameters(), strict=True):
            mine.grad = yours.grad.clone()
        merged.step()
        schedule.step()
        schedules.step()
    assert names_by_setting(other, merged) == names_by_setting(model, loop)
    for mine, yours in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, yours)


def last(work_dir):
    return torch.load((work_dir / "last_checkpoint").read_text(), weights_only=True)


GROWTH = [
    {"epoch": 1, "num_qkv_param_tokens": 36, "num_ffn_param_tokens": 120},
    {"epoch": 2, "num_qkv_param_tokens": 48, "num_proj_param_tokens": 32},
]


@pytest.mark.slow
@pytest.mark.parametrize("growth", [[], GROWTH])
def test_a_checkpoint_with_a_group_for_each_parameter_is_resumed_exactly(
    train, tmp_path, monkeypatch, growth
):
    """As earlier versions wrote it: mmengine's groups, and one for each parameter of growth."""

    def add_group(optimizer, others, template, parameter, lr_scale):
        group = copy.copy(template) | {"params": [parameter]}
        group |= {key: group[key] * lr_scale for key in ("lr", "initial_lr")}
        optimizer.add_param_group(group)
        return group

    hooks = [{"type": "GrowthHook", "schedule": growth, "new_lr_scale": 3.0}] if growth else []
    path, (config, *arguments) = tmp_path / "config.py", train.arguments
    path.write_text(f"_base_ = {config!r}\ncustom_hooks = {hooks!r}\n")
    train = copy.copy(train)
    train.arguments = [str(path), *arguments]
    options = (
        "--cfg-options",
        "default_hooks.checkpoint.by_epoch=False",
        "default_hooks.checkpoint.interval=4",
        "default_hooks.checkpoint.max_keep_ckpts=-1",
        "optim_wrapper.optimizer.fused=True",
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with monkeypatch.context() as earlier:
        earlier.setattr(carrying, "_join", add_group)
        train(whole, *options, "optim_wrapper.constructor=DefaultOptimWrapperConstructor")
    groups = last(whole)["optimizer"]["param_groups"]
    assert all(len(group["params"]) < 2 for group in groups)
    for start in (8, 16):  # the second is of the merged groups
        saved = (resumed if resumed.exists() else whole) / f"iter_{start}.pth"
        train(resumed, "--resume", str(saved), *options)
        one, other = last(whole), last(resumed)
        for part in ("state_dict", "ema_state_dict"):
            for name, tensor in one[part].items():
                assert torch.equal(tensor, other[part][name]), name
        assert len(other["optimizer"]["param_groups"]) < 6
