"""Usage is what each pair adds on average; pruning keeps the weights of the other pairs."""

import copy

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs, grow, measure_usage, pattention_layers, prune
from tokenformer_vit.ops import THETAS

from .conftest import assert_same, build, images, in_float64, logits

COUNTS = {"num_qkv_param_tokens": 16, "num_proj_param_tokens": 16, "num_ffn_param_tokens": 64}


@torch.no_grad()
def usage_by_hand(layer, x):
    """Follow the definition token by token and pair by pair."""
    tokens = x.reshape(-1, layer.in_features)
    sizes, shares = torch.zeros(2, layer.num_param_tokens, dtype=torch.float64)
    for token in tokens:
        weights = layer.weights(token)
        scores = layer.key_param_tokens @ token
        if order := THETAS[layer.theta].norm_order:
            # Weights whose norm is τ were themselves normed, otherwise the scores were.
            of_weights = weights.norm(p=order).item() == pytest.approx(layer.tau.item(), rel=1e-3)
            powers = (weights if of_weights else scores).abs() ** order
            shares += powers / powers.sum()
        sizes += (weights[:, None] * layer.value_param_tokens).norm(dim=1)
    return sizes / len(tokens), shares / len(tokens)


@pytest.mark.parametrize("theta", THETAS)
def test_usage_is_its_definition_over_all_batches(theta):
    model, x = in_float64(build(theta, drop_path_rate=0.5)), images(5).double()
    name, seen = "blocks.1.mlp", []
    with model.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0])):
        logits(model, x)
    model.train()
    model.blocks[0].eval()
    data = torch.utils.data.TensorDataset(x, torch.arange(5))
    usage = measure_usage(model, torch.utils.data.DataLoader(data, batch_size=2))
    assert usage.keys() == pattention_layers(model).keys()
    sizes, shares = usage_by_hand(model.get_submodule(name), torch.cat(seen))
    torch.testing.assert_close(usage[name].sizes, sizes, rtol=1e-10, atol=0)
    torch.testing.assert_close(usage[name].shares, shares, rtol=1e-10, atol=0)
    modes = [model.training, model.blocks[1].mlp.training, model.blocks[0].mlp.training]
    assert modes == [True, True, False]
    assert not any(layer._forward_pre_hooks for layer in pattention_layers(model).values())


@pytest.mark.parametrize("theta", THETAS)
def test_pairs_that_add_nothing_leave_the_output_as_it_is(theta):
    model, x = build(theta), images()
    for layer in pattention_layers(model).values():
        half = layer.num_param_tokens // 2  # as many more keys of the same scores
        layer.key_param_tokens.detach()[half:] = layer.key_param_tokens[:half].detach().flip(0)
        layer.value_param_tokens.detach()[half:] = 0
    before, usage = logits(model, x), measure_usage(model, [images()])
    kept_tau = prune(copy.deepcopy(model), usage, **COUNTS, adapt_tau=False)
    order = THETAS[theta].norm_order  # without a norm, τ stays as it is
    assert ((logits(kept_tau, x) - before).abs().max() > 1e-3 * before.abs().max()) == (order > 0)
    exact = in_float64(copy.deepcopy(model))
    before64, tau = logits(exact, x.double()), model.blocks[0].mlp.tau.clone()
    assert_same(logits(prune(model, usage, **COUNTS), x), before)
    prune(exact, measure_usage(exact, [images().double()]), **COUNTS)
    assert_same(logits(exact, x.double()), before64, 1e-12)
    ratio = 0.5 ** (1 / order) if order else 1.0
    torch.testing.assert_close(model.blocks[0].mlp.tau, tau * ratio)


def test_blocks_keep_their_most_used_pairs_and_train_on():
    model, x = build(), images()
    usage, ffn = measure_usage(model, [x]), model.blocks[0].mlp.key_param_tokens
    values = model.blocks[1].mlp.value_param_tokens.detach().clone()
    prune(model, usage, num_qkv_param_tokens=[9, 24], num_ffn_param_tokens=(128, 33))
    assert model.blocks[0].mlp.key_param_tokens is ffn
    assert [*count_pairs(model).values()] == [9, 9, 9, 32, 128, 24, 24, 24, 32, 33]
    kept = usage["blocks.1.mlp"].sizes.topk(33).indices.sort().values  # in their order
    assert torch.equal(model.blocks[1].mlp.value_param_tokens, values[kept])
    before = logits(model, x)
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    grow(model, num_qkv_param_tokens=[24, 32], num_ffn_param_tokens=144)
    assert [*count_pairs(model).values()] == [24, 24, 24, 32, 144, 32, 32, 32, 32, 144]
    assert_same(logits(model, x), before, 1e-5)


@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_does_not_count(pad):
    language = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    config = language.TokenFormerConfig(vocab_size=50, embed_dim=32, depth=2, num_heads=2)
    model = language.TokenFormerForCausalLM(config).eval()
    tokens, none = torch.randint(50, (3, 8)), torch.zeros(3, 24, dtype=torch.long)
    parts = [none, tokens] if pad == "left" else [tokens, none]
    mask = torch.cat([torch.full_like(part, part is tokens) for part in parts], dim=1)
    batch = {"input_ids": torch.cat(parts, dim=1), "attention_mask": mask}
    expected = measure_usage(model, [tokens])
    twice = measure_usage(model, [batch, tokens])  # the second batch has no mask
    for name, own in measure_usage(model, [batch]).items():
        torch.testing.assert_close(own.sizes, expected[name].sizes, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own.sizes, twice[name].sizes, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own.shares, expected[name].shares, rtol=1e-4, atol=1e-6)


def test_counts_that_cannot_be_and_usage_of_another_model_or_of_none():
    model, x = build(), images()
    usage = measure_usage(model, [x])
    for count, said in ((129, r"use grow\(\)"), (0, "keep at least 1")):
        with pytest.raises(InputError, match=f"has 128 pairs and .* cut to {count}: .*{said}"):
            prune(model, usage, num_qkv_param_tokens=9, num_ffn_param_tokens=count)
        assert model.blocks[0].attn.query.num_param_tokens == 32  # nothing was changed
    with pytest.raises(InputError, match=r"usage .* measured on .*; measure it again"):
        prune(build(num_ffn_param_tokens=64), usage, num_ffn_param_tokens=20)
    for wrong, line in ((x, r"one tensor: give .*\[images\]"), ([], "give at least one")):
        with pytest.raises(InputError, match=line):
            measure_usage(model, wrong)
    model.blocks[1].mlp.value_param_tokens.detach()[3, 3] = torch.nan
    with pytest.raises(InputError, match=r"usage of blocks.1.mlp is not finite"):
        measure_usage(model, [x])
