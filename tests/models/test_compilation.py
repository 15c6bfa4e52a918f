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


@pytest.mark.slow
def test_evaluation_and_a_last_batch_are_compiled_too(small, images):
    model, counter = small(img_size=32, depth=12, drop_path_rate=0.2).train(), CompileCounter()
    compile_blocks(model, backend=counter, fullgraph=True)
    model(images(32)).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        model(images(32)).sum().backward()
    model.eval()
    with torch.no_grad():
        for batch in (4, 4, 3, 1, 5):
            model(images(32, batch=batch))
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        model(images(32, batch=5))
    assert counter.frame_count <= 9


@pytest.mark.parametrize(
    ("backend", "with_parts"),
    [
        ("aot_eager", False),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_trains_as_the_uncompiled_model_does_and_keeps_its_names(
    small, images, parts, backend, with_parts
):
    model = small(img_size=32, **(parts if with_parts else {})).train()
    compiled = copy.deepcopy(model)
    compile_blocks(compiled, backend=backend, fullgraph=True)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert copy.deepcopy(compiled).blocks[0]._compiled_call_impl is None
    x = images(32)
    for m in (model, compiled):
        m(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    for a, b in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_sizes_of_a_nested_model_share_their_code(small, images):
    model, counter = small(img_size=32, nested=(0.1, 0.2, 0.3, 0.5, 0.75)).train(), CompileCounter()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False):
        compile_blocks(model, backend=counter, fullgraph=True)
        for size in (1.0, 0.5, 0.2, 0.1, 0.3, 0.75):
            model.set_size(size)
            model(images(32)).sum().backward()
        # all pairs; the first size, whose code is for it alone; any size
        assert counter.frame_count == 3


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InputError, match="ResNet has no transformer blocks: omit"):
        compile_blocks(timm.create_model("resnet10t"))
