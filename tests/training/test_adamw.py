"""AdamW of the training computes the same as PyTorch's, whatever happens between its steps."""

import copy

import pytest
import torch
from torch import nn, optim

from tokenformer_vit.growth.resize import resize
from tokenformer_vit.training.adamw import AdamW

SHAPES = [(3, 5), (7,), (), (2, 3, 4)]


def pair(**options):
    """Make PyTorch's optimiser and ours, for equal parameters in two groups."""
    values = [torch.randn(shape) for shape in SHAPES]
    made = []
    for kind in (optim.AdamW, AdamW):
        own = [nn.Parameter(value.clone()) for value in values]
        groups = [{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.0, "lr": 0.02}]
        made.append(kind(groups, lr=0.05, weight_decay=0.3, fused=True, **options))
    return made


def parameters(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


def step(optimizers, without=()):
    """Make a step of both with equal gradients; parameters at some places get none."""
    for index, (one, other) in enumerate(zip(*map(parameters, optimizers), strict=True)):
        grad = None if index in without else torch.randn_like(one)
        one.grad, other.grad = grad, None if grad is None else grad.clone()
    for optimizer in optimizers:
        optimizer.step()


def check(optimizers):
    for one, other in zip(*map(parameters, optimizers), strict=True):
        assert torch.equal(one, other)
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        assert state.keys() == other["state"][index].keys()
        assert all(torch.equal(state[name], other["state"][index][name]) for name in state)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}])
def test_parameters_without_a_gradient(options):
    optimizers = pair(**options)
    # The number of gradients stays, but they are of other parameters; then a group has none.
    for without in ((), (0,), (1,), (1,), (0, 1), (2,), ()):
        step(optimizers, without)
        check(optimizers)


def test_a_loaded_state_and_a_changed_rate():
    optimizers = pair()
    step(optimizers)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    step(optimizers)
    for optimizer, state in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] *= 0.5
    step(optimizers)
    check(optimizers)
    assert all(state["step"] == 2 for state in optimizers[1].state.values())


def test_replaced_parameters_and_groups():
    optimizers = pair()
    step(optimizers)
    new = torch.randn(4, 5)
    for optimizer in optimizers:  # as growth does
        first, second = optimizer.param_groups
        state = optimizer.state.pop(first["params"][0])
        first["params"][0] = grown = nn.Parameter(new.clone())
        rows = torch.zeros(1, 5)
        moments = {name: torch.cat([state[name], rows]) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[grown] = {"step": state["step"].clone(), **moments}
        second["params"].append(nn.Parameter(new[0].clone()))
    step(optimizers)
    check(optimizers)
    for optimizer in optimizers:
        optimizer.param_groups.reverse()
    step(optimizers)
    check(optimizers)


def test_a_copy_steps_alone():
    stock, optimizer = pair()
    step((stock, optimizer))
    copied = copy.deepcopy(optimizer)
    before = [each.clone() for each in parameters(copied)]
    step((stock, optimizer))
    check((stock, optimizer))
    assert all(map(torch.equal, parameters(copied), before))


def test_a_gradient_scaler():
    optimizers = pair()
    for infinite in (0.0, 1.0, 0.0):
        for optimizer in optimizers:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(infinite)
        step(optimizers)
        check(optimizers)
    assert all(state["step"] == 2 for state in optimizers[1].state.values())


def test_a_closure():
    optimizers = pair()
    losses = []
    for optimizer in optimizers:

        def loss(optimizer=optimizer):
            optimizer.zero_grad()
            total = torch.stack([each.square().sum() for each in parameters(optimizer)]).sum()
            total.backward()
            return total

        losses.append(optimizer.step(loss))
    assert losses[0] == losses[1] > 0
    check(optimizers)


def test_moments_that_growth_resets():
    optimizers = pair()
    step(optimizers)
    for optimizer in optimizers:
        for parameter in parameters(optimizer)[:2]:
            del optimizer.state[parameter]  # as stack_blocks(..., moments="reset")
    step(optimizers)
    check(optimizers)


def test_parameters_and_moments_that_growth_makes_longer():
    optimizers = pair()
    step(optimizers)
    for optimizer in optimizers:
        changes = []
        for p in parameters(optimizer)[:2]:
            changes.append((p, torch.cat((p.detach(), torch.ones_like(p))), [p]))
        resize(changes, optimizer, "keep")
    step(optimizers)
    check(optimizers)
