"""Growth does not change the outputs of a model, and every new pair learns."""

import copy

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tokenformer_vit import growth
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    INITS,
    count_pairs,
    grow,
    grow_state_dict,
    open_gates,
    pattention_layers,
)
from tokenformer_vit.layers import Attention, Pattention
from tokenformer_vit.layers.split import TOKENS
from tokenformer_vit.ops import THETAS, default_tau

from .conftest import assert_equal, assert_same, build, copied, images, in_float64, logits, step

SIZES = {"num_qkv_param_tokens": 64, "num_proj_param_tokens": 96, "num_ffn_param_tokens": 192}
DOUBLED = {**SIZES, "num_proj_param_tokens": 64, "num_ffn_param_tokens": 256}


def adamw(model, **how):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **how})


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("theta", [theta for theta in THETAS if theta != "softmax"])
def test_zero_keys_leave_every_bit_of_the_logits(theta, backend):
    model, x = build(theta), images()
    model.set_backend(backend)
    step(model, adamw(model), 2)
    before = logits(model, x)
    assert grow(model, **SIZES) is model
    assert torch.equal(logits(model, x), before)


@pytest.mark.parametrize(
    ("theta", "how"),
    [
        *((theta, {"init": init}) for theta in THETAS for init in ("zero_key", "duplicate")),
        ("softmax", {"init": "random", "gate": "learned"}),
        ("softmax", {"init": "zero_key", "gate": "fixed"}),
    ],
)
def test_growth_to_any_size_is_exact(theta, how, rounding):
    model, x = build(theta, pattention_args={"eps": 1e-3}), images()
    step(model, adamw(model), 2)
    copies = how["init"] == "duplicate"
    sizes = [DOUBLED, {"num_ffn_param_tokens": 768}]
    if not copies:
        sizes = [{"num_qkv_param_tokens": 37}, {"num_ffn_param_tokens": 301}]
    exact = in_float64(copy.deepcopy(model))
    before, before64 = logits(model, x), logits(exact, x.double())
    for counts in sizes[: 1 if how.get("gate") == "fixed" else None]:
        grow(model, **counts, **how)
        grow(exact, **counts, **how)
        assert_same(logits(model, x), before, rounding(model))
        assert_same(logits(exact, x.double()), before64, rounding(model, torch.float64))


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("init", ["zero_key", "random", "duplicate"])
def test_ten_steps_move_every_new_key_and_value(theta, init):
    model = build(theta)
    counts = count_pairs(model)
    before = copy.deepcopy(grow(model, **DOUBLED, init=init))
    step(model.train(), adamw(model), 10)
    layers = pattention_layers(before)
    for name, layer in pattention_layers(model).items():
        for part in TOKENS:
            moved = getattr(layer, part) - getattr(layers[name], part)
            assert moved[counts[name] :].abs().amax(dim=1).min() > 1e-5, (name, part)
        if init == "duplicate":  # and the copies of a pair part
            one, other = layer.key_param_tokens.split(counts[name])[:2]
            assert (one - other).abs().amax(dim=1).min() > 0
        if layer.gate is not None:
            assert (layer.gate[counts[name] :] != 0).all()


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("init", INITS)
def test_a_state_dict_grows_as_its_model_does(theta, init):
    model = build(theta)
    state_dict = copied(model.state_dict())
    kept = copied(state_dict)
    how = {**DOUBLED, "init": init}
    grown = grow_state_dict(state_dict, **how, theta=theta, seed=3)
    assert_equal(state_dict, kept)
    own = grow(model, **how, seed=3).state_dict()
    assert own.keys() == grown.keys()
    assert_equal(grown | own, grown)
    other = grow_state_dict(state_dict, **how, theta=theta, seed=4)
    new = [each[f"blocks.{b}.mlp.{TOKENS[1]}"][128:] for each in (own, other) for b in (0, 1)]
    assert len({rows.sum().item() for rows in new}) == 4  # drawn anew for each seed and layer


@pytest.mark.parametrize("theta", THETAS)
def test_released_growth_draws_and_scales_as_the_released_code(theta):
    tau = 1.5 if THETAS[theta].norm_order else 1.0
    model = build(theta, pattention_args={"tau": tau})
    before = copy.deepcopy(model)
    grow(model, num_ffn_param_tokens=2048, init="released")
    layer, old = model.blocks[1].mlp, before.blocks[1].mlp
    assert torch.equal(layer.key_param_tokens[:128], old.key_param_tokens)
    # Of 61,440 numbers: a deviation of 2 % is seven standard errors.
    assert layer.key_param_tokens[128:].std().item() == pytest.approx(0.02, rel=0.02)
    std = 2 / (2 * 32**0.5)  # of two blocks of width 32
    assert layer.value_param_tokens[128:].std().item() == pytest.approx(std, rel=0.02)
    assert layer.tau == torch.tensor(default_tau(theta, 2048))
    assert model.blocks[1].attn.query.tau == tau


@pytest.mark.parametrize("theta", ["gelu_l2", "softmax"])
def test_a_grown_model_is_reloaded_by_timm(theta, tmp_path):
    model, x = grow(build(theta), **SIZES), images()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(logits(again, x), logits(model, x))
    assert again.blocks[1].mlp.num_param_tokens == 192


def test_fixed_gates_open_to_an_ordinary_softmax(rounding):
    model, x = build("softmax"), images()
    before = logits(model, x)
    grow(model, **SIZES, init="random", gate="fixed")
    assert "blocks.0.mlp.gate" in model.state_dict()
    assert not any(name.endswith("gate") for name, _ in model.named_parameters())
    assert_same(logits(model, x), before, rounding(model))
    growth.open_gates(model, 0.25)
    assert not torch.allclose(logits(model, x), before)
    growth.open_gates(model, 1.0)
    ungated = build("softmax", **SIZES)
    state_dict = model.state_dict()
    ungated.load_state_dict({k: v for k, v in state_dict.items() if not k.endswith("gate")})
    before = logits(ungated, x)
    assert_same(logits(model, x), before, rounding(model))
    grow(model, num_ffn_param_tokens=256)  # which shuts new gates, for training to open
    assert_same(logits(model, x), before, rounding(model))
    assert sum(name.endswith("gate") for name, _ in model.named_parameters()) == 10


@pytest.mark.parametrize("theta", ["gelu_l2", "gelu_l1"])
def test_frozen_old_pairs_and_their_outputs_do_not_move(theta):
    model, x = build(theta), images()
    old, optimizer = logits(model, x), adamw(model, lr=0.01, weight_decay=0.5)
    F.cross_entropy(model(x), torch.arange(3)).backward()  # a pending gradient
    grow(model, **SIZES, freeze="old", optimizer=optimizer)
    F.cross_entropy(model(x), torch.arange(3)).backward()
    optimizer.step()
    step(model, optimizer, 4)
    assert (logits(model, x) - old).abs().max() > 1e-3
    for layer in pattention_layers(model).values():
        layer.active = torch.arange(32 if layer.num_param_tokens < 192 else 128)
    assert torch.equal(logits(model, x), old)  # without the new pairs it is the old model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no number of pairs is given: give num_qkv_param_tokens"),
        ({"num_ffn_param_tokens": 64}, r"has 128 pairs and cannot grow to 64.* use prune\(\)"),
        ({"init": "zero"}, "unknown init 'zero'.* never learn.* choose one of zero_key"),
        ({"num_ffn_param_tokens": 200, "init": "duplicate"}, "give a multiple, or init='zero_key'"),
        ({"gate": "learned"}, "gate is 'learned', .* leave it out"),
        ({"gate": "open"}, "unknown gate 'open'; choose 'learned' or 'fixed'"),
        ({"freeze": "new"}, "freeze must be 'old' or None, but got 'new'"),
        ({"freeze": "old", "theta": "softmax"}, "give gate='fixed', or init='duplicate'"),
    ],
)
def test_what_cannot_be_grown_is_said_and_left_as_it_is(arguments, message):
    how = {"num_ffn_param_tokens": 256, **arguments} if arguments else {}
    model = build(how.pop("theta", "gelu_l2"))
    before = copied(model.state_dict())
    with pytest.raises(InputError, match=message):
        grow(model, **how)
    assert_equal(model.state_dict(), before)


def test_other_models_and_state_dicts_are_refused():
    with pytest.raises(InputError, match="Linear has no Pattention layer; give a TokenFormer"):
        grow(nn.Linear(2, 2), num_ffn_param_tokens=4)
    with pytest.raises(InputError, match="give one of a TokenFormer"):
        grow_state_dict(nn.Linear(2, 2).state_dict(), num_ffn_param_tokens=4)
    with pytest.raises(InputError, match="no layer has a fixed gate"):
        growth.open_gates(build(), 0.5)
    attention = Attention(8, 2, 8, 8)  # but any part of one grows
    assert grow(attention, num_qkv_param_tokens=16).query.num_param_tokens == 16
    attention.proj.__class__ = type("Derived", (Pattention,), {})
    with pytest.raises(InputError, match=r"proj is a Derived.* grow it without split"):
        grow(attention, num_qkv_param_tokens=32, num_proj_param_tokens=32, split=True)
    assert attention.query.num_param_tokens == 16  # nothing was changed


def test_a_checkpoint_without_tau_is_refused_or_guessed_on_request():
    model = build()
    state_dict = {k: v for k, v in model.state_dict().items() if not k.endswith(".tau")}
    with pytest.raises(InputError, match=r"attn.query has no tau.*missing_tau='default'"):
        grow_state_dict(state_dict, **SIZES)
    grown = grow_state_dict(state_dict, **SIZES, missing_tau="default")
    assert torch.equal(grown["blocks.0.mlp.tau"], model.blocks[0].mlp.tau)


CHANGES = [
    lambda model, usage: grow(model, **SIZES),
    lambda model, usage: growth.prune(model, usage, num_ffn_param_tokens=64),
    lambda model, usage: growth.nest(model, (0.5,)),
    lambda model, usage: growth.extract(model, 0.5),
    lambda model, usage: growth.measure_usage(model, [images()]),
    lambda model, usage: growth.join_tokens(model),
    growth.reorder,
]


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "FSDPModule"])
def test_a_wrapped_model_is_refused(wrap, tmp_path):
    model = build()
    usage = growth.measure_usage(model, [images()])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if wrap == "FSDPModule":
            wrapped: nn.Module = pytest.importorskip("torch.distributed.fsdp").fully_shard(model)
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
        for change in CHANGES:
            with pytest.raises(InputError, match=rf"{wrap}.* before it is wrapped"):
                change(wrapped, usage)
    finally:
        dist.destroy_process_group()


def test_fixed_gates_are_opened_before_the_next_growth():
    model = grow(build("softmax"), num_ffn_param_tokens=160, gate="fixed")
    open_gates(model, 0.5)
    with pytest.raises(InputError, match=r"not all open: .*open_gates\(model, 1\)"):
        grow(model, num_ffn_param_tokens=192, gate="fixed")
    open_gates(model, 1)
    grow(model, num_ffn_param_tokens=192, gate="fixed")
