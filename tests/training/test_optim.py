"""Training under bfloat16 autocast."""

from typing import Any

import pytest
import timm
import torch
from mmengine.logging import MMLogger

from tokenformer_vit.training import AutocastOptimWrapper, optim


@pytest.mark.skipif(torch.cuda.is_available(), reason="fused attention is fast on a GPU")
@pytest.mark.parametrize("name", ["tokenformer_tiny", "vit_tiny_patch16_224"])
def test_on_a_cpu_attention_is_not_fused_and_computes_the_same(name):
    model: Any = timm.create_model(
        name, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5
    )
    images = torch.randn(4, 3, 32, 32)
    fused = model(images)
    wrapper = AutocastOptimWrapper(torch.optim.SGD(model.parameters(), 0.1))
    with wrapper.optim_context(model):
        assert not any(block.attn.fused_attn for block in model.blocks)
        under_autocast = model(images)
    assert all(block.attn.fused_attn for block in model.blocks)  # faster without a gradient
    assert under_autocast.dtype == torch.bfloat16
    torch.testing.assert_close(model(images), fused, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(under_autocast.float(), fused, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["tokenformer_tiny", "vit_tiny_patch16_224"])
def test_blocks_that_are_computed_again_have_the_same_attention(name):
    torch.manual_seed(0)
    model: Any = timm.create_model(
        name, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5
    ).train()
    images, gradients = torch.randn(4, 3, 32, 32), []
    fused = [block.attn.fused_attn for block in model.blocks]
    for again in (False, True):
        model.set_grad_checkpointing(again)
        wrapper = AutocastOptimWrapper(torch.optim.SGD(model.parameters(), 0.0))
        with wrapper.optim_context(model):
            loss = model(images).float().square().sum()
        wrapper.backward(loss)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for plain, repeated in zip(*gradients, strict=True):
        torch.testing.assert_close(repeated, plain)
    assert [block.attn.fused_attn for block in model.blocks] == fused


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is fast in bfloat16")
@pytest.mark.parametrize("speed", [0.25, 4.0])
def test_the_log_says_where_bfloat16_is_slow(speed, monkeypatch):
    log = MMLogger.get_instance("bfloat16")
    said: list[str] = []
    monkeypatch.setattr(log, "log", lambda level, message: said.append(message))
    monkeypatch.setattr(optim, "bfloat16_speed", lambda: speed)
    AutocastOptimWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
    slow = "4.0 times as fast in float32 as in bfloat16"
    assert [slow in message for message in said] == ([True] if speed < 1 else [])


def test_bfloat16_is_slow_if_its_products_take_longer(monkeypatch):
    now, product = [0.0], torch.mm

    def timed(a, b):
        now[0] += 4.0 if a.dtype == torch.bfloat16 else 1.0
        return product(a, b)

    monkeypatch.setattr(optim.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", timed)
    assert optim.bfloat16_speed() == 0.25
