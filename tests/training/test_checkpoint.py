"""A checkpoint whose state does not fit the run is found before any of it is loaded."""

from types import SimpleNamespace

import pytest
import timm.optim
import torch
from torch import nn

from tokenformer_vit.training.checkpoint import state_fault


@pytest.fixture
def run():
    """A model with a frozen layer after two steps, as far as a runner shows it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].requires_grad_(False)
    groups = [{"params": [each]} for each in model.parameters()]
    optimizer = torch.optim.AdamW(groups, fused=True)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    return SimpleNamespace(
        max_iters=9,
        max_epochs=3,
        train_loop=None,
        hooks=[],
        model=model,
        optim_wrapper=SimpleNamespace(optimizer=optimizer),
    )


RESUMED = {"iters_per_epoch": 3}


def checkpoint_of(run):
    state = run.optim_wrapper.optimizer.state_dict()
    state = {**state, "state": {n: dict(each) for n, each in state["state"].items()}}
    return {
        "meta": {"iter": 2, "epoch": 0},
        "state_dict": run.model.state_dict(),
        "optimizer": state,
    }


def set_moment(change):
    def damage(checkpoint):
        state = checkpoint["optimizer"]["state"][0]
        state["exp_avg"] = change(state["exp_avg"])

    return damage


def of_state(damage):
    return lambda checkpoint: damage(checkpoint["optimizer"]["state"])


DAMAGES = {
    "transposed": set_moment(torch.t),
    "0-d": set_moment(torch.sum),
    "half": set_moment(torch.Tensor.half),
    "steps": of_state(lambda state: state[0].update(step=torch.ones(2))),
    "unknown parameters": of_state(lambda state: state.update({9: state.pop(5)})),
    "exchanged": of_state(lambda state: state.update({0: state[5], 5: state[0]})),
    "fewer groups": lambda checkpoint: checkpoint["optimizer"]["param_groups"].pop(),
    "a parameter twice": lambda checkpoint: checkpoint["optimizer"]["param_groups"][1].update(
        params=[0]
    ),
    "after the end": lambda checkpoint: checkpoint["meta"].update(iter=10**6),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_state_that_does_not_fit_is_found(run, name):
    checkpoint = checkpoint_of(run)
    assert state_fault(run, checkpoint, RESUMED) is None
    DAMAGES[name](checkpoint)
    assert state_fault(run, checkpoint, RESUMED)


OTHERS = [
    *(torch.optim.SGD, torch.optim.NAdam, torch.optim.Adafactor, torch.optim.Rprop),
    *(timm.optim.Lamb, timm.optim.Muon, timm.optim.Lion, timm.optim.Adafactor),
    timm.optim.AdafactorBigVision,
]


@pytest.mark.parametrize("kind", OTHERS)
def test_the_state_of_other_optimisers_is_sound(run, kind):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = run.optim_wrapper.optimizer = kind(run.model.parameters(), lr=1e-3, **options)
    optimizer.step()
    checkpoint = checkpoint_of(run)
    assert state_fault(run, checkpoint, RESUMED) is None
    saved = checkpoint["optimizer"]["state"][0]
    for key in saved.keys() & {"exp_avg", "momentum_buffer"}:
        saved[key] = saved[key].T
        assert state_fault(run, checkpoint, RESUMED)
