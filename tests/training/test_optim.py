"""Training under bfloat16 autocast."""

from typing import Any

import pytest
import timm
import torch

from tokenformer_vit.training import AutocastOptimWrapper


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
    assert under_autocast.dtype == torch.bfloat16
    torch.testing.assert_close(model(images), fused, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(under_autocast.float(), fused, rtol=0.1, atol=0.1)
