import copy

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Attention, BlockLayerNorm, Pattention
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.ops import THETAS


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


@pytest.mark.slow
def test_blocks_share_their_code_whatever_their_drop_rates():
    model, counter = build(depth=12, drop_path_rate=0.2).train(), CompileCounter()
    compile_blocks(model, backend=counter, fullgraph=True)
    for _ in range(2):
        model(images()).sum().backward()
    # the first block, whose rate is zero; the second; all others
    assert counter.frame_count == 3


@pytest.mark.slow
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
    assert counter.frame_count <= 9


@pytest.mark.parametrize("with_parts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trains_as_the_uncompiled_model_does_and_keeps_its_names(parts, with_parts):
    model = build(**(parts if with_parts else {})).train()
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


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_compiled_blocks_keep_the_scores_and_not_the_weights(dtype):
    # Every Θ with a number of pairs of its own, so that what is kept shows whose it is.
    layers = [Pattention(48, 48, 66 + i, theta=theta) for i, theta in enumerate(THETAS)]
    attention = Attention(48, 2, 80, 90)
    attention.joint = True
    model = nn.Sequential(
        *(nn.Sequential(BlockLayerNorm(48), layer) for layer in layers), attention
    )
    model.to(dtype).compile(fullgraph=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        model(torch.randn(2, 37, 48, dtype=dtype, requires_grad=True))
    for layer in layers:
        scores = [t for t in kept if t.numel() == 2 * 37 * layer.num_param_tokens]
        assert len(scores) == 1, layer
        assert scores[0].dtype == dtype
    assert sum(t.numel() == 2 * 37 * 3 * 80 for t in kept) == 1  # of query, key and value
    assert not any(t.numel() == 3 * 80 * 48 for t in kept)  # a copy of their keys


@pytest.mark.slow
def test_sizes_of_a_nested_model_share_their_code():
    model, counter = build(nested=(0.1, 0.2, 0.3, 0.5, 0.75)).train(), CompileCounter()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False):
        compile_blocks(model, backend=counter, fullgraph=True)
        for size in (1.0, 0.5, 0.2, 0.1, 0.3, 0.75):
            model.set_size(size)
            model(images()).sum().backward()
        # all pairs; the first size, whose code is for it alone; any size
        assert counter.frame_count == 3
        for share in torch.rand(8).clamp(min=0.1).tolist():  # sizes that were not trained
            model.set_size(share)
            model(images()).sum().backward()
        assert counter.frame_count <= 6


@pytest.mark.slow
def test_a_compiled_size_computes_what_the_extracted_model_does():
    model = build(depth=1, nested=(0.25, 0.5)).eval()
    compiled, x = copy.deepcopy(model), images()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False), torch.no_grad():
        compile_blocks(compiled, backend="aot_eager")
        for size in (None, 0.25, 0.5, 0.4, {"ffn": 0.3}):
            compiled.set_size(size)
            model.set_size(size)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_serves_other_vits():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    model(images())
    assert counter.frame_count == 1


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InputError, match="ResNet has no transformer blocks"):
        compile_blocks(timm.create_model("resnet10t"))
