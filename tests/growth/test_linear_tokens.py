"""Layers of linear tokens and with biases do all that others do; appended ones are LoRA."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit import growth
from tokenformer_vit.growth import count_pairs, grow, join_tokens, pattention_layers
from tokenformer_vit.layers.pattention import PER_PAIR, TOKENS
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.sizes import set_size

from .conftest import LINEAR, SHAPE, assert_same, build, images, in_float64, logits, step


def disturbed(model) -> Any:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def vit() -> Any:
    return disturbed(VisionTransformer(**SHAPE))


def linear() -> Any:
    return disturbed(build(**LINEAR))


def doubled(model):
    return {name: 2 * count for name, count in count_pairs(model).items()}


@pytest.mark.parametrize("make", [linear, build])
def test_frozen_old_pairs_and_biases_do_not_move(make):
    model, x = make(), images(4)
    old, before = copy.deepcopy(model.state_dict()), logits(model, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    model(x).square().sum().backward()  # a pending gradient
    grow(model, doubled(model), freeze="old", nested=True, optimizer=optimizer)
    new = copy.deepcopy({name: p for name, p in model.named_parameters() if p.requires_grad})
    per_pair = {name.rpartition(".")[2] for name in old} & {*PER_PAIR}
    assert {name.rpartition(".")[2] for name in new} == {f"new_{name}" for name in per_pair}
    model(x).square().sum().backward()
    optimizer.step()
    step(model, optimizer, 5, x)
    assert all((model.get_parameter(name) != start).all() for name, start in new.items())
    assert torch.equal(logits(model, x, 0.5), before)
    after = logits(model, x)
    assert torch.equal(logits(join_tokens(model, optimizer), x), after)
    for name, tensor in old.items():
        assert tensor.ndim == 0 or torch.equal(model.state_dict()[name][: len(tensor)], tensor)


def formula(layer, x, index=slice(None)):
    keys, values, _, bias = layer.used_tokens()
    scores = x @ keys[index].T + (0 if bias is None else bias[index])
    return (F.gelu(scores) if layer.theta == "gelu" else scores) @ values[index] + layer.bias


@torch.no_grad()
@pytest.mark.parametrize("split", [False, True])
def test_every_cut_computes_the_formula(split):
    model, x = in_float64(linear()), images().double()
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


def test_frozen_pairs_cost_no_gradients_of_their_own():
    start, x, costs, gradients = in_float64(linear()), images().double(), [], []
    for how in ({"freeze": "old"}, {"split": True}):
        model = grow(copy.deepcopy(start), doubled(start), init="random", **how)
        with FlopCounterMode(display=False) as counter:
            model(x).square().sum().backward()
        costs.append(counter.get_total_flops())
        new = {name: p.grad for name, p in model.named_parameters() if "new_" in name}
        gradients.append(new)
    assert costs[0] < 0.9 * costs[1]
    for name, gradient in gradients[0].items():
        assert_same(gradient, gradients[1][name], 1e-10)


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
