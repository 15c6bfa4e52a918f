import math

import pytest
import torch
from timm.layers import RotaryEmbeddingCat, set_fused_attn, use_fused_attn

from tokenformer_vit.layers import Attention, BlockRMSNorm


@pytest.fixture(params=[True, False], ids=["fused", "unfused"])
def fused(request):
    before = use_fused_attn()
    set_fused_attn(request.param)
    yield request.param
    set_fused_attn(before)


def attention(**kwargs):
    return Attention(48, 3, 64, 72, **kwargs).double().eval()


def tokens():
    return torch.randn(2, 9, 48, dtype=torch.float64)


def reference(layer, x, allowed=None, bias=0.0):
    """Multi-head attention, a head at a time."""
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    heads = []
    for q_head, k_head, v_head in zip(*(t.split(16, dim=-1) for t in (q, k, v)), strict=True):
        scores = q_head @ k_head.mT / math.sqrt(16) + bias
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        heads.append(scores.softmax(-1) @ v_head)
    return layer.proj(torch.cat(heads, dim=-1))


def test_masks(fused):
    """A boolean mask is true where a token may be seen; a mask of numbers is added."""
    layer, x, bias = attention(), tokens(), torch.randn(9, 9, dtype=torch.float64)
    allowed = torch.rand(9, 9) < 0.6
    allowed.fill_diagonal_(True)
    causal = layer(x, is_causal=True)
    torch.testing.assert_close(causal, reference(layer, x, torch.ones(9, 9).tril().bool()))
    seen = layer(x, attn_mask=allowed[None, None])
    torch.testing.assert_close(seen, reference(layer, x, allowed))
    torch.testing.assert_close(layer(x, attn_mask=bias[None, None]), reference(layer, x, bias=bias))


def test_the_last_tokens_are_rotated_by_row_and_column(fused):
    layer, x = attention(qk_norm=True, norm_layer=BlockRMSNorm), torch.randn(2, 3 + 6, 48).double()
    embedding = RotaryEmbeddingCat(
        16, in_pixels=False, temperature=50.0, feat_shape=(2, 3), rotate_half=True
    )
    rope = embedding.double().get_embed()  # (6, 32)
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3)).double()
    angles = places[:, :, None] * 50.0 ** -(torch.arange(4) / 4)  # a quarter of a head each
    turns = torch.polar(torch.ones_like(angles), angles).flatten(1)  # (6, 8)
    layers = (layer.query, layer.key, layer.value)
    q, k, v = (each(x).unflatten(2, (3, 16)).transpose(1, 2) for each in layers)
    q, k = layer.q_norm(q), layer.k_norm(k)
    for each in (q, k):
        rotated = torch.complex(*each[:, :, 3:].chunk(2, dim=-1)) * turns
        each[:, :, 3:] = torch.cat((rotated.real, rotated.imag), dim=-1)
    expected = layer.proj(((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, rope=rope), expected, rtol=1e-6, atol=1e-6)
    kept = torch.stack([torch.randperm(6)[:4] for _ in x])  # others for each sample
    together = layer(x[:, :7], rope=rope[kept][:, None])
    for sample, places, out in zip(x, kept, together, strict=True):
        torch.testing.assert_close(layer(sample[None, :7], rope=rope[places])[0], out)


def test_is_multi_head_attention_with_dropout_only_while_training(fused):
    layer, x = attention(attn_drop=0.5, proj_drop=0.5), tokens()
    assert layer.fused_attn == fused
    torch.testing.assert_close(layer(x), reference(layer, x))
    layer.train()
    assert (layer(x) == 0).double().mean() == pytest.approx(0.5, abs=0.15)
    layer.proj_drop.p = 0.0
    assert not torch.allclose(layer(x), layer(x))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"num_heads .* 48.* got 5"):
        Attention(48, 5, 64, 64)
