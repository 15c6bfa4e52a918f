"""An optimiser continues after growth: old moments kept, new ones zero, groups in place."""

import copy
from typing import Any

import pytest
import timm
import timm.optim
import timm.scheduler
import torch
from timm.layers import GluMlp

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, join_tokens, stack_blocks, widen_mlp
from tokenformer_vit.layers.split import token_segments

SHAPE = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 16, "patch_size": 8}
X, Y = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])


def build(name="tokenformer_tiny", **kwargs):
    return timm.create_model(name, **SHAPE, num_classes=3, **kwargs)


def groups(model):
    """One group with decay and one without, as timm makes them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def step(model, optimizer, times=1):
    for _ in range(times):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lamb": lambda params: timm.optim.Lamb(params, lr=1e-3),
    "muon": lambda params: timm.optim.Muon(params, lr=1e-3),
    "nadamuon": lambda params: timm.optim.Muon(params, lr=1e-3, algo="adamuon", nesterov=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_old_moments_are_kept_and_new_ones_are_zero(make):
    model = build()
    optimizer = make(groups(model))
    step(model, optimizer, 3)
    old = model.blocks[0].mlp.key_param_tokens
    before = copy.deepcopy(dict(optimizer.state[old]))
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)

    new = model.blocks[0].mlp.key_param_tokens
    assert old not in optimizer.state
    assert any(parameter is new for parameter in optimizer.param_groups[0]["params"])
    assert len(optimizer.param_groups) == 2
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters()}
    for name, value in before.items():
        carried = optimizer.state[new][name]
        if isinstance(value, torch.Tensor) and value.dim():
            assert torch.equal(carried[:64], value), name
            assert not carried[64:].any(), name
        else:
            assert carried == value
    step(model, optimizer)


def test_an_old_pair_takes_the_step_it_would_have_taken():
    """Zero keys change neither the outputs nor the gradients of the old pairs."""
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    step(model, optimizer, 3)
    other = copy.deepcopy(model)
    others = OPTIMIZERS["adamw"](groups(other))
    others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    grow(model, num_ffn_param_tokens=128, num_qkv_param_tokens=32, optimizer=optimizer)
    step(model, optimizer)
    step(other, others)
    for name in ("mlp", "attn.query", "attn.proj"):
        grown, small = (each.blocks[1].get_submodule(name) for each in (model, other))
        for part in ("key_param_tokens", "value_param_tokens"):
            old = getattr(small, part)
            torch.testing.assert_close(getattr(grown, part)[: len(old)], old, rtol=0, atol=1e-6)


def test_moments_can_be_forgotten():
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments="reset")
    assert model.blocks[0].mlp.key_param_tokens not in optimizer.state
    assert model.blocks[0].attn.query.key_param_tokens in optimizer.state
    step(model, optimizer)


def test_new_pairs_have_a_learning_rate_of_their_own():
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    old, new = token_segments(model.blocks[0].mlp, "key_param_tokens")
    assert (len(old), len(new)) == (64, 32)
    assert old in optimizer.state
    (group,) = [g for g in optimizer.param_groups if any(p is new for p in g["params"])]
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0.1)
    assert len(optimizer.param_groups) == 3
    assert len(group["params"]) == 2 * 2  # keys and values of both blocks
    step(model, optimizer)

    # The next growth: what was new is old now, in the group of the old.
    moments = [optimizer.state[each]["exp_avg"].clone() for each in (old, new)]
    grow(model, num_ffn_param_tokens=128, optimizer=optimizer, new_lr_scale=10.0)
    older, newer = token_segments(model.blocks[0].mlp, "key_param_tokens")
    assert (len(older), len(newer)) == (96, 32)
    assert torch.equal(optimizer.state[older]["exp_avg"], torch.cat(moments))
    assert not optimizer.state[newer]["exp_avg"].any()
    assert any(p is newer for p in group["params"])
    assert len(optimizer.param_groups) == 3
    step(model, optimizer)

    # And without a rate of their own, all are one again.
    moments = torch.cat([optimizer.state[each]["exp_avg"] for each in (older, newer)])
    grow(model, num_ffn_param_tokens=160, optimizer=optimizer)
    (fused,) = token_segments(model.blocks[0].mlp, "key_param_tokens")
    carried = optimizer.state[fused]["exp_avg"]
    assert torch.equal(carried[:128], moments)
    assert not carried[128:].any()
    everything = [p for each in optimizer.param_groups for p in each["params"]]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters()}
    step(model, optimizer)


def test_a_new_group_counts_its_own_steps():
    model = build()
    optimizer = OPTIMIZERS["lamb"](groups(model))  # counts the steps of a group
    step(model, optimizer, 2)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    step(model, optimizer)
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3, 3]


def test_a_new_gate_is_no_matrix_for_muon():
    model = build(theta="softmax")
    parts = groups(model)
    for part, flag in zip(parts, (True, False), strict=True):
        part["use_muon"] = flag
    parts[0]["params"] = [p for p in parts[0]["params"] if p.dim() == 2]
    optimizer = OPTIMIZERS["muon"](parts)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    step(model, optimizer)
    gate = optimizer.state[model.blocks[1].mlp.gate]
    assert (gate["use_muon"], "exp_avg" in gate) == (False, True)
    assert optimizer.state[model.blocks[1].mlp.key_param_tokens]["use_muon"]


def test_pending_gradients_are_carried_over():
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    torch.nn.functional.cross_entropy(model(X), Y).backward()
    before = model.blocks[0].mlp.key_param_tokens.grad.clone()
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    gradient = model.blocks[0].mlp.key_param_tokens.grad
    assert torch.equal(gradient[:64], before)
    assert not gradient[64:].any()


def test_a_new_gate_joins_without_decay():
    model = build(theta="softmax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    gate = model.blocks[1].mlp.gate
    (group,) = [g for g in optimizer.param_groups if any(p is gate for p in g["params"])]
    assert group["weight_decay"] == 0
    step(model, optimizer, 2)
    grow(model, num_ffn_param_tokens=128, optimizer=optimizer)
    step(model, optimizer)


def test_a_new_gate_has_the_rate_of_the_old_pairs():
    model = build(theta="softmax")
    optimizer = OPTIMIZERS["adamw"](groups(model))
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    layer = model.blocks[1].mlp
    rates = {p: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    old, new = token_segments(layer, "key_param_tokens")
    assert (rates[layer.gate], rates[old], rates[new]) == (1e-3, 1e-3, 1e-2)


SCHEDULERS = {
    "timm": lambda optimizer: timm.scheduler.CosineLRScheduler(optimizer, t_initial=9),
    "torch": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda t: 0.9**t, lambda t: 0.9**t, lambda t: 1][: len(optimizer.param_groups)]
    ),
}


def test_a_scheduler_from_before_growth_is_refused_and_a_new_one_is_not():
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    old = SCHEDULERS["timm"](optimizer)
    step(model, optimizer)
    old.step(1)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    step(model, optimizer)  # the same rates as before
    old.step(2)
    with pytest.raises(InputError, match=r"is still 0\.00969.* build a new scheduler"):
        step(model, optimizer)
    new = SCHEDULERS["timm"](optimizer)
    for epoch in (1, 2):
        new.step(epoch)
        step(model, optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([rates[0], rates[0], 10 * rates[0]])
        assert rates[0] < 1e-3


def test_a_scheduler_may_leave_the_rate_of_new_pairs_as_it_is():
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    scheduler = SCHEDULERS["torch"](optimizer)
    for _ in range(2):
        step(model, optimizer)
        scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([8.1e-4, 8.1e-4, 1e-2])


def test_a_one_cycle_from_before_growth_keeps_the_ratio_of_the_rates():
    model = build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    step(model, optimizer)
    scheduler.step()
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=0.1)
    for _ in range(6):  # up and down
        step(model, optimizer)
        scheduler.step()
        old, new = [group["lr"] for group in optimizer.param_groups]
        assert new == pytest.approx(0.1 * old)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_a_fused_step_with_the_state_from_before_growth_is_refused(make):
    """It would read and write outside the tensors."""
    model = build()
    optimizer = make(model.parameters())
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    grown = grow(copy.deepcopy(model), num_ffn_param_tokens=96)
    fresh = make(grown.parameters())
    step(grown, fresh)
    fresh.load_state_dict(state)
    with pytest.raises(InputError, match=r"as if it was saved before growth: .* optimizer=optim"):
        step(grown, fresh)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    step(model, optimizer)


def test_net2net_and_stacking_carry_over(rounding):
    model: Any = build("vit_tiny_patch16_224").eval()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    step(model, optimizer)
    before, moments = model(X), optimizer.state[model.blocks[0].mlp.fc2.weight]["exp_avg"].clone()
    widen_mlp(model, 100, optimizer=optimizer)
    limit = rounding(model) * before.abs().max().item()
    torch.testing.assert_close(model(X), before, rtol=0, atol=limit)
    assert torch.equal(optimizer.state[model.blocks[0].mlp.fc2.weight]["exp_avg"][:, :64], moments)
    again = timm.create_model("vit_tiny_patch16_224", **{**SHAPE, **model._model_args})
    again.load_state_dict(model.state_dict())
    step(model, optimizer)
    # The copies of a neuron part.
    fc1 = model.blocks[0].mlp.fc1.weight
    assert torch.unique(fc1, dim=0).shape == fc1.shape

    stack_blocks(model, 4, optimizer=optimizer)
    assert len(model.blocks) == 4
    for part, like in zip(model.blocks[2].parameters(), model.blocks[0].parameters(), strict=True):
        assert torch.equal(part, like)
    assert len({id(p) for g in optimizer.param_groups for p in g["params"]}) == len(
        list(model.parameters())
    )
    step(model, optimizer)
    assert not torch.equal(model.blocks[2].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        own = [places[parameter] for parameter in group["params"]]
        assert own == sorted(own)


def test_state_that_cannot_be_carried_over_is_refused():
    for make in (torch.optim.Adafactor, timm.optim.MADGRAD):
        model = build()
        optimizer = make(model.parameters(), lr=1e-3)
        step(model, optimizer)
        with pytest.raises(InputError, match="give moments='reset'"):
            grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments="reset")
        step(model, optimizer)


@pytest.mark.parametrize("matrices", [[torch.eye(2)], (torch.eye(2),), {"left": torch.eye(2)}])
def test_several_tensors_in_one_entry_of_a_state_are_refused(matrices):
    """As timm's Kron keeps them, which the new parameters would share."""
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step(model, optimizer)
    optimizer.state[model.blocks[0].mlp.key_param_tokens]["Q"] = matrices
    with pytest.raises(InputError, match=r"SGD has a state \(Q\) .*give moments='reset'"):
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    assert model.blocks[0].mlp.num_param_tokens == 64  # nothing was changed
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments="reset")
    step(model, optimizer)


def test_state_that_does_not_start_at_zero_is_refused():
    model = build()
    optimizer = torch.optim.Rprop(model.parameters())
    step(model, optimizer)
    with pytest.raises(InputError, match=r"Rprop has .*not zero at the start.* moments='reset'"):
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer)


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_one_state_for_all_parameters_is_refused(moments):
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InputError, match=r"LBFGS keeps one state .* build a new one after growth"):
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments=moments)
    assert model.blocks[0].mlp.num_param_tokens == 64  # nothing was changed


def test_lookahead_goes_on_until_it_has_slow_weights():
    model = build()
    optimizer = timm.optim.Lookahead(torch.optim.AdamW(groups(model), lr=1e-3), k=3)
    step(model, optimizer)
    moments = optimizer._base_optimizer.state[model.blocks[0].mlp.key_param_tokens]["exp_avg"]
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    state = optimizer._base_optimizer.state
    assert torch.equal(state[model.blocks[0].mlp.key_param_tokens]["exp_avg"][:64], moments)
    step(model, optimizer, 2)  # the third one averages
    with pytest.raises(InputError, match=r"AdamW has a state \(lookahead_slow_buff\)"):
        grow(model, num_ffn_param_tokens=128, optimizer=optimizer)
    grow(model, num_ffn_param_tokens=128, optimizer=optimizer, moments="reset")
    step(model, optimizer, 3)
    assert {id(p) for p in state} == {id(p) for p in model.parameters()}


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer, which never calls the initialiser of its base."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def add_param_group(self, param_group):
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):  # type: ignore[override]
        self.optimizer.step(closure)


@pytest.mark.parametrize("how", [{}, {"new_lr_scale": 2.0}])
def test_a_wrapped_optimiser_goes_on(how):
    model = build(theta="softmax")  # whose gates need a group of their own
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = Wrapper(inner)
    step(model, optimizer)
    moments = inner.state[model.blocks[0].mlp.key_param_tokens]["exp_avg"]
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how)
    held = [p for group in inner.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    old = token_segments(model.blocks[0].mlp, "key_param_tokens")[0]
    assert torch.equal(inner.state[old]["exp_avg"][:64], moments)
    step(model, optimizer)


@pytest.mark.parametrize("how", [{}, {"freeze": "old"}, {"new_lr_scale": 2.0}])
def test_an_optimiser_of_named_parameters_goes_on(how):
    model = build()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how)
    new = token_segments(model.blocks[0].mlp, "key_param_tokens")[-1]
    before = new.detach().clone()
    step(model, optimizer, 2)
    assert not torch.equal(new, before)


def test_an_optimiser_of_what_is_trained_goes_on_when_more_is_frozen():
    model = grow(build(), num_ffn_param_tokens=96, freeze="old")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=128, freeze="old", optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


@pytest.mark.parametrize("one_group", [True, False])
@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ({}, {"split": True}),
        ({}, {"new_lr_scale": 2.0}),
        ({}, {"freeze": "old"}),
        ({"theta": "softmax"}, {"split": True}),
        ({"pattention_args": {"learn_tau": True}}, {"split": True, "nested": True}),
    ],
    ids=["split", "rate", "frozen", "gate", "tau"],
)
def test_parameters_stay_in_the_order_of_the_model(arguments, how, one_group):
    """PyTorch loads the state of an optimiser by position."""
    model = build(**arguments)
    parts = [{"params": list(model.parameters())}] if one_group else groups(model)
    optimizer = torch.optim.AdamW(parts, lr=1e-3)
    step(model, optimizer)
    for change in (
        lambda: grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how),
        lambda: grow(model, 32, 32, 128, optimizer=optimizer, **how),
        lambda: join_tokens(model, optimizer),
    ):
        change()
        places = {parameter: place for place, parameter in enumerate(model.parameters())}
        for group in optimizer.param_groups:
            own = [places[parameter] for parameter in group["params"]]
            assert own == sorted(own)


def test_an_optimiser_of_the_grown_model_loads_the_state():
    model = build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=96, split=True, optimizer=optimizer)
    step(model, optimizer)
    other = copy.deepcopy(model)
    rebuilt = OPTIMIZERS["adamw"](other.parameters())
    rebuilt.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other, rebuilt)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_parameters_of_another_module_keep_their_place():
    model, head = build(), torch.nn.Linear(3, 3)
    mixed = torch.optim.SGD([head.weight, *model.parameters(), head.bias], 0.1)
    grow(model, num_ffn_param_tokens=96, split=True, optimizer=mixed)
    params = mixed.param_groups[0]["params"]
    assert params[0] is head.weight
    assert params[-1] is head.bias
    assert all(a is b for a, b in zip(params[1:-1], model.parameters(), strict=True))

    model = build()
    own = torch.optim.SGD(list(model.parameters())[::-1], 0.1)  # an order of the user's
    before = [id(p) for p in own.param_groups[0]["params"]]
    grow(model, num_ffn_param_tokens=96, split=True, optimizer=own)
    now = [id(p) for p in own.param_groups[0]["params"]]
    kept = set(before) & set(now)
    assert [p for p in before if p in kept] == [p for p in now if p in kept]


def test_what_cannot_be_done_is_said():
    model = build()
    with pytest.raises(InputError, match="does not have all parameters"):
        grow(model, num_ffn_param_tokens=96, optimizer=torch.optim.SGD(build().parameters(), 0.1))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputError, match="moments is 'zero'"):
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments="zero")
    assert model.blocks[0].mlp.num_param_tokens == 64  # nothing was changed
    vit = build("vit_tiny_patch16_224")
    with pytest.raises(InputError, match="is GluMlp"):
        widen_mlp(build("vit_tiny_patch16_224", mlp_layer=GluMlp), 100)
    with pytest.raises(InputError, match="new_lr_scale must be above 0"):
        grow(build(), num_ffn_param_tokens=96, new_lr_scale=0.0)
    with pytest.raises(InputError, match="give more than that, not 64"):
        widen_mlp(vit, 64)
    with pytest.raises(InputError, match="has 2 blocks; give more"):
        stack_blocks(vit, 2)
    for grown in (widen_mlp, stack_blocks):
        with pytest.raises(InputError, match="to grow a TokenFormer, use"):
            grown(build(), 100)
