"""An optimizer continues after growth: old moments kept, new ones zero, groups in place."""

import copy
from typing import Any

import pytest
import timm
import timm.optim
import timm.scheduler
import torch
import torch.nn.functional as F

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, join_tokens
from tokenformer_vit.layers.split import token_segments
from tokenformer_vit.training.net2net import stack_blocks, widen_mlp

SHAPE = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 16, "patch_size": 8}
X, Y = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])


def build(name="tokenformer_tiny", **kwargs) -> Any:
    return timm.create_model(name, **SHAPE, num_classes=3, **kwargs)


def groups(model):
    """One group with decay and one without, as timm makes them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def step(model, optimizer, times=1):
    for _ in range(times):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def held(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_in_order(model, optimizer):
    """PyTorch loads the state of an optimizer by position."""
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    assert {*places} == {*held(optimizer)}
    for group in optimizer.param_groups:
        own = [places[parameter] for parameter in group["params"]]
        assert own == sorted(own)


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose iterate z starts at the parameter, as in the schedulefree package."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, 0.3)


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lion": lambda params: timm.optim.Lion(params, lr=1e-3),
    "lamb": lambda params: timm.optim.Lamb(params, lr=1e-3),
    "muon": lambda params: timm.optim.Muon(params, lr=1e-3),
    "nadamuon": lambda params: timm.optim.Muon(params, lr=1e-3, algo="adamuon", nesterov=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_old_moments_are_kept_and_new_ones_are_zero(make):
    model = build()
    optimizer = make(groups(model))
    step(model, optimizer, 3)
    keys, before = model.blocks[0].mlp.key_param_tokens, held(optimizer)
    state = {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state[keys].items()}
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)

    assert model.blocks[0].mlp.key_param_tokens is keys
    assert all(a is b for a, b in zip(held(optimizer), before, strict=True))
    for name, value in state.items():
        carried = optimizer.state[keys][name]
        if isinstance(value, torch.Tensor) and value.dim():
            assert torch.equal(carried[:64], value), name
            assert not carried[64:].any(), name
        else:
            assert carried == value
    step(model, optimizer)
    again = make(groups(model))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = copy.deepcopy(model)
    step(model, optimizer)
    with torch.no_grad():  # the same weights, so the same step
        for parameter, old in zip(model.parameters(), other.parameters(), strict=True):
            stepped = parameter.clone()
            parameter.copy_(old)
            old.copy_(stepped)
    step(model, again)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, expected)


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


def test_outputs_and_gradients_from_before_growth_may_be_alive():
    model = build()
    optimizer = OPTIMIZERS["foreach"](groups(model))
    F.cross_entropy(model(X), Y).backward()
    gradient = model.blocks[0].mlp.key_param_tokens.grad.clone()
    loss = F.cross_entropy(model(X), Y)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    pending = model.blocks[0].mlp.key_param_tokens.grad
    assert torch.equal(pending[:64], gradient)
    assert not pending[64:].any()
    F.cross_entropy(model(X), Y).backward()
    loss.backward()  # reaches the tensors of before
    optimizer.step()


def test_new_pairs_have_a_learning_rate_of_their_own():
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    step(model, optimizer)
    keys = model.blocks[0].mlp.key_param_tokens
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    old, new = token_segments(model.blocks[0].mlp, "key_param_tokens")
    assert old is keys
    assert (len(old), len(new)) == (64, 32)
    (group,) = [g for g in optimizer.param_groups if any(p is new for p in g["params"])]
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0.1)
    assert len(optimizer.param_groups) == 3
    assert len(group["params"]) == 2 * 2  # keys and values of both blocks
    step(model, optimizer)

    # The next growth: what was new is old now, and the same objects hold the newest pairs.
    moments = [optimizer.state[each]["exp_avg"].clone() for each in (old, new)]
    grow(model, num_ffn_param_tokens=128, optimizer=optimizer, new_lr_scale=10.0)
    older, newer = token_segments(model.blocks[0].mlp, "key_param_tokens")
    assert older is old
    assert newer is new
    assert (len(older), len(newer)) == (96, 32)
    assert torch.equal(optimizer.state[older]["exp_avg"], torch.cat(moments))
    assert newer not in optimizer.state
    assert len(optimizer.param_groups) == 3
    step(model, optimizer)

    # And without a rate of their own, all are one again.
    moments = torch.cat([optimizer.state[each]["exp_avg"] for each in (older, newer)])
    grow(model, num_ffn_param_tokens=160, optimizer=optimizer)
    assert model.blocks[0].mlp.key_param_tokens is keys
    carried = optimizer.state[keys]["exp_avg"]
    assert torch.equal(carried[:128], moments)
    assert not carried[128:].any()
    assert_in_order(model, optimizer)
    step(model, optimizer)


def test_a_new_group_counts_its_own_steps():
    model = build()
    optimizer = OPTIMIZERS["lamb"](groups(model))  # counts the steps of a group
    step(model, optimizer, 2)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    step(model, optimizer)
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3, 3]


def test_a_new_gate_is_no_matrix_has_no_decay_and_the_rate_of_old_pairs():
    model = build(theta="softmax")
    parts = groups(model)
    for part, flag in zip(parts, (True, False), strict=True):
        part["use_muon"] = flag
    parts[0]["params"] = [p for p in parts[0]["params"] if p.dim() == 2]
    optimizer = OPTIMIZERS["muon"](parts)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, new_lr_scale=10.0)
    layer = model.blocks[1].mlp
    assert any(p is layer.gate for p in optimizer.param_groups[1]["params"])
    found = {p: group for group in optimizer.param_groups for p in group["params"]}
    old, new = token_segments(layer, "key_param_tokens")
    rates = [found[each]["lr"] for each in (layer.gate, old, new)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-2])
    step(model, optimizer)
    assert "exp_avg" in optimizer.state[layer.gate]

    model = build(theta="softmax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    gates = [block.mlp.gate for block in model.blocks]
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert {*gates} <= {*optimizer.param_groups[1]["params"]}
    step(model, optimizer, 2)
    grow(model, num_ffn_param_tokens=128, optimizer=optimizer)
    assert model.blocks[1].mlp.gate is gates[1]
    step(model, optimizer)


SCHEDULERS = {
    "timm": lambda optimizer: timm.scheduler.CosineLRScheduler(optimizer, t_initial=9),
    "torch": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("how", [{}, {"split": True}])
def test_a_scheduler_from_before_growth_goes_on(make, how):
    runs = []
    for grows in (True, False):
        model = build()
        optimizer = OPTIMIZERS["adamw"](groups(model))
        scheduler, rates = make(optimizer), []
        for epoch in range(1, 6):
            step(model, optimizer)
            scheduler.step(*([epoch] if make is SCHEDULERS["timm"] else []))
            if grows and epoch == 2:
                grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how)
            rates.append([group["lr"] for group in optimizer.param_groups])
        runs.append(rates)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["adamw", "foreach", "fused", "sgd", "lion"])
def test_an_optimizer_that_was_not_given_does_not_step(name):
    """A fused one would read and write outside the tensors."""
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=96)
    kind = InputError if name == "fused" else RuntimeError
    with pytest.raises(kind, match=r"optimizer=optimizer\)" if name == "fused" else "size"):
        step(model, optimizer)


def test_net2net_and_stacking_carry_over(rounding):
    model = build("vit_tiny_patch16_224").eval()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    step(model, optimizer)
    before, moments = model(X), optimizer.state[model.blocks[0].mlp.fc2.weight]["exp_avg"].clone()
    widen_mlp(model, 100, optimizer=optimizer)
    limit = rounding(model) * before.abs().max().item()
    torch.testing.assert_close(model(X), before, rtol=0, atol=limit)
    carried = optimizer.state[model.blocks[0].mlp.fc2.weight]["exp_avg"]
    assert torch.equal(carried[:, :64], moments)
    assert not carried[:, 64:].any()
    again = timm.create_model("vit_tiny_patch16_224", **{**SHAPE, **model._model_args})
    again.load_state_dict(model.state_dict())
    step(model, optimizer)

    stack_blocks(model, 4, optimizer=optimizer)
    for part, like in zip(model.blocks[2].parameters(), model.blocks[0].parameters(), strict=True):
        assert torch.equal(part, like)
    assert_in_order(model, optimizer)
    step(model, optimizer)
    assert not torch.equal(model.blocks[2].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)


def test_a_state_that_starts_at_the_parameter_starts_there_for_new_pairs():
    model = build()
    optimizer = ScheduleFree(model.parameters())
    step(model, optimizer, 2)
    values = model.blocks[0].mlp.value_param_tokens
    z = optimizer.state[values]["z"].clone()
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    assert torch.equal(optimizer.state[values]["z"], torch.cat((z, values[64:])))
    step(model, optimizer)

    model = build()
    optimizer = timm.optim.Lookahead(torch.optim.AdamW(groups(model), lr=1e-3), k=2)
    step(model, optimizer, 2)  # the second one averages
    values = model.blocks[0].mlp.value_param_tokens
    slow = optimizer._base_optimizer.state[values]["lookahead_slow_buff"].clone()
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    carried = optimizer._base_optimizer.state[values]["lookahead_slow_buff"]
    assert torch.equal(carried, torch.cat((slow, values[64:])))
    step(model, optimizer, 2)


class Coded(torch.Tensor):
    """A state of a class of its own, as of 8-bit optimizers, that cannot be made larger."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.new_zeros:
            raise NotImplementedError("Coded has no new_zeros")
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Coded):
    """A state that becomes an ordinary tensor when it is made larger."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "odd",
    [
        lambda state: state["momentum_buffer"].as_subclass(Coded),
        lambda state: state["momentum_buffer"].as_subclass(Plain),
        lambda state: state["momentum_buffer"].t().clone(),
        lambda state: [torch.eye(2)],  # as timm's Kron keeps its matrices
    ],
)
def test_growth_that_an_optimizer_cannot_follow_changes_nothing(odd):
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step(model, optimizer)
    state = optimizer.state[model.blocks[1].mlp.value_param_tokens]  # the last one that grows
    state["momentum_buffer"] = odd(state)
    before = copy.deepcopy(model.state_dict())
    shapes = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    with pytest.raises(InputError, match=r"SGD .*momentum_buffer.* give moments='reset'"):
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    assert model.blocks[0].mlp.num_param_tokens == 64
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
    now = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(a is b for a, b in zip(now, shapes, strict=True))
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments="reset")
    step(model, optimizer)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
def test_optimizers_of_torchao_follow_or_change_nothing(kind):
    optim = pytest.importorskip("torchao.optim")
    model = timm.create_model("tokenformer_tiny", **{**SHAPE, "embed_dim": 64}, num_classes=3)
    optimizer = getattr(optim, kind)(model.parameters(), lr=1e-3)
    step(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    try:
        grow(model, num_ffn_param_tokens=512, optimizer=optimizer)
    except InputError:
        assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
        grow(model, num_ffn_param_tokens=512, optimizer=optimizer, moments="reset")
    step(model, optimizer)


@pytest.mark.parametrize("make", [torch.optim.Adafactor])
def test_a_state_of_another_shape_is_refused(make):
    model = build()
    optimizer = make(model.parameters(), lr=1e-3)
    step(model, optimizer)
    with pytest.raises(InputError, match="give moments='reset'"):
        grow(model, num_ffn_param_tokens=96, optimizer=optimizer)
    assert model.blocks[0].mlp.num_param_tokens == 64
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, moments="reset")
    step(model, optimizer)


def test_other_optimizers_are_refused():
    model = build()
    for optimizer, how, said in (
        (torch.optim.LBFGS(model.parameters()), {"moments": "reset"}, "LBFGS .* build a new one"),
        (torch.optim.SGD(build().parameters(), 0.1), {}, "does not have all parameters"),
        (torch.optim.SGD(model.parameters(), 0.1), {"moments": "zero"}, "moments is 'zero'"),
    ):
        with pytest.raises(InputError, match=said):
            grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how)
        assert model.blocks[0].mlp.num_param_tokens == 64  # nothing was changed


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer, which never calls the initialiser of its base."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):  # type: ignore[override]
        self.optimizer.step(closure)


@pytest.mark.parametrize("how", [{}, {"new_lr_scale": 2.0}])
def test_a_wrapped_optimizer_goes_on(how):
    model = build(theta="softmax")  # whose gates need a group of their own
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = Wrapper(inner)
    step(model, optimizer)
    keys = model.blocks[0].mlp.key_param_tokens
    moments = inner.state[keys]["exp_avg"].clone()
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how)
    assert_in_order(model, inner)
    assert torch.equal(inner.state[keys]["exp_avg"][:64], moments)
    step(model, optimizer)


@pytest.mark.parametrize("how", [{}, {"freeze": "old"}, {"new_lr_scale": 2.0}])
def test_an_optimizer_of_named_parameters_goes_on(how):
    model = build()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=96, optimizer=optimizer, **how)
    new = token_segments(model.blocks[0].mlp, "key_param_tokens")[-1]
    before = new.detach().clone()
    step(model, optimizer, 2)
    assert not torch.equal(new, before)


def test_an_optimizer_of_what_is_trained_goes_on_when_more_is_frozen():
    model = grow(build(), num_ffn_param_tokens=96, freeze="old")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=128, freeze="old", optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    join_tokens(model, optimizer)
    trained = {p for p in model.parameters() if p.requires_grad}
    assert trained == {*held(optimizer)}
    step(model, optimizer)


@pytest.mark.parametrize("one_group", [True, False])
@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ({}, {"split": True}),
        ({}, {"new_lr_scale": 2.0}),
        ({"theta": "softmax"}, {"split": True}),
        ({"pattention_args": {"learn_tau": True}}, {"split": True, "nested": True}),
    ],
    ids=["split", "rate", "gate", "tau"],
)
def test_parameters_stay_in_the_order_of_the_model(arguments, how, one_group):
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
        assert_in_order(model, optimizer)
        step(model, optimizer)
    rebuilt = timm.create_model("tokenformer_tiny", **{**SHAPE, "num_classes": 3}, **arguments)
    grow(rebuilt, 32, 32, 128, nested=how.get("nested", False))
    names = [name for name, _ in rebuilt.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_a_nested_tau_that_is_learned_keeps_its_state():
    model = build(nested=(0.5,), pattention_args={"learn_tau": True})
    optimizer = OPTIMIZERS["foreach"](groups(model))
    for size in (0.5, None):
        model.set_size(size)
        step(model, optimizer)
    taus = model.blocks[0].mlp.nested_tau
    moment = optimizer.state[taus]["exp_avg"].clone()
    grow(model, num_ffn_param_tokens=128, optimizer=optimizer)
    assert model.blocks[0].mlp.nested_tau is taus
    assert torch.equal(optimizer.state[taus]["exp_avg"], torch.cat((moment, torch.zeros(1))))
