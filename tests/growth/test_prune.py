"""Usage is what each pair adds on average; pruning keeps the weights of the other pairs."""

import copy
from functools import partial

import pytest
import timm
import torch
from timm.models import save_for_hf

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    Usage,
    count_pairs,
    grow,
    measure_usage,
    pattention_layers,
    prune,
    reorder,
)
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.ops import THETAS

SHAPE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 8,
    "num_classes": 10,
    "num_qkv_param_tokens": 24,
    "num_proj_param_tokens": 40,
    "num_ffn_param_tokens": 56,
}
COUNTS = {"num_qkv_param_tokens": 9, "num_proj_param_tokens": 16, "num_ffn_param_tokens": 33}


def build(theta="gelu_l2", **kwargs):
    return timm.create_model("tokenformer_tiny", theta=theta, **{**SHAPE, **kwargs}).eval()


def logits(model, x):
    with torch.no_grad():
        return model(x)


def assert_same(actual, expected, limit):
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error <= limit, error


def in_float64(model):
    """Compute in float64 with a τ of float64, which otherwise stays float32."""
    model.double()
    for layer in pattention_layers(model).values():
        layer.tau = layer.tau.double()
    return model


@torch.no_grad()
def usage_by_hand(layer, x):
    """Follow the definition token by token and pair by pair."""
    tokens = x.reshape(-1, layer.in_features)
    sizes, shares = torch.zeros(2, layer.num_param_tokens, dtype=torch.float64)
    for token in tokens:
        weights = layer.weights(token)
        scores = layer.key_param_tokens @ token
        # Weights whose norm is τ were themselves normed, otherwise the scores were.
        order = THETAS[layer.theta].norm_order
        of_weights = weights.norm(p=order).item() == pytest.approx(layer.tau.item(), rel=1e-3)
        powers = (weights if of_weights else scores).abs() ** order
        shares += powers / powers.sum()
        for pair, value in enumerate(layer.value_param_tokens):
            sizes[pair] += (weights[pair] * value).norm()
    return sizes / len(tokens), shares / len(tokens)


def inputs_of(model, name, batches):
    seen = []
    hook = pattention_layers(model)[name].register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    for batch in batches:
        logits(model, batch)
    hook.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("theta", THETAS)
def test_usage_is_its_definition_over_all_batches(theta):
    model = in_float64(build(theta))
    batches = torch.randn(5, 3, 32, 32, dtype=torch.float64).split(2)  # 2, 2 and 1
    usage = measure_usage(model, batches)
    assert usage.keys() == pattention_layers(model).keys()
    for name in ("blocks.0.attn.value", "blocks.1.mlp"):
        layer = pattention_layers(model)[name]
        sizes, shares = usage_by_hand(layer, inputs_of(model, name, batches))
        torch.testing.assert_close(usage[name].sizes, sizes, rtol=1e-10, atol=0)
        torch.testing.assert_close(usage[name].shares, shares, rtol=1e-10, atol=0)


def test_batches_may_be_those_of_a_data_loader_and_the_model_stays_as_it_was():
    model, images = build(drop_path_rate=0.5), torch.randn(6, 3, 32, 32)
    data = torch.utils.data.TensorDataset(images, torch.arange(6))
    expected = measure_usage(model, [images])
    model.train()
    model.blocks[0].eval()
    usage = measure_usage(model, torch.utils.data.DataLoader(data, batch_size=4))
    for name, each in usage.items():
        torch.testing.assert_close(each.sizes, expected[name].sizes, rtol=1e-5, atol=0)
        torch.testing.assert_close(each.shares, expected[name].shares, rtol=1e-5, atol=0)
        assert each.shares.sum() == pytest.approx(1)
    assert model.training
    assert model.blocks[1].mlp.training
    assert not model.blocks[0].mlp.training
    assert not any(layer._forward_pre_hooks for layer in pattention_layers(model).values())


@pytest.mark.parametrize("theta", THETAS)
def test_pairs_that_add_nothing_leave_the_output_as_it_is(theta, rounding):
    model = build(theta)
    before = copy.deepcopy(model)
    for layer in pattention_layers(model).values():
        with torch.no_grad():  # as many more keys of the same scores, with values of zero
            layer.value_param_tokens[len(layer.value_param_tokens) // 2 :] = 0
            half = layer.num_param_tokens // 2
            layer.key_param_tokens[half:] = layer.key_param_tokens[:half].flip(0)
    x = torch.randn(4, 3, 32, 32)
    expected = logits(model, x)
    counts = {
        "num_qkv_param_tokens": 12,
        "num_proj_param_tokens": 20,
        "num_ffn_param_tokens": 28,
    }
    usage = measure_usage(model, [torch.randn(4, 3, 32, 32)])
    kept_tau = prune(copy.deepcopy(model), usage, **counts, adapt_tau=False)
    exact = in_float64(copy.deepcopy(model))
    expected64 = logits(exact, x.double())
    pruned = prune(model, usage, **counts)
    assert pruned is model
    assert_same(logits(pruned, x), expected, rounding(before))
    prune(exact, measure_usage(exact, [torch.randn(4, 3, 32, 32).double()]), **counts)
    assert_same(logits(exact, x.double()), expected64, 1e-12)
    assert (logits(kept_tau, x) - expected).abs().max() > 1e-3 * expected.abs().max()
    layer = pruned.blocks[0].mlp
    ratio = (layer.tau / before.blocks[0].mlp.tau).item()
    assert ratio == pytest.approx(0.5 ** (1 / THETAS[theta].norm_order), rel=1e-5)


def test_the_most_used_pairs_stay_in_their_order():
    model = build()
    before = copy.deepcopy(model)
    usage = {
        name: Usage(torch.rand(layer.num_param_tokens), torch.ones(1).expand(56))
        for name, layer in pattention_layers(model).items()
    }
    prune(model, usage, **COUNTS, adapt_tau=False)
    for (name, old), new in zip(
        pattention_layers(before).items(), pattention_layers(model).values(), strict=True
    ):
        limit = usage[name].sizes.sort(descending=True).values[new.num_param_tokens - 1]
        kept = usage[name].sizes >= limit
        assert torch.equal(new.key_param_tokens, old.key_param_tokens[kept])
        assert torch.equal(new.value_param_tokens, old.value_param_tokens[kept])
        assert torch.equal(new.tau, old.tau)
    counts = [layer.num_param_tokens for layer in pattention_layers(model).values()]
    assert counts == 2 * [9, 9, 9, 16, 33]


@pytest.mark.parametrize("theta", ["softmax", "gelu_l2"])
def test_pruned_models_are_saved_reloaded_and_trained(theta, tmp_path):
    model = grow(build(theta), 48, 64, 80)  # of softmax: with gates
    x = torch.randn(4, 3, 32, 32)
    usage = measure_usage(model, [x])
    with torch.no_grad():  # open, or the new pairs would be the ones that go
        for layer in pattention_layers(model).values():
            if layer.gate is not None:
                layer.gate.fill_(0.7)
    gates = model.blocks[0].mlp.gate
    gates = None if gates is None else gates.detach().clone()
    usage = measure_usage(model, [x])
    prune(model, usage, **COUNTS)
    if theta == "softmax":
        kept = usage["blocks.0.mlp"].sizes.topk(33).indices.sort().values
        assert torch.equal(model.blocks[0].mlp.gate, gates[kept])
    save_for_hf(model, tmp_path, safe_serialization=True)
    reloaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(logits(reloaded, x), logits(model, x))
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_blocks_may_keep_other_numbers_of_pairs(tmp_path):
    model, x = build(), torch.randn(2, 3, 32, 32)
    usage, ffn = measure_usage(model, [x]), model.blocks[0].mlp.key_param_tokens
    prune(model, usage, num_qkv_param_tokens=[9, 24], num_ffn_param_tokens=(56, 33))
    assert model.blocks[0].mlp.key_param_tokens is ffn
    assert [*count_pairs(model).values()] == [9, 9, 9, 40, 56, 24, 24, 24, 40, 33]
    save_model(model, tmp_path / "folder")
    again = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert torch.equal(logits(again, x), logits(model, x))
    grow(model, num_qkv_param_tokens=[24, 32], num_ffn_param_tokens=72)
    assert [*count_pairs(model).values()] == [24, 24, 24, 40, 72, 32, 32, 32, 40, 72]
    assert_same(logits(model, x), logits(again, x), 1e-5)
    for change, counts in ((grow, [60, 60, 60]), (partial(prune, usage=usage), [9])):
        with pytest.raises(InputError, match=rf"qkv.* has {len(counts)} numbers for 2 blocks"):
            change(model, num_qkv_param_tokens=counts)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (57, "blocks.0.mlp has 56 pairs and cannot be pruned to 57; .*grow"),
        (0, "blocks.0.mlp has 56 pairs and cannot be pruned to 0; keep at least 1$"),
    ],
)
def test_counts_that_cannot_be(count, said):
    model = build()
    usage = measure_usage(model, [torch.randn(2, 3, 32, 32)])
    with pytest.raises(InputError, match=said):
        prune(model, usage, num_qkv_param_tokens=9, num_ffn_param_tokens=count)
    assert model.blocks[0].attn.query.num_param_tokens == 24  # nothing was changed


@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_does_not_count(pad):
    model = TokenFormerLM(LMConfig(vocab_size=50, embed_dim=32, depth=2, num_heads=2)).eval()
    tokens, none = torch.randint(50, (3, 8)), torch.zeros(3, 24, dtype=torch.long)
    parts = [none, tokens] if pad == "left" else [tokens, none]
    mask = torch.cat([torch.full_like(part, part is tokens) for part in parts], dim=1)
    batch = {"tokens": torch.cat(parts, dim=1), "attention_mask": mask}
    expected = measure_usage(model, [tokens])
    for name, own in measure_usage(model, [batch]).items():
        torch.testing.assert_close(own.sizes, expected[name].sizes, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own.shares, expected[name].shares, rtol=1e-4, atol=1e-6)
    counted = measure_usage(model, [batch["tokens"]])["blocks.1.mlp"]
    assert not torch.allclose(counted.sizes, expected["blocks.1.mlp"].sizes, rtol=1e-2)


def test_usage_of_another_model_or_of_none():
    model, x = build(), torch.randn(2, 3, 32, 32)
    usage = measure_usage(build(num_ffn_param_tokens=64), [x])
    with pytest.raises(InputError, match="measured on other pairs, or in another order"):
        prune(model, usage, num_ffn_param_tokens=20)
    del usage["blocks.0.attn.query"]
    with pytest.raises(InputError, match=r"blocks.0.attn.query has 24 pairs, the usage has none"):
        prune(model, usage, num_ffn_param_tokens=20)
    usage = measure_usage(model, [x])
    with pytest.raises(InputError, match="measure it again"):
        prune(reorder(model, usage), usage, num_ffn_param_tokens=20)
    prune(model, measure_usage(model.double(), [x.double()]), num_ffn_param_tokens=20)
    for wrong, line in ((torch.randn(2, 3, 32, 32), "one tensor"), ([], "give at least one")):
        with pytest.raises(InputError, match=line):
            measure_usage(model, wrong)
    with torch.no_grad():
        model.blocks[1].mlp.value_param_tokens[3, 3] = torch.nan
    with pytest.raises(InputError, match=r"usage of blocks.1.mlp is not finite"):
        measure_usage(model, [x.double()])


def test_a_closed_gate_is_no_usage():
    model = grow(build("softmax"), num_ffn_param_tokens=80)
    usage = measure_usage(model, [torch.randn(2, 3, 32, 32)])["blocks.0.mlp"]
    assert (usage.sizes[56:] == 0).all()
    assert (usage.shares[56:] == 0).all()
    assert (usage.sizes[:56] > 0).all()
