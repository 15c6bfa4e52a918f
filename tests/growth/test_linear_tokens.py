"""Layers of linear tokens and with biases do all that others do; appended ones are LoRA."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tokenformer_vit import growth
from tokenformer_vit.growth import count_pairs, grow, join_tokens, pattention_layers
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.pattention import PER_PAIR, TOKENS
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.sizes import set_size

from .conftest import SHAPE, assert_equal, assert_same, build, copied, images, in_float64, logits


def disturbed(model) -> Any:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def vit() -> Any:
    return disturbed(VisionTransformer(**SHAPE))


def net() -> Any:
    mlp = Pattention(8, 16, 24, theta="gelu", bias=True)
    return disturbed(nn.Sequential(mlp, Pattention(16, 4, 24, theta="linear", bias=True)))


CASES = {"vit": (lambda: from_vit(vit()), images), "net": (net, lambda: torch.randn(5, 8))}
cases: Any = pytest.mark.parametrize(("make", "draw"), CASES.values(), ids=CASES)


def doubled(model):
    return {name: 2 * count for name, count in count_pairs(model).items()}


def train(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def adamw(model):  # without decay of biases
    groups = ((0.5, lambda p: p.ndim > 1), (0.0, lambda p: p.ndim < 2))
    of = [{"params": [*filter(f, model.parameters())], "weight_decay": w} for w, f in groups]
    return torch.optim.AdamW(of, lr=0.01)


@cases
@pytest.mark.parametrize("init", ["zero_key", "duplicate"])
@pytest.mark.parametrize("split", [False, True])
def test_growth_is_exact(make, draw, init, split):
    model, x = make(), draw()
    for each, z, limit in ((model, x, 1e-5), (in_float64(copy.deepcopy(model)), x.double(), 1e-13)):
        before = logits(each, z)
        grow(each, doubled(each), init=init, split=split)
        assert_same(logits(each, z), before, limit)


@pytest.mark.parametrize(
    ("make", "draw"), [*CASES.values(), (build, images)], ids=[*CASES, "gelu_l2"]
)
def test_frozen_old_pairs_and_biases_do_not_move(make, draw):
    model, x = make(), draw()
    old, before = copied(model.state_dict()), logits(model, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    model(x).square().sum().backward()  # a pending gradient
    grow(model, doubled(model), freeze="old", nested=True, optimizer=optimizer)
    new = copied({name: p for name, p in model.named_parameters() if p.requires_grad})
    per_pair = {name.rpartition(".")[2] for name in old} & {*PER_PAIR}
    assert {name.rpartition(".")[2] for name in new} == {f"new_{name}" for name in per_pair}
    model(x).square().sum().backward()
    optimizer.step()
    for _ in range(5):
        train(model, optimizer, x)
    assert all((model.get_parameter(name) != start).all() for name, start in new.items())
    assert torch.equal(logits(model, x, 0.5), before)
    after = logits(model, x)
    assert torch.equal(logits(join_tokens(model, optimizer), x), after)
    for name, tensor in old.items():
        assert tensor.ndim == 0 or torch.equal(model.state_dict()[name][: len(tensor)], tensor)


@cases
@pytest.mark.parametrize("split", [False, True])
def test_moments_of_score_biases_are_kept_and_a_run_is_resumed(make, draw, split):
    model, x = make(), draw()
    resumed, optimizer = copy.deepcopy(model), adamw(model)
    train(model, optimizer, x)
    bias = next(p for name, p in model.named_parameters() if name.endswith("score_bias"))
    moments = optimizer.state[bias]["exp_avg"].clone()
    grow(model, doubled(model), optimizer=optimizer, split=split)
    assert torch.equal(optimizer.state[bias]["exp_avg"][: len(moments)], moments)
    assert {*optimizer.param_groups[1]["params"]} == {p for p in model.parameters() if p.ndim < 2}
    again = adamw(grow(resumed, doubled(resumed), split=split))
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((model, optimizer), (resumed, again)):
        train(each, own, x)
        train(join_tokens(each, own), own, x)
    assert len(optimizer.state[bias]["exp_avg"]) == 2 * len(moments)
    assert_equal(resumed.state_dict(), model.state_dict())


def formula(layer, x, index=slice(None)):
    keys, values, _, bias = layer.used_tokens()
    scores = x @ keys[index].T + (0 if bias is None else bias[index])
    return (F.gelu(scores) if layer.theta == "gelu" else scores) @ values[index] + layer.bias


@cases
@torch.no_grad()
@pytest.mark.parametrize("split", [False, True])
def test_every_cut_computes_the_formula(make, draw, split):
    model, x = in_float64(make()), draw().double()
    grow(model, doubled(model), init="random", split=split)
    layers, usage = pattention_layers(copy.deepcopy(model)), growth.measure_usage(model, [x])
    half = {name: count // 2 for name, count in count_pairs(model).items()}
    whole = {name: usage[name].order for name in half}
    best = {name: usage[name].order[:count].sort().values for name, count in half.items()}
    first = {name: torch.arange(count) for name, count in half.items()}
    odd = {name: torch.arange(1, 2 * count, 2) for name, count in half.items()}
    nested = growth.nest(copy.deepcopy(model), (0.5,))
    set_size(nested, 0.5)

    def check(cut, kept):
        for name, layer in pattention_layers(cut).items():
            for rows in (1, 200):  # by two products, and by one where that is cheaper
                z = torch.randn(rows, layer.in_features, dtype=torch.float64)
                expected = formula(layers[name], z, kept[name])
                torch.testing.assert_close(layer(z), expected, rtol=1e-12, atol=1e-12)

    check(growth.prune(copy.deepcopy(model), usage, half), best)
    check(growth.reorder(copy.deepcopy(model), usage), whole)
    check(growth.extract(model, num_qkv_param_tokens=half), first)
    check(nested, first)
    with growth.use_pairs(model, odd):
        check(model, odd)


class LoRA(nn.Module):
    """W x + B A x, for each of the parts of a fused linear layer."""

    def __init__(self, linear, tokens):
        super().__init__()
        self.linear, self.factors = linear, nn.ParameterList(each.clone() for each in tokens)

    def forward(self, x):
        pairs = zip(self.factors[::2], self.factors[1::2], strict=True)
        return self.linear(x) + torch.cat([x @ a.T @ b for a, b in pairs], dim=-1)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_appended_linear_tokens_are_lora(dtype, limit):
    theirs, x = vit().to(dtype).requires_grad_(False), images().to(dtype)
    model, tokens = grow(from_vit(theirs), 32 + 8, 32 + 8, freeze="old"), []
    for block, own in zip(theirs.blocks, model.blocks, strict=True):
        layers = own.attn.query, own.attn.key, own.attn.value, own.attn.proj
        of_block = [layer.get_parameter(f"new_{name}") for layer in layers for name in TOKENS]
        for part in of_block:
            nn.init.normal_(part, std=0.2)
        block.attn.qkv = LoRA(block.attn.qkv, of_block[:6])
        block.attn.proj = LoRA(block.attn.proj, of_block[6:])
        tokens += of_block
    factors = [p for p in theirs.parameters() if p.requires_grad]
    for kind, how in ((torch.optim.SGD, {}), (torch.optim.AdamW, {"eps": 1e-4})):
        assert_same(model(x), theirs(x), limit)
        for network, parameters in ((model, tokens), (theirs, factors)):
            optimizer = kind(parameters, lr=0.01, **how)
            optimizer.zero_grad()
            F.cross_entropy(network(x), torch.arange(3)).backward()
            optimizer.step()
        for token, factor in zip(tokens, factors, strict=True):
            assert_same(token.grad, factor.grad, 10 * limit)
            assert_same(token, factor, limit)
    assert_same(model(x), theirs(x), limit)
