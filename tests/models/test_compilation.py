import copy

import pytest
import timm
import torch
from torch._dynamo.testing import CompileCounter

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import compile_blocks


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(depth=2, **kwargs):
    return timm.create_model(
        "tokenformer_tiny",
        img_size=32,
        patch_size=16,
        embed_dim=24,
        num_heads=2,
        depth=depth,
        num_classes=5,
        **kwargs,
    )


def images(batch=2):
    return torch.randn(batch, 3, 32, 32)


def test_blocks_share_their_code_whatever_their_drop_rates():
    model, counter = build(depth=12, drop_path_rate=0.2).train(), CompileCounter()
    compile_blocks(model, backend=counter, fullgraph=True)
    for _ in range(2):
        model(images()).sum().backward()
    # the first block, whose rate is zero; the second; all others
    assert counter.frame_count == 3


def test_evaluation_and_a_last_batch_are_compiled_too():
    model, counter = build(depth=12, drop_path_rate=0.2).train(), CompileCounter()
    compile_blocks(model, backend=counter, fullgraph=True)
    model(images()).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        model(images()).sum().backward()
    model.eval()
    with torch.no_grad():
        for batch in (4, 4, 3, 1, 5):
            model(images(batch))
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        model(images(5))
    assert counter.frame_count <= 14


def test_trains_as_the_uncompiled_model_does_and_keeps_its_names():
    model = build().train()
    compiled = copy.deepcopy(model)
    compile_blocks(compiled, fullgraph=True)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert copy.deepcopy(compiled).blocks[0]._compiled_call_impl is None
    x = images()
    for m in (model, compiled):
        m(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    for a, b in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


def test_serves_other_vits():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    model(images())
    assert counter.frame_count == 1


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InputError, match="ResNet has no transformer blocks"):
        compile_blocks(timm.create_model("resnet10t"))
