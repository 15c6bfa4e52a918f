"""An optimizer continues after growth: old moments kept, new ones zero, groups in place."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import timm.optim
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, join_tokens, pattention_layers
from tokenformer_vit.layers.pattention import TOKENS

from .conftest import LINEAR, assert_equal, build, images, step


def groups(model):
    """One group with decay and one without, as timm makes them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def without_params(group):
    return {name: value for name, value in group.items() if name != "params"}


def assert_in_order(model, optimizer):
    """PyTorch loads the state of an optimizer by position."""
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    held = [[places[p] for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(place for own in held for place in own) == [*range(len(places))]
    assert held == [sorted(own) for own in held]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lion": lambda params: timm.optim.Lion(params, lr=1e-3),
    "lamb": lambda params: timm.optim.Lamb(params, lr=1e-3),
    "muon": lambda params: timm.optim.Muon(params, lr=1e-3),
}


@pytest.mark.parametrize(
    ("name", "how", "split"),
    [(name, {}, False) for name in OPTIMIZERS]
    + [("adamw", LINEAR, each) for each in (False, True)],
)
def test_old_moments_are_kept_and_new_ones_are_zero(name, how, split):
    model, make = build(**how), OPTIMIZERS[name]
    parameters = dict(model.named_parameters())
    optimizer = make(groups(model))
    step(model, optimizer, 3)
    held, settings = [*optimizer.param_groups], [without_params(g) for g in optimizer.param_groups]
    states = {p: copy.deepcopy(optimizer.state[p]) for p in model.blocks[0].mlp.parameters()}
    grow(model, num_ffn_param_tokens=192, optimizer=optimizer, split=split)

    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert_in_order(model, optimizer)
    # Schedulers, which hold the groups, go on.
    assert all(g is before for g, before in zip(optimizer.param_groups, held, strict=True))
    assert [without_params(group) for group in held] == settings
    for parameter, state in states.items():
        for key, value in state.items():
            carried = optimizer.state[parameter][key]
            if isinstance(value, torch.Tensor) and value.dim():
                assert torch.equal(carried[: len(value)], value), key
                assert not carried[len(value) :].any(), key
            else:
                assert carried == value
    step(model, optimizer)

    # A model that is built anew with these counts takes the same steps with the loaded state.
    rebuilt, x = grow(build(**how), num_ffn_param_tokens=192, split=split), images(4)
    rebuilt.load_state_dict(model.state_dict())
    again = make(groups(rebuilt))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, each in ((model, optimizer), (rebuilt, again)):
        step(network, each, 2, x)
        step(join_tokens(network, each), each, 1, x)
    assert_equal(rebuilt.state_dict(), model.state_dict())


def test_new_pairs_have_a_learning_rate_of_their_own():
    model = build()
    optimizer = OPTIMIZERS["lamb"](groups(model))  # counts the steps of a group in a tensor
    step(model, optimizer, 2)
    keys = model.blocks[0].mlp.key_param_tokens
    grow(model, num_ffn_param_tokens=192, optimizer=optimizer, new_lr_scale=10.0)
    old, new = model.blocks[0].mlp.parts(TOKENS[0])
    assert old is keys
    assert (len(old), len(new)) == (128, 64)
    group = optimizer.param_groups[2]
    assert any(p is new for p in group["params"])
    assert (len(group["params"]), group["lr"], group["weight_decay"]) == (4, 1e-2, 0.1)
    step(model, optimizer)
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3, 3]

    # The next growth: what was new is old now.
    moments = [optimizer.state[each]["exp_avg"].clone() for each in (old, new)]
    grow(model, num_ffn_param_tokens=256, optimizer=optimizer, new_lr_scale=10.0)
    older, newer = model.blocks[0].mlp.parts(TOKENS[0])
    assert older is old
    assert (len(older), len(newer)) == (192, 64)
    assert torch.equal(optimizer.state[older]["exp_avg"], torch.cat(moments))
    assert new not in optimizer.state
    assert newer not in optimizer.state
    step(model, optimizer)


def test_a_fused_optimizer_that_was_not_given_does_not_step():
    """It would read and write outside the tensors; others compare shapes themselves."""
    model = build()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    step(model, optimizer)
    grow(model, num_ffn_param_tokens=192)
    with pytest.raises(
        InputError, match=r"\(128, 32\).* grown to \(192, 32\).*optimizer=optimizer"
    ):
        step(model, optimizer)


@pytest.mark.parametrize("name", ["z", "lookahead_slow_buff"])
def test_a_state_that_starts_at_the_parameter_starts_there_for_new_pairs(name):
    model = build()
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = timm.optim.Lookahead(inner, k=2)
    step(model, optimizer, 2)  # the second one averages
    values = model.blocks[0].mlp.value_param_tokens
    inner.state[values]["z"] = values.detach() + 1  # as the schedulefree package keeps it
    before = inner.state[values][name].clone()
    grow(model, num_ffn_param_tokens=192, optimizer=optimizer)
    assert torch.equal(inner.state[values][name], torch.cat((before, values[128:])))
    step(model, optimizer, 2)


class Plain(torch.Tensor):
    """A state of a class of its own, as of 8-bit optimizers, that is lost when it is copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


ODD = {
    "step sizes": lambda buffer: buffer,  # of Rprop, which start at its rate
    "subclass": lambda buffer: buffer.as_subclass(Plain),
    "other shape": lambda buffer: buffer[0].clone(),  # as Adafactor's rows
    "list": lambda buffer: [torch.eye(2)],  # as timm's Kron keeps its matrices
}


@pytest.mark.parametrize("odd", ODD)
def test_growth_that_an_optimizer_cannot_follow_changes_nothing(odd):
    model, name = build(), "momentum_buffer"
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if odd == "step sizes":
        optimizer, name = torch.optim.Rprop(model.parameters()), "step_size"
    step(model, optimizer)
    state = optimizer.state[model.blocks[1].mlp.value_param_tokens]  # the last one that grows
    state[name] = ODD[odd](state[name])
    before = copy.deepcopy(model.state_dict())
    buffers = [optimizer.state[p][name] for p in model.parameters()]
    with pytest.raises(InputError, match=rf"{name}.* give moments='reset'"):
        grow(model, num_ffn_param_tokens=192, optimizer=optimizer)
    assert_equal(model.state_dict(), before)
    now = [optimizer.state[p][name] for p in model.parameters()]
    assert all(a is b for a, b in zip(now, buffers, strict=True))
    grow(model, num_ffn_param_tokens=192, optimizer=optimizer, moments="reset")
    assert model.blocks[0].mlp.key_param_tokens not in optimizer.state
    assert model.blocks[0].attn.query.key_param_tokens in optimizer.state
    step(model, optimizer)


def test_other_optimizers_are_refused():
    model = build()
    for optimizer, moments, said in (
        (torch.optim.LBFGS(model.parameters()), "reset", "LBFGS .* build them anew"),
        (torch.optim.SGD(build().parameters()), "keep", "does not have all .* give all"),
        (torch.optim.SGD(model.parameters()), "zero", "'zero'; choose one of"),
    ):
        with pytest.raises(InputError, match=said):
            grow(model, num_ffn_param_tokens=192, optimizer=optimizer, moments=moments)
        assert model.blocks[0].mlp.num_param_tokens == 128  # nothing was changed


@pytest.mark.parametrize("one_group", [True, False])
@pytest.mark.parametrize(
    ("arguments", "how"),
    [({}, {"new_lr_scale": 2.0}), ({"pattention_args": {"learn_tau": True}}, {"split": True})],
    ids=["rate", "tau"],
)
def test_parameters_stay_in_the_order_of_the_model(arguments, how, one_group):
    model = build(**arguments)
    parts: Any = model.named_parameters() if one_group else groups(model)
    optimizer = torch.optim.AdamW(parts, lr=1e-3)
    wrapper: Any = SimpleNamespace(optimizer=optimizer)  # as accelerate's
    step(model, optimizer)
    for change in (
        lambda: grow(model, num_ffn_param_tokens=192, optimizer=wrapper, **how),
        lambda: grow(model, 48, 48, 256, optimizer=optimizer, **how),
        lambda: join_tokens(model, optimizer),
    ):
        change()
        assert_in_order(model, optimizer)
        step(model, optimizer)
    rebuilt = grow(build(**arguments), 48, 48, 256)
    names = [name for name, _ in rebuilt.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_learned_taus_of_a_nested_model_keep_their_moments():
    model, x = build(nested=(0.5,), pattention_args={"learn_tau": True}), images(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, 2)
    tau = model.blocks[0].mlp.tau
    before, moments = tau.detach().clone(), optimizer.state[tau]["exp_avg"].clone()
    grow(model, 64, 64, 256, optimizer=optimizer)
    assert model.blocks[0].mlp.tau is tau
    assert torch.equal(tau.detach(), before[[0, 1, 1]])
    expected = torch.cat((moments, torch.zeros(1)))
    assert torch.equal(optimizer.state[tau]["exp_avg"], expected)
    step(model, optimizer, 2, x)


def test_hooks_of_grown_parameters_stay():
    """A step in the backward, and gradients that a user masks."""
    model, seen = build().train(), []
    keys, values = model.blocks[0].mlp.parameters()
    keys.register_hook(lambda grad: grad * 0)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def now(parameter):
        seen.append(parameter)
        optimizers[parameter].step()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(now)
    model(images()).square().sum().backward()
    grow(model, num_ffn_param_tokens=160, optimizer=[*optimizers.values()])
    seen.clear()
    before = {p: p.detach().clone() for p in model.parameters()}
    model(images()).square().sum().backward()
    assert {*seen} == {*model.parameters()}
    assert len(keys) == 160
    assert not keys.grad.any()
    assert all((p != before[p]).any() for p in model.parameters() if p is not keys)
    assert values.grad.any()


def test_shared_memory_stays():
    model = build().share_memory()
    grow(model, num_ffn_param_tokens=160, split=True)
    grow(model, num_ffn_param_tokens=192)
    assert all(p.is_shared() for p in model.parameters())


@pytest.mark.parametrize("how", [{}, {"freeze": "old"}])
def test_a_backward_pass_through_outputs_of_before_growth_raises(how):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(images()).square().sum()
    grow(model, num_ffn_param_tokens=160, optimizer=optimizer, **how)
    with pytest.raises(InputError, match="from before the model's pairs changed"):
        loss.backward()
    model(images()).square().sum().backward()  # the new ones are right
    assert model.blocks[0].mlp.parts(TOKENS[0])[-1].grad is not None


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("how", "given"),  # score biases grow in the second one; τ does not, nor does all the rest
    [(LINEAR, slice(2)), ({"pattention_args": {"learn_tau": True}}, slice(1))],
)
def test_several_optimizers_go_on(how, given, split):
    """Muon for the matrices of blocks, AdamW for the rest, as modded-nanogpt trains."""
    model = build(**how)
    tokens = [p for name, p in model.named_parameters() if name.endswith(TOKENS)]
    others = [p for name, p in model.named_parameters() if not name.endswith(TOKENS)]
    optimizers = timm.optim.Muon(tokens, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)
    for optimizer in optimizers:
        step(model, optimizer)
    grow(model, 48, 48, 160, optimizer=optimizers[given], split=split)
    now = [{p for g in each.param_groups for p in g["params"]} for each in optimizers]
    assert now[0] | now[1] == {*model.parameters()}
    assert not now[0] & now[1]
    for layer in pattention_layers(model).values():  # new pairs are where their old ones are
        assert {part for row in TOKENS for part in layer.parts(row)} <= now[0]
    before = copy.deepcopy(dict(model.named_parameters()))
    for optimizer in optimizers:
        step(model, optimizer, 2)  # zero keys first
    assert all((p != before[name]).any() for name, p in model.named_parameters())
