"""Growth does not change the outputs of a model, and every new pair learns."""

import copy

import pytest
import torch
from timm.utils import reparameterize_model
from torch import nn

from tokenformer_vit import growth
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs, grow, pattention_layers
from tokenformer_vit.layers import Attention, Pattention
from tokenformer_vit.layers.pattention import TOKENS
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.ops import THETAS, default_tau

from .conftest import LINEAR, assert_equal, assert_same, build, images, in_float64, logits, step

fsdp = pytest.importorskip("torch.distributed.fsdp")

SIZES = {"num_qkv_param_tokens": 64, "num_proj_param_tokens": 96, "num_ffn_param_tokens": 192}
DOUBLED = {**SIZES, "num_proj_param_tokens": 64, "num_ffn_param_tokens": 256}
EXACT = [(theta, init) for theta in THETAS for init in ("zero_key", "duplicate")]
EXACT.remove(("softmax", "zero_key"))  # a zero key has a weight there


def adamw(model, **how):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **how})


@pytest.mark.parametrize(
    ("theta", "init"), [*EXACT, ("LINEAR", "zero_key"), ("LINEAR", "duplicate")]
)
def test_growth_to_any_size_is_exact(theta, init):
    how = LINEAR if theta == "LINEAR" else {"theta": theta, "pattention_args": {"eps": 1e-3}}
    model, x = build(**how), images()
    step(model, adamw(model), 2)  # with biases that are not 0
    exact = in_float64(copy.deepcopy(model))
    before, before64 = logits(model, x), logits(exact, x.double())
    sizes = [DOUBLED, {"num_ffn_param_tokens": 768}]
    if init == "zero_key":
        assert grow(model, **SIZES) is model
        assert torch.equal(logits(model, x), before)  # with another size, sums have another order
        sizes = [{"num_qkv_param_tokens": 77}, {"num_ffn_param_tokens": 301}]
    for counts in sizes:
        grow(model, **counts, init=init)
        grow(exact, **counts, init=init, split=True)
        assert_same(logits(model, x), before)
        assert_same(logits(exact, x.double()), before64)


def test_layers_of_two_variants_grow_each_by_its_own():
    pair, x = nn.ModuleDict({"a": build(), "b": build("softmax")}), images()
    before = {name: logits(each, x) for name, each in pair.items()}
    state = copy.deepcopy(pair.state_dict())
    with pytest.raises(InputError, match=r"b\.blocks.* softmax.* init='duplicate'"):
        grow(pair, num_ffn_param_tokens=256)
    assert_equal(pair.state_dict(), state)
    grow(pair, num_ffn_param_tokens=256, init="duplicate")
    for name, each in pair.items():
        assert_same(logits(each, x), before[name], 1e-5)
        assert each.blocks[1].mlp.num_param_tokens == 256


class Net(nn.Module):
    """Pattention in place of linear layers, in anybody's module."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = Pattention(8, 16, 24), Pattention(16, 4, 24)

    def forward(self, x):
        return self.fc2(self.fc1(x))


def test_layers_of_another_module_grow_shrink_and_are_sized_by_name():
    net, x = Net(), torch.randn(5, 8)
    before = net(x)
    grow(net, {"fc1": 48})
    assert torch.equal(net(x), before)
    assert count_pairs(net) == {"fc1": 48, "fc2": 24}
    usage = growth.measure_usage(net, [x])
    pruned = growth.prune(copy.deepcopy(net), usage, {"fc1": 24})
    assert count_pairs(pruned) == {"fc1": 24, "fc2": 24}  # the zero keys had no use
    torch.testing.assert_close(pruned(x), before)
    growth.nest(net, (0.5,), kinds=["fc1"])
    assert count_pairs(growth.extract(net, 0.5)) == {"fc1": 24, "fc2": 24}
    small = growth.extract(net, num_qkv_param_tokens={"fc2": 3})
    assert count_pairs(small) == {"fc1": 48, "fc2": 3}
    layer = Pattention(8, 8, 16)
    assert grow(layer, {"": 32}).num_param_tokens == 32
    with pytest.raises(InputError, match=r"kind 'ffn'; choose from fc1, fc2"):
        grow(net, num_ffn_param_tokens=48)


@pytest.mark.parametrize(("theta", "init"), [*EXACT, *((theta, "random") for theta in THETAS)])
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


def test_new_pairs_are_drawn_anew_for_each_seed_and_layer():
    grown = [grow(build(), **SIZES, seed=seed) for seed in (3, 3, 4)]
    drawn = [model.blocks[b].mlp.value_param_tokens[128:] for model in grown for b in (0, 1)]
    signs = {tuple((rows > 0).flatten().tolist()) for rows in drawn}
    assert len(signs) == 4  # equal for equal seeds, up to the scale of the layer


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no number of pairs is given: give num_qkv_param_tokens"),
        ({"num_ffn_param_tokens": 64}, r"has 128 pairs and cannot grow to 64.* use prune\(\)"),
        ({"init": "zero"}, "unknown init 'zero'.* never learn.* choose one of zero_key"),
        ({"num_ffn_param_tokens": 200, "init": "duplicate"}, "give a multiple, or init='zero_key'"),
        ({"freeze": "new"}, "freeze must be 'old' or None, but got 'new'"),
        ({"num_ffn_param_tokens": [144, 160, 176]}, "has 3 numbers for 2 blocks: .* each block"),
        ({"nested": True, "num_ffn_param_tokens": [160, 128]}, "let these layers alone grow"),
    ],
)
def test_what_cannot_be_grown_is_said_and_left_as_it_is(arguments, message):
    how = {"num_ffn_param_tokens": 256, **arguments} if arguments else {}
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        grow(model, **how)
    assert_equal(model.state_dict(), before)


def test_other_models_are_refused():
    with pytest.raises(InputError, match="Linear has no Pattention layer; give a TokenFormer"):
        grow(nn.Linear(2, 2), num_ffn_param_tokens=4)
    with torch.inference_mode(), pytest.raises(InputError, match="inference mode is on"):
        grow(build(), num_ffn_param_tokens=192)
    attention = Attention(8, 2, 8, 8)  # but any part of one grows
    assert grow(attention, num_qkv_param_tokens=16).query.num_param_tokens == 16


CHANGES = [
    lambda model, usage: grow(model, **SIZES),
    lambda model, usage: growth.prune(model, usage, num_ffn_param_tokens=64),
    lambda model, usage: growth.nest(model, (0.5,)),
    lambda model, usage: growth.extract(model, 0.5),
    lambda model, usage: growth.measure_usage(model, [images()]),
    lambda model, usage: growth.join_tokens(model),
    growth.reorder,
]


WRAPPERS = {
    "is wrapped by DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "is wrapped by FSDPModule": lambda model: fsdp.fully_shard(model),
    "is fused.* before reparameterize_model": reparameterize_model,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("said", WRAPPERS)
def test_a_wrapped_or_fused_model_is_refused(said):
    model = build(**LINEAR)
    usage, wrapped = growth.measure_usage(model, [images()]), WRAPPERS[said](model)
    for change in CHANGES:
        with pytest.raises(InputError, match=said):
            change(wrapped, usage)


def test_a_compiled_model_is_trained_before_and_after_growth():
    model, x = build(depth=1).train(), images()
    compile_blocks(model, backend="aot_eager")
    optimizer = adamw(model)
    step(model, optimizer, 2)
    before = logits(model, x)
    grow(model, **SIZES, optimizer=optimizer)
    assert_same(logits(model, x), before, 1e-5)
    plain = build(**SIZES, depth=1)
    plain.load_state_dict(model.state_dict())
    step(model, optimizer, 2)
    assert all((p.grad != 0).any() for p in model.parameters())
    assert (logits(model, x) - logits(plain, x)).abs().max() > 0


def test_a_second_growth_is_as_exact_as_the_first():
    net, x = Net(), torch.randn(5, 8)
    grow(net, {"fc1": 32, "fc2": 32}, freeze="old")
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    net(x).square().sum().backward()
    optimizer.step()
    outputs = net(x)
    with pytest.raises(InputError, match="no layer gets new pairs"):
        grow(net, {"fc1": 32}, freeze="old", optimizer=optimizer)
    with pytest.raises(InputError, match="all numbers of pairs in the dict"):
        grow(net, {"fc1": 40}, num_ffn_param_tokens=64)
    new = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    assert not net.load_state_dict(new, strict=False).unexpected_keys  # a file of an adapter
    old = net.state_dict()["fc1.key_param_tokens"].clone()
    grow(net, {"fc1": 40, "fc2": None}, freeze="old", optimizer=optimizer)
    torch.testing.assert_close(net(x), outputs)
    assert optimizer.state_dict()["state"].keys() <= {0, 1, 2, 3}
    assert torch.equal(net.fc1.key_param_tokens[:24], old)
