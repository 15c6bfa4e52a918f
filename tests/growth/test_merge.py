"""A merged layer computes its documented formula; a model merged with itself does not change."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import save_for_hf
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, merge
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import TOKENS, is_split
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.ops import THETAS

from .conftest import assert_equal, assert_same, build, copied, images, in_float64, logits

LARGER = {"num_qkv_param_tokens": 48, "num_proj_param_tokens": 40, "num_ffn_param_tokens": 160}


def alone(pairs, theta, tau=None, eps=1e-6) -> Any:
    """Build a model that is one layer, in float64."""
    return in_float64(nn.Sequential(Pattention(12, 20, pairs, theta, tau, eps)))


def divide(layer, x):
    """Return the scores A, the divisor r, and the order p of its norm."""
    scores = x @ layer.key_param_tokens.T
    if not THETAS[layer.theta].norm_order:
        return scores, torch.ones(len(x), 1, dtype=torch.float64), 1
    if layer.theta == "softmax":
        return scores, scores.exp().sum(-1, keepdim=True) / layer.tau, 1
    h = F.gelu(scores)
    if layer.theta == "gelu_l1":
        return scores, h.abs().sum(-1, keepdim=True) / layer.tau + layer.eps, 1
    squares = (h if layer.theta == "gelu_l2_post" else scores).square().sum(-1, keepdim=True)
    return scores, (squares / layer.tau**2 + layer.eps).sqrt(), 2


def activated(scores, r, theta):
    return F.gelu(scores / r, approximate="tanh" if theta == "gelu_tanh_l2" else "none")


@pytest.mark.parametrize("theta", THETAS)
def test_a_model_and_itself_compute_what_it_did(theta, rounding):
    model, x = build(theta), images()
    merged = merge(model, model)
    assert_same(logits(merged, x), logits(model, x), rounding(merged))
    in_float64(model)
    assert_same(logits(merge(model, model), x.double()), logits(model, x.double()), 1e-12)


@pytest.mark.parametrize(("taus", "eps"), [((5.0, 5.0), 1e-6), ((3.0, 7.0), 0.3)])
@pytest.mark.parametrize("theta", THETAS)
def test_two_layers_side_by_side_are_the_documented_mean(theta, taus, eps):
    taus = taus if THETAS[theta].norm_order else (1.0, 1.0)
    a, b = alone(24, theta, taus[0], eps), alone(40, theta, taus[1], eps)
    x = torch.randn(50, 12, dtype=torch.float64)
    merged = merge(a, b)[0]
    (scores_a, r_a, p), (scores_b, r_b, _) = divide(a[0], x), divide(b[0], x)
    share_a, share_b = (tau**p / (taus[0] ** p + taus[1] ** p) for tau in taus)
    r = (share_a * r_a**p + share_b * r_b**p) ** (1 / p)
    torch.testing.assert_close(divide(merged, x)[1], r, rtol=1e-12, atol=0)
    expected = (r_a * a(x) + r_b * b(x)) / (2 * r)
    if theta in ("gelu_l2", "gelu_tanh_l2"):  # which activate after the division
        values_a, values_b = a[0].value_param_tokens / 2, b[0].value_param_tokens / 2
        expected = activated(scores_a, r, theta) @ values_a
        expected = expected + activated(scores_b, r, theta) @ values_b
    torch.testing.assert_close(merged(x), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("theta", THETAS)
def test_descendants_add_what_they_learned_to_the_ancestor(theta):
    old = alone(24, theta)
    a, b = (alone(pairs, theta, tau=old[0].tau.item()) for pairs in (32, 41))
    for model in (a, b):
        for name in TOKENS:
            getattr(model[0], name).detach()[:24] = getattr(old[0], name).detach()
    x = torch.randn(50, 12, dtype=torch.float64)
    merged = merge(a, b, old)[0]
    assert merged.num_param_tokens == 24 + 8 + 17
    (_, r_0, p), (_, r_a, _), (_, r_b, _) = (divide(model[0], x) for model in (old, a, b))
    scores, r, _ = divide(merged, x)
    torch.testing.assert_close(r, (r_a**p + r_b**p - r_0**p) ** (1 / p), rtol=1e-11, atol=0)
    expected = (r_a * a(x) + r_b * b(x) - r_0 * old(x)) / r
    if theta in ("gelu_l2", "gelu_tanh_l2"):
        expected = activated(scores, r, theta) @ merged.value_param_tokens
    torch.testing.assert_close(merged(x), expected, rtol=1e-10, atol=1e-11)
    for same in (merge(a, old, old), merge(old, a, old)):
        torch.testing.assert_close(same(x), a(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("theta", ["softmax", "gelu_l2"])
def test_grown_models_are_merged_and_stay_as_they_are(theta, tmp_path):
    old, x = build(theta, drop_path_rate=0.1), images()
    # Random pairs of softmax need no gate where the old function need not stay.
    a, b = (
        grow(copy.deepcopy(old), **LARGER, init="random", seed=seed, freeze="old")
        for seed in (0, 1)
    )
    b.set_backend("reference")  # how a model is computed does not matter
    b.set_grad_checkpointing()
    before = [copied(model.state_dict()) for model in (a, b, old)]
    merged = merge(a, b, old)
    assert merged.blocks[0].mlp.num_param_tokens == 128 + 2 * 32
    assert merged.blocks[1].attn.proj.num_param_tokens == 32 + 2 * 8
    for model, state_dict in zip((a, b, old), before, strict=True):
        assert_equal(model.state_dict(), state_dict)
    assert is_split(a.blocks[0].mlp)
    assert not is_split(merged.blocks[0].mlp)
    save_for_hf(merged, tmp_path, safe_serialization=True)
    reloaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(logits(reloaded, x), logits(merged, x))


def test_everything_else_is_the_mean():
    a, b = build(norm="weight+bias", init_values=0.1), build(norm="weight+bias", init_values=0.1)
    for parameter in (*a.parameters(), *b.parameters()):
        parameter.detach().add_(torch.randn_like(parameter))
    merged = merge(a, b).state_dict()
    others = [name for name in merged if not name.endswith((*TOKENS, ".tau"))]
    assert {"head.weight", "pos_embed", "blocks.0.norm1.weight", "blocks.1.ls2.gamma"} <= {*others}
    for name in others:
        mean = (a.state_dict()[name] + b.state_dict()[name]) / 2
        torch.testing.assert_close(merged[name], mean)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"embed_dim": 48}, "embed_dim is 32 in model_a and 48 in model_b; merge models that"),
        ({"theta": "gelu_l1"}, "theta is gelu_l2 in model_a and gelu_l1 in model_b"),
        ({"pattention_args": {"eps": 0.1}}, "eps is 1e-06 in model_a and 0.1 in model_b"),
        ({"num_classes": 7}, r"head.weight is \[10, 32\] in model_a and \[7, 32\]"),
        ({"num_heads": 4}, "num_heads is 2 in model_a and 4 in model_b"),
        ({"norm": "bias"}, "norm is none in model_a and bias in model_b"),
    ],
)
def test_models_that_do_not_fit(other, said):
    with pytest.raises(InputError, match=said):
        merge(build(), build(**other))

    config = LMConfig(vocab_size=20, embed_dim=16, depth=1, num_heads=2)
    with pytest.raises(InputError, match=r"rotary_base is 10000.* in model_a and 500"):
        merge(TokenFormerLM(config), TokenFormerLM(replace(config, rotary_base=500.0)))


@pytest.mark.parametrize("what", ["keys", "values", "τ", "gates"])
def test_an_ancestor_whose_pairs_were_trained_on(what):
    old = build("softmax")
    a, b = (grow(copy.deepcopy(old), **LARGER) for _ in range(2))
    layer = b.blocks[1].attn.key
    tensors = (layer.key_param_tokens, layer.value_param_tokens, layer.tau, layer.gate)
    changed = dict(zip(("keys", "values", "τ", "gates"), tensors, strict=True))[what]
    changed.detach().view(-1)[0] += 1e-3
    with pytest.raises(InputError, match=f"attn.key: model_b .* their {what} differ: freeze old"):
        merge(a, b, old)
