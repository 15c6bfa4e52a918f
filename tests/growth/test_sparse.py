"""Top-k is set by kind of layer, in shares of the active pairs, and undone."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import tokenformer_vit  # noqa: F401
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.growth.masks import TokenMasks
from tokenformer_vit.growth.sparse import set_top_k, top_k
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


def build(theta="gelu_l2"):
    return timm.create_model("tokenformer_tiny", theta=theta, **SHAPE).eval()


def logits(model, x):
    with torch.no_grad():
        return model(x)


def numbers(model):
    return [layer.top_k for layer in pattention_layers(model).values()]


@pytest.mark.parametrize("theta", THETAS)
def test_all_pairs_compute_what_the_dense_model_does(theta, rounding):
    model, x = build(theta), torch.randn(4, 3, 32, 32)
    expected = logits(model, x)
    set_top_k(model, qkv=24, proj=1.0, ffn=1.0)
    assert numbers(model) == 2 * [24, 24, 24, 40, 56]
    error = (logits(model, x) - expected).abs().max() / expected.abs().max()
    assert error <= rounding(model)
    set_top_k(model)
    assert torch.equal(logits(model, x), expected)


def test_a_layer_reads_its_strongest_pairs():
    model, x = build(), torch.randn(4, 5, 32)
    set_top_k(model, ffn=7)
    layer = model.blocks[0].mlp
    weights = layer.weights(x)
    limit = weights.abs().topk(7).values[..., -1:]
    expected = torch.where(weights.abs() >= limit, weights, 0) @ layer.value_param_tokens
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-6)


def test_numbers_are_shares_of_the_active_pairs():
    model = build()
    masks = TokenMasks(model)
    masks.add("half", {"qkv": slice(12), "proj": slice(20), "ffn": slice(28)})
    with masks.use("half"):
        set_top_k(model, qkv=0.5, proj=20, ffn=0.01)
        assert numbers(model) == 2 * [6, 6, 6, 20, 1]
        assert logits(model, torch.randn(2, 3, 32, 32)).isfinite().all()


def test_a_context_is_undone():
    model, x = build(), torch.randn(4, 3, 32, 32)
    set_top_k(model, ffn=8)
    expected = logits(model, x)
    with top_k(model, qkv=0.25, ffn=0.5):
        assert numbers(model) == 2 * [6, 6, 6, None, 28]
        with pytest.raises(IndexError), top_k(model):
            [][len(numbers(model))]
        assert numbers(model) == 2 * [6, 6, 6, None, 28]
        assert not torch.equal(logits(model, x), expected)
    assert torch.equal(logits(model, x), expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"qkv": 25}, r"blocks.0.attn.query cannot read 25 of 24 pairs; give 1 to 24"),
        ({"ffn": 0}, "cannot read 0 of 56 pairs"),
        ({"proj": 0.0}, "above 0 and at most 1, but it is 0.0"),
        ({"proj": 1.5}, "above 0 and at most 1, but it is 1.5"),
        ({"ffn": "4"}, "cannot read '4' of 56 pairs; give 1 to 56"),
        ({"qkv": True}, "cannot read True of 24 pairs"),
    ],
)
def test_numbers_that_cannot_be(arguments, said):
    model = build()
    with pytest.raises(InputError, match=said):
        set_top_k(model, **arguments)
    assert numbers(model) == 10 * [None]


def test_a_number_of_numpy_is_taken():
    model = build()
    set_top_k(model, ffn=np.int64(4))
    assert numbers(model) == 2 * [None, None, None, None, 4]
    assert type(model.blocks[0].mlp.top_k) is int


def test_models_without_parameter_tokens():
    with pytest.raises(InputError, match="give a TokenFormer"):
        set_top_k(nn.Linear(2, 2), ffn=3)
