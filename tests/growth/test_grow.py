"""Growth does not change the outputs of a model, and every new pair learns."""

import copy

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    INITS,
    count_pairs,
    extract,
    grow,
    grow_state_dict,
    join_tokens,
    measure_usage,
    merge,
    nest,
    open_gates,
    pattention_layers,
    prune,
    reorder,
)
from tokenformer_vit.layers import Attention, Pattention
from tokenformer_vit.ops import THETAS, default_tau

GELU = [theta for theta in THETAS if theta != "softmax"]
SIZES = {
    "num_qkv_param_tokens": 64,
    "num_proj_param_tokens": 96,
    "num_ffn_param_tokens": 192,
}
DOUBLED = {**SIZES, "num_proj_param_tokens": 64, "num_ffn_param_tokens": 256}
SHAPE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 8,
    "num_classes": 10,
}


def build(theta="gelu_l2", **kwargs):
    return timm.create_model("tokenformer_tiny", **SHAPE, theta=theta, **kwargs).eval()


def logits(model, x):
    with torch.no_grad():
        return model(x)


def assert_same(after, before, limit):
    """Compare relative to the largest logit."""
    error = ((after - before).abs().max() / before.abs().max()).item()
    assert error <= limit, error


def train(model, steps=10, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("theta", GELU)
def test_zero_keys_leave_every_bit_of_the_logits(theta, backend):
    model, x = build(theta), torch.randn(3, 3, 32, 32)
    model.set_backend(backend)
    train(model, 2)
    before = logits(model, x)
    assert grow(model, **SIZES) is model
    assert torch.equal(logits(model, x), before)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("init", ["zero_key", "duplicate"])
def test_growth_to_any_size_is_exact(theta, init, rounding):
    model = build(theta, pattention_args={"eps": 1e-3})
    x = torch.randn(3, 3, 32, 32)
    train(model, 2)
    before = logits(model, x)
    sizes = DOUBLED if init == "duplicate" else {"num_qkv_param_tokens": 37}
    grow(model, **sizes, init=init)
    grow(model, num_ffn_param_tokens=768 if init == "duplicate" else 301, init=init)
    assert_same(logits(model, x), before, rounding(model))

    model.double()
    again = copy.deepcopy(model)
    grow(again, num_ffn_param_tokens=2 * 768 if init == "duplicate" else 555, init=init)
    # τ is float32 whatever the model is, and √2 is none of its numbers.
    dtype = torch.float32 if init == "duplicate" else torch.float64
    assert_same(logits(again, x.double()), logits(model, x.double()), rounding(again, dtype))


@pytest.mark.parametrize("theta", THETAS)
def test_random_pairs_change_what_is_computed_unless_behind_a_gate(theta, rounding):
    model, x = build(theta), torch.randn(3, 3, 32, 32)
    before = logits(model, x)
    grown = grow(copy.deepcopy(model), **SIZES, init="random")
    assert (logits(grown, x) - before).abs().max() > 1e-3
    assert all(layer.gate is None for layer in pattention_layers(grown).values())
    if theta == "softmax":
        grow(model, **SIZES, init="random", gate="learned")
        assert_same(logits(model, x), before, rounding(model))


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("init", ["zero_key", "random", "duplicate"])
def test_ten_steps_move_every_new_key_and_value(theta, init):
    model = build(theta)
    counts = {name: each.num_param_tokens for name, each in pattention_layers(model).items()}
    grow(model, **DOUBLED, init=init)
    before = copy.deepcopy(model)
    train(model.train(), 10)
    layers = pattention_layers(before)
    for name, layer in pattention_layers(model).items():
        for part in ("key_param_tokens", "value_param_tokens"):
            moved = getattr(layer, part) - getattr(layers[name], part)
            assert moved[counts[name] :].abs().amax(dim=1).min() > 1e-5, (name, part)
        if init == "duplicate":  # and the copies of a pair part
            one, other = layer.key_param_tokens.split(counts[name])[:2]
            assert (one - other).abs().amax(dim=1).min() > 0
        if layer.gate is not None:
            assert (layer.gate[counts[name] :] != 0).all()


def test_tau_is_kept_or_follows_the_copies():
    for theta, factor in (("gelu_l2", 2**0.5), ("gelu_l2_post", 2**0.5), ("gelu_l1", 2)):
        model = build(theta)
        tau = model.blocks[0].mlp.tau.clone()
        grow(model, num_ffn_param_tokens=256)
        assert torch.equal(model.blocks[0].mlp.tau, tau)
        grow(model, num_ffn_param_tokens=512, init="duplicate")
        torch.testing.assert_close(model.blocks[0].mlp.tau, tau * factor)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("init", INITS)
def test_a_state_dict_grows_as_its_model_does(theta, init):
    model = build(theta)
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in state_dict.items()}
    grown = grow_state_dict(state_dict, **DOUBLED, theta=theta, init=init, seed=3)
    grow(model, **DOUBLED, init=init, seed=3)
    assert grown.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(grown[name], tensor), name
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in kept.items())


@pytest.mark.parametrize("theta", THETAS)
def test_released_growth_draws_and_scales_as_the_released_code(theta):
    model = build(theta, pattention_args={"tau": 1.5})
    before, x = copy.deepcopy(model), torch.randn(3, 3, 32, 32)
    assert grow(model, num_ffn_param_tokens=2048, init="released") is model
    for name, layer in pattention_layers(model).items():
        old = before.get_submodule(name)
        count = old.num_param_tokens
        assert torch.equal(layer.key_param_tokens[:count], old.key_param_tokens)
        assert torch.equal(layer.value_param_tokens[:count], old.value_param_tokens)
        if name.endswith("mlp"):
            # Of 61,440 numbers: a deviation of 2 % is seven standard errors.
            assert layer.key_param_tokens[count:].std().item() == pytest.approx(0.02, rel=0.02)
            std = 2 / (2 * 32**0.5)  # of two blocks of width 32
            assert layer.value_param_tokens[count:].std().item() == pytest.approx(std, rel=0.02)
            assert layer.tau == torch.tensor(default_tau(theta, 2048))
        else:
            assert layer.tau == 1.5
    assert (logits(model, x) - logits(before, x)).abs().max() > 1e-3


def test_a_grown_model_is_rebuilt_saved_and_exported_as_such(tmp_path):
    for theta in ("gelu_l2", "softmax"):
        model, x = grow(build(theta), **SIZES), torch.randn(2, 3, 32, 32)
        timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert torch.equal(logits(again, x), logits(model, x))
        assert again.blocks[1].mlp.num_param_tokens == 192


def test_fixed_gates_open_to_an_ordinary_softmax(rounding):
    model, x = build("softmax"), torch.randn(2, 3, 32, 32)
    before = logits(model, x)
    grow(model, **SIZES, init="random", gate="fixed")
    assert "blocks.0.mlp.gate" in model.state_dict()
    assert not any(name.endswith("gate") for name, _ in model.named_parameters())
    assert_same(logits(model, x), before, rounding(model))
    open_gates(model, 0.25)
    assert not torch.allclose(logits(model, x), before)
    open_gates(model, 1.0)
    ungated = build("softmax", **SIZES)
    state_dict = model.state_dict()
    ungated.load_state_dict({k: v for k, v in state_dict.items() if not k.endswith("gate")})
    assert_same(logits(model, x), logits(ungated, x), rounding(model))


@pytest.mark.parametrize("theta", ["gelu_l2", "gelu_l1"])
def test_frozen_old_pairs_and_their_outputs_do_not_move(theta):
    model, x = build(theta), torch.randn(2, 3, 32, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    old = logits(model, x)
    grow(model, **SIZES, freeze="old")
    head = model.get_classifier().weight
    assert not head.requires_grad
    train(model.train(), 5, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5))
    assert (logits(model.eval(), x) - old).abs().max() > 1e-3
    for name, layer in pattention_layers(model).items():
        count = len(before[f"{name}.key_param_tokens"])
        assert torch.equal(layer.key_param_tokens[:count], before[f"{name}.key_param_tokens"])
        layer.active = torch.arange(count)
    assert torch.equal(logits(model, x), old)  # without the new pairs it is the old model


def test_a_compiled_model_grows(rounding):
    from tokenformer_vit.models import compile_blocks

    model, x = build(), torch.randn(2, 3, 32, 32)
    compile_blocks(model, backend="eager")
    before = logits(model, x)
    grow(model, **SIZES)
    assert_same(logits(model, x), before, rounding(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no number of pairs is given"),
        ({"num_ffn_param_tokens": 64}, "has 128 pairs and cannot grow to 64"),
        ({"num_ffn_param_tokens": 256, "init": "zero"}, "would never learn"),
        ({"num_ffn_param_tokens": 256, "init": "normal"}, "unknown init 'normal'"),
        ({"num_ffn_param_tokens": 200, "init": "duplicate"}, "give a multiple, or init='zero_key'"),
        (
            {"num_ffn_param_tokens": 256, "gate": "learned"},
            "softmax with zero_key or random",
        ),
        ({"num_ffn_param_tokens": 256, "gate": "open"}, "unknown gate 'open'"),
        (
            {"num_ffn_param_tokens": 256, "gate": "fixed", "init": "released"},
            "softmax with zero_key or random",
        ),
        (
            {"num_ffn_param_tokens": 256, "freeze": "new"},
            "freeze must be 'old' or None, but got 'new'",
        ),
    ],
)
def test_what_cannot_be_grown_is_said_and_left_as_it_is(arguments, message):
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        grow(model, **arguments)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    if "freeze" not in arguments:  # of the model alone
        with pytest.raises(InputError, match=message):
            grow_state_dict(before, **arguments)


def test_a_learned_gate_cannot_be_frozen_in_part():
    model = build("softmax")
    with pytest.raises(InputError, match="gate='fixed'"):
        grow(model, **SIZES, freeze="old")
    grow(model, **SIZES, freeze="old", gate="fixed")


def test_other_models_and_state_dicts_are_refused():
    with pytest.raises(InputError, match="give a TokenFormer"):
        grow(nn.Linear(2, 2), num_ffn_param_tokens=4)
    with pytest.raises(InputError, match="give one of a TokenFormer"):
        grow_state_dict(nn.Linear(2, 2).state_dict(), num_ffn_param_tokens=4)
    with pytest.raises(InputError, match="no layer has a fixed gate"):
        open_gates(build(), 0.5)
    attention = Attention(8, 2, 8, 8)
    assert grow(attention, num_qkv_param_tokens=16).query.num_param_tokens == 16


def test_new_gates_of_open_ones_are_learned_and_open(rounding):
    model = grow(build("softmax"), **SIZES, init="random", gate="fixed")
    open_gates(model, 1.0)
    x = torch.randn(2, 3, 32, 32)
    before = logits(model, x)
    grow(model, num_ffn_param_tokens=256)  # which shuts new gates, for training to open
    assert_same(logits(model, x), before, rounding(model))
    gates = [name for name, _ in model.named_parameters() if name.endswith("gate")]
    assert len(gates) == len(pattention_layers(model))
    before = copy.deepcopy(model)
    train(model.train(), 3)
    moved = model.blocks[1].mlp.gate - before.blocks[1].mlp.gate
    assert (moved[192:] != 0).all()


def test_layers_that_share_tokens_share_them_afterwards():
    model, x = build(), torch.randn(2, 3, 32, 32)
    first, second = (model.get_submodule(f"blocks.{index}.mlp") for index in (0, 1))
    second.value_param_tokens = first.value_param_tokens
    before = logits(model, x)
    assert_same(logits(grow(model, **SIZES), x), before, 1e-5)
    assert second.value_param_tokens is first.value_param_tokens


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "FSDPModule"])
def test_a_wrapped_model_is_refused(wrap, tmp_path):
    model, x = build(), torch.randn(2, 3, 32, 32)
    plain, usage = copy.deepcopy(model), measure_usage(model, [x])
    changes = (
        lambda model: grow(model, **SIZES),
        lambda model: prune(model, usage, num_ffn_param_tokens=64),
        lambda model: reorder(model, usage),
        lambda model: nest(model, (0.5,)),
        lambda model: extract(model, 0.5),
        join_tokens,
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if wrap == "FSDPModule":
            wrapped: nn.Module = pytest.importorskip("torch.distributed.fsdp").fully_shard(model)
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
        for change in changes:
            with pytest.raises(InputError, match=rf"{wrap}.* before it is wrapped"):
                change(wrapped)
    finally:
        dist.destroy_process_group()
    grow(plain, **SIZES)


def test_a_layer_of_a_derived_class_is_not_split():
    class Derived(Pattention):
        pass

    model = build()
    model.blocks[1].mlp.__class__ = Derived
    with pytest.raises(InputError, match=r"blocks\.1\.mlp is a Derived.* grow it without split"):
        grow(model, **SIZES, split=True)
    assert model.blocks[0].mlp.key_param_tokens.shape == (128, 32)  # nothing was changed
    grow(model, **SIZES)
    assert type(model.blocks[1].mlp) is Derived


def test_nothing_that_is_frozen_takes_a_pending_step():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,))).backward()
    grow(model, **SIZES, freeze="old", optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,))).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_what_was_new_is_old_by_the_next_growth():
    model = grow(build(), num_ffn_param_tokens=192, split=True)
    grow(model, num_qkv_param_tokens=64, freeze="old")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[3] for name in trained} == {"query", "key", "value"}
    assert len(model.blocks[0].mlp.key_param_tokens) == 192


def test_a_checkpoint_without_tau_is_refused_or_guessed_on_request():
    model = build()
    state_dict = {k: v for k, v in model.state_dict().items() if not k.endswith(".tau")}
    with pytest.raises(InputError, match=r"attn.query has no tau.*missing_tau='default'"):
        grow_state_dict(state_dict, **SIZES)
    grown = grow_state_dict(state_dict, **SIZES, missing_tau="default")
    assert torch.equal(grown["blocks.0.mlp.tau"], model.blocks[0].mlp.tau)


def images_on_cpu():
    return torch.randn(2, 3, 32, 32, device="cpu")


CHANGES = {
    "grow": lambda model: grow(model, **SIZES),
    "duplicate": lambda model: grow(model, num_ffn_param_tokens=512, init="duplicate"),
    "split": lambda model: grow(model, **SIZES, split=True),
    "prune": lambda model: prune(
        model, measure_usage(model, [images_on_cpu()]), num_ffn_param_tokens=64
    ),
    "reorder": lambda model: reorder(model, measure_usage(model, [images_on_cpu()])),
    "extract": lambda model: extract(model, 0.5),
    "nest": lambda model: nest(model, (0.5,)),
    "merge": lambda model: merge(model, model),
    "join": lambda model: join_tokens(grow(model, **SIZES, split=True)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_default_device_may_be_another_than_that_of_the_model(change):
    model = build(pattention_args={"learn_tau": True})
    expected = change(copy.deepcopy(model))
    with torch.device("meta"):  # as a GPU after torch.set_default_device("cuda")
        changed = change(model)
    assert {p.device.type for p in (*changed.parameters(), *changed.buffers())} == {"cpu"}
    counts = [[*count_pairs(each).values()] for each in (changed, expected)]
    assert counts[0] == counts[1]
    assert logits(changed, images_on_cpu()).isfinite().all()
