"""Averaging all parameters at once gives the same as mmengine's average of each."""

import copy
from types import SimpleNamespace

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn

from tokenformer_vit.layers import Pattention
from tokenformer_vit.training import AccumulationEMAHook, ForeachMovingAverage
from tokenformer_vit.training.reports import validated_model


@pytest.mark.parametrize("options", [{}, {"interval": 3}, {"update_buffers": True}])
@pytest.mark.parametrize("momentum", [1e-4, 2e-4, 2e-3, 1e-2, 2e-2, 0.3])
def test_averages_are_mmengines_to_the_last_bit(momentum, options):
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
        assert mine.state_dict().keys() == stock.state_dict().keys()
        for name, tensor in stock.state_dict().items():
            assert torch.equal(mine.state_dict()[name], tensor), name


def test_a_model_that_grows_and_another_model():
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    average = ForeachMovingAverage(models[0], 0.25)
    expected = copy.deepcopy(models[0].state_dict())

    def update(model):
        average.update_parameters(model)
        first = average.steps == 1
        for name, tensor in model.state_dict().items():
            expected[name] = tensor if first else torch.lerp(expected[name], tensor, 0.25)
        for name, tensor in average.module.state_dict().items():
            assert torch.allclose(tensor, expected[name]), name

    for model in (*models, models[0], models[0]):
        update(model)
    layer = nn.Linear(3, 3)
    for each in (models[0], average.module):
        each.append(copy.deepcopy(layer))
    expected |= {f"2.{name}": tensor for name, tensor in layer.state_dict().items()}
    average.avg_parameters = dict(average.module.named_parameters())  # as growth does
    nn.init.zeros_(models[0][2].weight)
    models[0][0].weight = nn.Parameter(torch.ones(3, 3))  # another tensor in the same module
    update(models[0])


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("validated", [True, False])
def test_the_hook_validates_and_saves_the_average_or_the_model(validated, later):
    model = nn.Linear(3, 2)
    runner = SimpleNamespace(
        model=model, iter=0, optim_wrapper=SimpleNamespace(should_update=lambda: True)
    )
    hook = AccumulationEMAHook(momentum=0.5, validated=validated)
    hook.before_run(runner)
    hook.after_train_iter(runner, 0)
    average = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(2)
    hook.after_train_iter(runner, 1)
    average, own = average + 1, average + 2
    used = average if validated else own
    hook.before_val_epoch(runner)
    torch.testing.assert_close(model.weight.detach(), used)
    hook.after_val_epoch(runner)
    torch.testing.assert_close(model.weight.detach(), own)

    checkpoint = {"state_dict": model.state_dict(), "meta": {}}
    hook.before_save_checkpoint(runner, checkpoint)
    assert checkpoint["meta"] == {"averaged": validated}
    other = own if validated else average
    torch.testing.assert_close(checkpoint["state_dict"]["weight"], used)
    torch.testing.assert_close(checkpoint["ema_state_dict"]["module.weight"], other)
    resumed = AccumulationEMAHook(momentum=0.5, validated=later)
    resumed.before_run(SimpleNamespace(model=nn.Linear(3, 2)))
    loaded = copy.deepcopy(checkpoint)
    resumed.after_load_checkpoint(SimpleNamespace(_resume=True), loaded)
    torch.testing.assert_close(resumed.ema_model.module.weight.detach(), average)
    torch.testing.assert_close(loaded["state_dict"]["weight"], own)
    assert validated_model(SimpleNamespace(model=model, hooks=[hook])) is (
        hook.ema_model.module if validated else model
    )


def test_two_averages_are_refused_because_one_would_be_trained(train, config, tmp_path):
    path = tmp_path / "own.py"  # as the configs of mmpretrain have it
    hooks = [{"type": "EMAHook", "momentum": 4e-5}]
    path.write_text(f"_base_ = {str(config)!r}\ncustom_hooks = {hooks!r}\n")
    line = train.of(path).fails(tmp_path / "run")
    assert "2 hooks that average its weights" in line
    assert "AccumulationEMAHook, EMAHook" in line
    assert "default_hooks.ema=None" in line


def test_a_validation_of_other_weights_than_those_exported_is_refused(train, config, tmp_path):
    path = tmp_path / "own.py"
    hook = {"type": "EMAHook", "momentum": 4e-5, "evaluate_on_ema": False}
    path.write_text(
        f"_base_ = {str(config)!r}\ndefault_hooks = dict(ema=None)\ncustom_hooks = {[hook]!r}\n"
    )
    line = train.of(path).fails(tmp_path / "run")
    assert "evaluate_on_ema=False validates the model itself" in line
    assert "AccumulationEMAHook" in line


def test_the_hook_of_the_configs_uses_it():
    assert AccumulationEMAHook(momentum=0.1).ema_cfg["type"] == "ForeachMovingAverage"
    other = AccumulationEMAHook("ExponentialMovingAverage", momentum=0.1)
    assert other.ema_cfg["type"] == "ExponentialMovingAverage"
