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
from tokenformer_vit.growth import grow, pattention_layers
from tokenformer_vit.growth.merge import merge
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import TOKENS, is_split, token_segments
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.ops import THETAS

SHAPE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "img_size": 32,
    "patch_size": 8,
    "num_classes": 10,
}
OLD = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 64}
NEW = {"num_qkv_param_tokens": 48, "num_proj_param_tokens": 40, "num_ffn_param_tokens": 96}
WHOLE = [theta for theta in THETAS if theta not in ("gelu_l2", "gelu_tanh_l2")]


def build(theta="gelu_l2", **kwargs):
    return timm.create_model("tokenformer_tiny", theta=theta, **{**SHAPE, **kwargs}).eval()


def in_float64(model):
    """Compute in float64 with a τ of float64, which otherwise stays float32."""
    model.double()
    for layer in pattention_layers(model).values():
        layer.tau = layer.tau.double()
    return model


def logits(model, x):
    with torch.no_grad():
        return model(x)


def assert_same(actual, expected, limit):
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error <= limit, error


def alone(pairs, theta="gelu_l2", tau=None, eps=1e-6, gate="none", keys=None) -> Any:
    """Build a model that is one layer, in float64."""
    model = in_float64(nn.Sequential(Pattention(12, 20, pairs, theta, tau, eps, gate=gate)))
    with torch.no_grad():
        if keys is not None:
            model[0].key_param_tokens.copy_(keys)
        if gate != "none":
            model[0].gate.copy_(torch.rand(pairs) + 0.1)
    return model


def divide(layer, x, tau=None):
    """Return the scores A, the activations h before the division, and the divisor r."""
    scores = x @ layer.key_param_tokens.T
    if layer.theta == "softmax":
        h = scores.exp() if layer.gate is None else layer.gate * scores.exp()
        return scores, h, h.abs().sum(-1, keepdim=True) / layer.tau
    h = F.gelu(scores)
    if layer.theta == "gelu_l1":
        return scores, h, h.abs().sum(-1, keepdim=True) / layer.tau + layer.eps
    squares = (h if layer.theta == "gelu_l2_post" else scores).square().sum(-1, keepdim=True)
    return scores, h, (squares / layer.tau**2 + layer.eps).sqrt()


def order(theta):
    return 1 if theta in ("softmax", "gelu_l1") else 2


@pytest.mark.parametrize("theta", THETAS)
def test_a_model_and_itself_compute_what_it_did(theta, rounding):
    model, x = build(theta), torch.randn(4, 3, 32, 32)
    merged = merge(model, model)
    assert_same(logits(merged, x), logits(model, x), rounding(merged))
    in_float64(model)
    assert_same(logits(merge(model, model), x.double()), logits(model, x.double()), 1e-12)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("taus", [(5.0, 5.0), (3.0, 7.0)], ids=["equal τ", "other τ"])
@pytest.mark.parametrize("theta", THETAS)
def test_two_layers_side_by_side_are_the_documented_mean(theta, taus, eps):
    a, b = alone(24, theta, taus[0], eps), alone(40, theta, taus[1], eps)
    x = torch.randn(50, 12, dtype=torch.float64)
    merged = merge(a, b)[0]
    (scores_a, _, r_a), (scores_b, _, r_b) = divide(a[0], x), divide(b[0], x)
    p = order(theta)
    shares = [tau**p / (taus[0] ** p + taus[1] ** p) for tau in taus]
    r = (shares[0] * r_a**p + shares[1] * r_b**p) ** (1 / p)
    torch.testing.assert_close(divide(merged, x)[2], r, rtol=1e-12, atol=0)
    if theta in WHOLE:
        expected = (r_a * a(x) + r_b * b(x)) / (2 * r)
    else:
        gelu = "tanh" if theta == "gelu_tanh_l2" else "none"
        expected = sum(
            F.gelu(scores / r, approximate=gelu) @ model[0].value_param_tokens / 2
            for scores, model in ((scores_a, a), (scores_b, b))
        )
    torch.testing.assert_close(merged(x), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_a_gate_that_one_layer_has_is_1_in_the_other(which):
    a = alone(24, "softmax", gate="learned" if which != "b" else "none")
    b = alone(40, "softmax", gate="fixed" if which != "a" else "none")
    x = torch.randn(50, 12, dtype=torch.float64)
    (_, _, r_a), (_, _, r_b) = divide(a[0], x), divide(b[0], x)
    merged = merge(a, b)[0]
    assert merged.gate.shape == (64,)
    assert isinstance(merged.gate, nn.Parameter) is (which != "b")
    r = (24 * r_a + 40 * r_b) / 64
    expected = (r_a * a(x) + r_b * b(x)) / (2 * r)
    torch.testing.assert_close(merged(x), expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(merge(a, a)[0](x), a(x), rtol=1e-11, atol=1e-12)


def descendants(theta):
    """Build an ancestor, and two layers that begin with its pairs."""
    old = alone(24, theta)
    models = []
    for pairs in (32, 41):
        model = alone(pairs, theta, tau=old[0].tau.item())
        with torch.no_grad():
            for name in TOKENS:
                getattr(model[0], name)[:24] = getattr(old[0], name)
        models.append(model)
    return old, *models


@pytest.mark.parametrize("theta", THETAS)
def test_descendants_add_what_they_learned_to_the_ancestor(theta):
    old, a, b = descendants(theta)
    x = torch.randn(50, 12, dtype=torch.float64)
    merged = merge(a, b, old)[0]
    assert merged.num_param_tokens == 24 + 8 + 17
    assert torch.equal(merged.tau, old[0].tau)
    r_0, r_a, r_b = (divide(model[0], x)[2] for model in (old, a, b))
    p = order(theta)
    scores, _, r = divide(merged, x)
    torch.testing.assert_close(r, (r_a**p + r_b**p - r_0**p) ** (1 / p), rtol=1e-11, atol=0)
    if theta in WHOLE:
        expected = (r_a * a(x) + r_b * b(x) - r_0 * old(x)) / r
    else:
        gelu = "tanh" if theta == "gelu_tanh_l2" else "none"
        expected = F.gelu(scores / r, approximate=gelu) @ merged.value_param_tokens
    torch.testing.assert_close(merged(x), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("theta", THETAS)
def test_a_descendant_and_its_ancestor_are_the_descendant(theta):
    old, a, _ = descendants(theta)
    x = torch.randn(50, 12, dtype=torch.float64)
    for merged in (merge(a, old, old), merge(old, a, old)):
        torch.testing.assert_close(merged(x), a(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("theta", THETAS)
def test_grown_models_are_merged_and_stay_as_they_are(theta, tmp_path):
    old = build(theta, **OLD)
    grown = []
    for seed in range(2):
        # Random pairs of softmax need no gate where the old function need not stay.
        new = grow(copy.deepcopy(old), **NEW, init="random", seed=seed, freeze="old")
        grown.append(new)
    x = torch.randn(4, 3, 32, 32)
    before = [logits(model, x) for model in (*grown, old)]
    merged = merge(*grown, old)
    assert merged.blocks[0].mlp.num_param_tokens == 64 + 2 * 32
    assert merged.blocks[1].attn.proj.num_param_tokens == 32 + 2 * 8
    for model, expected in zip((*grown, old), before, strict=True):
        assert torch.equal(logits(model, x), expected)
    assert is_split(grown[0].blocks[0].mlp)
    assert not is_split(merged.blocks[0].mlp)
    assert [len(part) for part in token_segments(grown[1].blocks[0].mlp, TOKENS[0])] == [64, 32]

    save_for_hf(merged, tmp_path, safe_serialization=True)
    reloaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(logits(reloaded, x), logits(merged, x))


def test_everything_else_is_the_mean():
    a, b = build(norm="weight+bias", init_values=0.1), build(norm="weight+bias", init_values=0.1)
    with torch.no_grad():
        for parameter in (*a.parameters(), *b.parameters()):
            parameter.add_(torch.randn_like(parameter))
    states = [model.state_dict() for model in (a, b)]
    names = [name for name in states[0] if not name.endswith((*TOKENS, ".tau"))]
    assert {"head.weight", "pos_embed", "blocks.0.norm1.weight", "blocks.1.ls2.gamma"} <= {*names}
    merged = merge(a, b).state_dict()
    for name in names:
        torch.testing.assert_close(merged[name], (states[0][name] + states[1][name]) / 2)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"depth": 3}, "depth is 2 in model_a and 3 in model_b"),
        ({"embed_dim": 48}, "embed_dim is 32 in model_a and 48 in model_b"),
        ({"theta": "gelu_l1"}, "theta is gelu_l2 in model_a and gelu_l1 in model_b"),
        ({"pattention_args": {"eps": 0.1}}, "eps is 1e-06 in model_a and 0.1 in model_b"),
        ({"num_classes": 7}, r"head.weight is \[10, 32\] in model_a and \[7, 32\]"),
        ({"num_heads": 4}, "num_heads is 2 in model_a and 4 in model_b"),
        ({"qk_norm": True}, "qk_norm is False in model_a and True in model_b"),
        ({"global_pool": "avg", "fc_norm": False}, "global_pool is absent in model_a and avg"),
        ({"norm": "bias"}, "norm is none in model_a and bias in model_b"),
    ],
)
def test_models_that_do_not_fit(other, said):
    with pytest.raises(InputError, match=said):
        merge(build(), build(**other))


def test_language_models_of_other_rotations(rounding):
    config = LMConfig(vocab_size=20, embed_dim=16, depth=1, num_heads=2, rotary_share=0.5)
    model, tokens = TokenFormerLM(config), torch.randint(20, (2, 5))
    merged = merge(model, TokenFormerLM(replace(config, num_ffn_param_tokens=40)))
    assert merged.blocks[0].mlp.num_param_tokens == 64 + 40
    merged = merge(model, model)
    assert_same(logits(merged, tokens), logits(model, tokens), rounding(merged))
    for changes in ({"rotary_share": 0.25}, {"rotary_base": 500.0}, {"norm_eps": 1e-3}):
        ((name, value),) = changes.items()
        ours = getattr(config, name)
        with pytest.raises(InputError, match=f"{name} is {ours} in model_a and {value} in model_b"):
            merge(model, TokenFormerLM(replace(config, **changes)))


def test_how_models_were_trained_and_run_does_not_matter():
    a = build(drop_path_rate=0.1, drop_rate=0.1)
    b = grow(build(**OLD, pattention_args={"init": "released"}), **NEW, split=True)
    b.set_backend("reference")
    b.set_grad_checkpointing()
    assert merge(a, b).blocks[0].mlp.num_param_tokens == 128 + 96
    rotated = [build(use_rot_pos_emb=True, dynamic_img_size=True) for _ in range(2)]
    for model, size in zip(rotated, (32, 48), strict=True):
        logits(model, torch.randn(1, 3, size, size))
    merge(*rotated)
    students = [timm.create_model("tokenformer_small_distilled", **SHAPE) for _ in range(2)]
    students[0].set_distilled_training()
    merge(*students)


@pytest.mark.parametrize("what", ["keys", "values", "τ", "gates"])
def test_an_ancestor_whose_pairs_were_trained_on(what):
    old = build("softmax", **OLD)
    a, b = (grow(copy.deepcopy(old), **NEW) for _ in range(2))
    layer = b.blocks[1].attn.key
    tensors = (layer.key_param_tokens, layer.value_param_tokens, layer.tau, layer.gate)
    with torch.no_grad():
        dict(zip(("keys", "values", "τ", "gates"), tensors, strict=True))[what].view(-1)[0] += 1e-3
    with pytest.raises(InputError, match=f"blocks.1.attn.key: model_b .* their {what} differ"):
        merge(a, b, old)
