import sys

import pytest
import torch
from timm.layers import LayerScale
from torch import nn

from tokenformer_vit.layers import Pattention, TokenFormerBlock
from tokenformer_vit.layers.block import DropPath


def test_is_pre_norm_attention_then_one_pattention():
    block = TokenFormerBlock(48, 3, norm="weight+bias", qk_norm=True).double()
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    attended = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), attended + block.mlp(block.norm2(attended)))


def test_pair_counts_follow_the_width_and_initial_scales_reach_all_five_layers():
    shared, gain = {"key_init_std": 1e-3}, 0.2
    block = TokenFormerBlock(192, 3, mlp_ratio=3.0, residual_init_gain=gain, pattention_args=shared)
    layers = [module for module in block.modules() if isinstance(module, Pattention)]
    assert [layer.num_param_tokens for layer in layers] == [192, 192, 192, 192, 576]
    assert [layer.init_gain for layer in layers] == [1, 1, 1, gain, gain]
    for layer in layers:
        assert layer.key_param_tokens.std().item() == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_samples_at_its_rate_and_keeps_the_mean(dtype):
    x = torch.ones(20_000, 2, 3, dtype=dtype)
    drop = DropPath(0.25)
    out = drop(x)
    kept = out[:, 0, 0] != 0
    assert kept.float().mean() == pytest.approx(0.75, abs=0.02)
    assert (out[kept] == torch.tensor(1 / 0.75, dtype=dtype)).all()
    assert (out[~kept] == 0).all()
    assert out.dtype == dtype
    assert torch.equal(drop.eval()(x), x)


def test_layer_scale_and_dropout():
    block, x = TokenFormerBlock(48, 3, init_values=1e-5), torch.randn(2, 5, 48)
    assert isinstance(block.ls1, LayerScale)
    assert 0 < (block(x) - x).abs().max() < 1e-3
    block = TokenFormerBlock(48, 3, proj_drop=1.0)  # also after the feed-forward layer
    assert torch.equal(block(x), x)
    assert not torch.equal(block.eval()(x), x)


def test_meta_device_and_dtype_reach_every_tensor():
    block = TokenFormerBlock(
        48, 3, norm="weight+bias", init_values=0.1, device="meta", dtype=torch.bfloat16
    )
    assert all(tensor.is_meta for tensor in block.state_dict().values())
    assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}


def test_arguments_of_an_ordinary_block_are_accepted_and_unknown_ones_named():
    TokenFormerBlock(48, 3, qkv_bias=True, act_layer=nn.GELU, norm_layer=nn.LayerNorm, depth=4)
    with pytest.raises(TypeError, match="init_gian"):
        TokenFormerBlock(48, 3, pattention_args={"init_gian": 1.0})
    with pytest.raises(TypeError, match="num_ffn_tokens, thetas"):
        TokenFormerBlock(48, 3, thetas="softmax", num_ffn_tokens=3)


def test_a_block_makes_few_calls_of_python():
    """Each takes the host about as long as a small operation of PyTorch."""
    block, x, calls = TokenFormerBlock(192, 3), torch.randn(2, 5, 192, requires_grad=True), []

    def note(frame, event, _):
        if event == "call" and "tokenformer_vit" in frame.f_globals["__name__"]:
            calls.append(frame)

    sys.setprofile(note)
    y = block(x)
    forward = len(calls)
    y.sum().backward()
    sys.setprofile(None)
    assert forward <= 32
    assert len(calls) <= 48
