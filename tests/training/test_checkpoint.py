"""A state that does not fit the run is found before it is loaded; one that does is copied."""

from types import SimpleNamespace

import pytest
import timm.optim
import torch
from torch import nn

from tokenformer_vit.training.checkpoint import copy_state, state_fault


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
        param_schedulers=None,
        max_epochs=3,
        train_loop=None,
        hooks=[],
        model=model,
        optim_wrapper=SimpleNamespace(optimizer=optimizer),
    )


STATE = {"numpy": [[0] * 624, 624, 0, 0.0]}
RESUMED = {"iters_per_epoch": 3, "states": 4, "rng": [STATE]}


def checkpoint_of(run):
    state = run.optim_wrapper.optimizer.state_dict()
    state = {**state, "state": {n: dict(each) for n, each in state["state"].items()}}
    return {
        "meta": {"iter": 2, "epoch": 0},
        "param_schedulers": [],
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
    "of half of the parameters": of_state(lambda state: [state.pop(n) for n in (0, 1)]),
    "none": of_state(dict.clear),
    "unknown parameters": of_state(lambda state: state.update({9: state.pop(5)})),
    "exchanged": of_state(lambda state: state.update({0: state[5], 5: state[0]})),
    "of another number of schedules": lambda checkpoint: checkpoint.update(param_schedulers=[{}]),
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


@pytest.mark.parametrize(("words", "place"), [(624, 625), (624, -1), (600, 3)])
def test_a_random_state_that_numpy_would_read_outside_of_is_found(run, words, place):
    resumed = {**RESUMED, "rng": [STATE, {"numpy": [[0] * words, place, 0, 0.0]}]}
    assert f"at {place} of {words} words" in str(state_fault(run, checkpoint_of(run), resumed))


LAYOUTS = {
    "expanded": lambda moment: moment[:1, :1].expand(moment.shape),
    "in order of columns": lambda moment: moment.t().contiguous().t(),
    "sparse": lambda moment: moment.to_sparse(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_moments_of_any_layout_give_the_steps_of_plain_ones(run, name):
    checkpoint, optimizer = checkpoint_of(run), run.optim_wrapper.optimizer
    state = checkpoint["optimizer"]["state"][0]
    state["exp_avg"] = LAYOUTS[name](torch.randn(2, 3))
    expected, weight = state["exp_avg"].to_dense().clone(), run.model[0].weight
    assert state_fault(run, checkpoint, RESUMED) is None
    copy_state(optimizer, checkpoint["optimizer"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    own = optimizer.state[weight]["exp_avg"]
    assert own.stride() == weight.stride()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.testing.assert_close(own, 0.9 * expected + 0.1)


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
    checkpoint, resumed = checkpoint_of(run), {**RESUMED, "states": len(optimizer.state)}
    assert state_fault(run, checkpoint, resumed) is None
    saved = checkpoint["optimizer"]["state"][0]
    if timm.optim.__name__ in kind.__module__:  # as the tables of 8-bit optimisers
        saved["table"] = torch.zeros(256)
        assert state_fault(run, checkpoint, resumed) is None
    for key in saved.keys() & {"exp_avg", "momentum_buffer"} if "factor" not in str(kind) else ():
        saved[key] = saved[key].T
        assert state_fault(run, checkpoint, resumed)
