"""Budgets cost what they may and lose little; tokens read only their strongest pairs."""

import copy

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import Usage, pattention_layers, prune
from tokenformer_vit.models import LMConfig, TokenFormerLM, TokenFormerViT
from tokenformer_vit.ops import THETAS
from tokenformer_vit.vision.compression import (
    budget_candidates,
    candidates,
    choose_counts,
    usage_loss,
)

COUNTS = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 48, "num_ffn_param_tokens": 64}
COSTS = {"num_qkv_param_tokens": 3, "num_proj_param_tokens": 1, "num_ffn_param_tokens": 1}


def build(**changes):
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return TokenFormerViT(**{**shape, **COUNTS, **changes}, num_classes=4).eval()


def usage_of(model):
    usage = {}
    for name, layer in pattention_layers(model).items():
        pairs = layer.num_param_tokens
        steepness = 10 * torch.rand(())  # layers differ in how many pairs they use
        usage[name] = Usage(torch.rand(pairs).double() ** steepness, torch.ones(pairs) / pairs)
    return usage


def cost(numbers):
    return sum(COSTS[name] * sum(each) for name, each in numbers.items())


WHOLE = cost({name: [count] * 3 for name, count in COUNTS.items()})


@pytest.mark.parametrize("budget", [0.07, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("nested", [False, True])
def test_the_budget_is_used_up_to_one_pair(budget, nested):
    model = build()
    numbers = choose_counts(model, budget, usage_loss(usage_of(model), nested))
    assert 0 <= budget * WHOLE - cost(numbers) < 3
    for name, each in numbers.items():
        assert all(1 <= number <= COUNTS[name] for number in each)


def test_no_random_choice_within_the_budget_loses_less():
    model, others = build(), []
    loss = usage_loss(usage_of(model))
    while len(others) < 50:
        shares = {name: torch.rand(3) for name in COUNTS}
        numbers = {n: (shares[n] * COUNTS[n]).ceil().int().tolist() for n in COUNTS}
        if 0.4 * WHOLE <= cost(numbers) <= 0.5 * WHOLE:
            others.append(loss(numbers))
    uniform = loss({name: [count // 2] * 3 for name, count in COUNTS.items()})
    assert loss(choose_counts(model, 0.5, loss)) < min(*others, uniform)


def test_layers_that_use_few_pairs_lose_more():
    model = build()
    usage = usage_of(model)
    for name in usage:
        flat = torch.ones_like(usage[name].sizes)
        if name == "blocks.1.mlp":  # 16 pairs do all the work
            flat[::4] = 1e6
        usage[name] = Usage(flat, usage[name].shares)
    numbers = choose_counts(model, 0.9, usage_loss(usage))
    assert numbers["num_ffn_param_tokens"][1] == 16
    # The last pairs of a nested model count, and here one of the last four is used.
    numbers = choose_counts(model, 0.95, usage_loss(usage, nested=True))
    assert numbers["num_ffn_param_tokens"][1] > 16


def test_a_measured_loss_decides_and_kinds_that_are_not_named_stay():
    asked = []

    def loss(numbers):
        asked.append(numbers)
        return -sum((1, 10, 3)[i] * n for each in numbers.values() for i, n in enumerate(each))

    model = build()
    numbers = choose_counts(model, 0.5, loss, kinds=("ffn",))
    assert numbers == {"num_ffn_param_tokens": [1, 64, 31]}
    assert all(each.keys() == numbers.keys() for each in asked)
    assert len(asked) < 3 * 16 * 2  # the others are not measured at every step


def test_the_numbers_fit_prune_and_a_new_model():
    model = build()
    usage = usage_of(model)
    numbers = choose_counts(model, 0.4, usage_loss(usage))
    smaller = prune(copy.deepcopy(model), usage, **numbers)
    build(**numbers).load_state_dict(smaller.state_dict())
    config = LMConfig(vocab_size=9, embed_dim=16, depth=3, num_heads=2, rotary_share=0.5, **COUNTS)
    lm = TokenFormerLM(config)
    numbers = choose_counts(lm, 0.4, usage_loss(usage_of(lm)))
    prune(lm, usage_of(lm), **numbers)
    layers = [block.mlp.num_param_tokens for block in lm.blocks]
    assert layers == numbers["num_ffn_param_tokens"]
    TokenFormerLM(lm.config).load_state_dict(lm.state_dict())


def test_the_smallest_budget_is_one_pair_in_each_layer():
    model = build(num_qkv_param_tokens=7, num_proj_param_tokens=11, num_ffn_param_tokens=13)
    loss = usage_loss(usage_of(model))
    with pytest.raises(InputError) as error:
        choose_counts(model, 0.0, loss)
    named = float(str(error.value).split("at least ")[1].split(",")[0])
    for budget in (named, sum(COSTS.values()) / (3 * 7 + 11 + 13)):
        assert choose_counts(model, budget, loss) == {name: [1, 1, 1] for name in COUNTS}


@pytest.mark.parametrize("budget", [0, 0.001, 1.1, float("nan")])
def test_budgets_out_of_range(budget):
    model = build()
    with pytest.raises(InputError, match=rf"at least 0.0\d+, .* but got {budget}"):
        choose_counts(model, budget, usage_loss(usage_of(model)))


@pytest.mark.parametrize("theta", THETAS)
@torch.no_grad()
def test_a_token_reads_its_strongest_pairs(theta):
    model, x = build(theta=theta), torch.randn(5, 3, 16, 16)
    whole = model(x)
    (dense, half) = candidates(model, ["top-k"], [0.5])
    layer, seen = pattention_layers(model)["blocks.1.mlp"], []
    with half.reading(), layer.register_forward_hook(lambda _, *both: seen.append(both)):
        assert not torch.allclose(model(x), whole)
    (((tokens,), output),) = seen
    weights = layer.double().weights(tokens.double())
    limit = weights.abs().topk(32).values[..., -1:]
    expected = torch.where(weights.abs() >= limit, weights, 0) @ layer.value_param_tokens
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()
    layer.float()
    assert torch.equal(model(x), whole)
    assert half.pairs == {"qkv": 16, "proj": 24, "ffn": 32}
    # Of 5 tokens, 3 blocks and 16 channels: half of the values of three layers of 32 pairs, ...
    assert dense.flops() - half.flops() == 2 * 5 * 3 * 16 * (3 * 16 + 24 + 32)


@torch.no_grad()
def test_compiled_blocks_read_their_strongest_pairs():
    model, x = build(), torch.randn(2, 3, 16, 16)
    _, half = candidates(model, ["top-k"], [0.5])
    expected = half.scores(x)
    for block in model.blocks:
        block.compile(backend="eager")
    model(x)
    torch.testing.assert_close(half.scores(x), expected)


@torch.no_grad()
def test_a_nested_model_keeps_its_first_pairs_and_their_tau():
    model, x = build(nested=(0.5,), pattention_args={"learn_tau": True}), torch.randn(4, 3, 16, 16)
    for layer in pattention_layers(model).values():
        layer.nested_tau.mul_(1 + torch.rand(()))
    held_out = [(x, torch.arange(4) % 4)]
    made = budget_candidates(model, [0.4], usage_of(model), held_out)
    assert [each.method for each in made] == ["by-usage", "by-loss"]
    for candidate in made:
        smaller = pattention_layers(candidate.model)
        for name, layer in pattention_layers(model).items():
            layer.size = smaller[name].num_param_tokens
        torch.testing.assert_close(candidate.scores(x), model(x))
        model.set_size(None)
        assert candidate.flops() < candidates(model, [], [])[0].flops()
