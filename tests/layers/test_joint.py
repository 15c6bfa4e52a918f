"""Query, key and value by one product, and when they are computed one by one."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrize import register_parametrization

from tokenformer_vit.benchmarking.variants import Released
from tokenformer_vit.layers import Attention, Pattention, joint
from tokenformer_vit.layers.split import split_tokens
from tokenformer_vit.ops import THETAS

WIDTH, PAIRS = 24, 20


@pytest.fixture
def calls(monkeypatch):
    """Count the joint calls."""
    counted = []

    def count(*args):
        counted.append(args)
        return original(*args)

    original = joint.pattention_joint
    monkeypatch.setattr(joint, "pattention_joint", count)
    return counted


def attention(jointly=True, pairs=PAIRS, **kwargs):
    layer = Attention(WIDTH, 2, pairs, 28, **kwargs)
    layer.joint = jointly
    return layer


def tokens(batch=2):
    return torch.randn(batch, 9, WIDTH)


def agrees_with_single_calls(layer, x):
    """Compare outputs and gradients with those of separate calls."""
    twin = copy.deepcopy(layer)
    twin.joint = False
    outs = [module(x) for module in (layer, twin)]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    for out in outs:
        out.square().sum().backward()
    for ours, expected in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("theta", THETAS)
def test_computes_what_three_layers_compute(theta, learned, calls):
    layer = attention(theta=theta, qk_norm=learned, pattention_args={"learn_tau": learned})
    with torch.no_grad():
        for factor, part in zip(
            (0.5, 1.0, 1.7), (layer.query, layer.key, layer.value), strict=True
        ):
            part.tau *= factor
    agrees_with_single_calls(layer, tokens())
    assert len(calls) == 1


def hook_forward(layer):
    layer.key.register_forward_hook(lambda *args: None)


def hook_before(layer):
    layer.query.register_forward_pre_hook(lambda *args: None)


def hook_backward(layer):
    layer.value.register_full_backward_hook(lambda *args: None)


def mask(layer):
    layer.query.active = torch.arange(7)


def split(layer):
    for part in (layer.query, layer.key, layer.value):
        split_tokens(part, 8)


def split_one(layer):
    split_tokens(layer.key, 8)


def replace(layer):
    layer.query = Released(layer.query)


def override(layer):
    layer.key.forward = lambda x: 2 * Pattention.forward(layer.key, x)


def derive(layer):
    class Doubled(Pattention):
        def forward(self, x):
            return 2 * super().forward(x)

    layer.value.__class__ = Doubled


def parametrize(layer):
    class Double(nn.Module):
        def forward(self, tensor):
            return 2 * tensor

    register_parametrization(layer.key, "value_param_tokens", Double())


def another_theta(layer):
    layer.value = Pattention(WIDTH, WIDTH, PAIRS, theta="softmax")


def another_eps(layer):
    layer.query.eps = 0.5


def another_backend(layer):
    layer.key.backend = "reference"


@pytest.mark.parametrize(
    "change",
    [
        *(hook_forward, hook_before, hook_backward, mask, split, split_one),
        *(replace, override, derive, parametrize, another_theta, another_eps, another_backend),
    ],
)
def test_layers_that_differ_are_called_by_themselves(change, calls):
    layer, x = attention(), tokens()
    change(layer)
    separate = layer.query(x), layer.key(x), layer.value(x)
    for whole, part in zip(layer.project(x), separate, strict=True):
        assert torch.equal(whole.transpose(1, 2).flatten(2), part)
    assert not calls


@pytest.mark.parametrize("gated", [("query", "key", "value"), ("value",)], ids=len)
@pytest.mark.parametrize("jointly", [True, None])
def test_layers_with_gates_are_called_by_themselves(gated, jointly, calls):
    layer, x = attention(jointly, theta="softmax"), torch.randn(1, 1, WIDTH)
    with torch.no_grad():
        layer(x)
        assert len(calls) == 1
        for name in gated:
            own = Pattention(WIDTH, WIDTH, PAIRS, theta="softmax", gate="fixed")
            own.gate.uniform_(0.5, 2)
            setattr(layer, name, own)
        separate = layer.query(x), layer.key(x), layer.value(x)
        for whole, part in zip(layer.project(x), separate, strict=True):
            assert torch.equal(whole.transpose(1, 2).flatten(2), part)
    assert len(calls) == 1


def test_layers_of_unequal_size():
    layer = attention()
    layer.key = Pattention(WIDTH, WIDTH, PAIRS + 3)
    agrees_with_single_calls(layer, tokens())


def test_hooks_fire_also_those_of_all_modules(calls):
    layer, seen = attention(), []
    handles = [layer.key.register_forward_hook(lambda module, *_: seen.append(module))]
    layer(tokens())
    handles[0].remove()
    layer(tokens())
    assert (seen, len(calls)) == ([layer.key], 1)
    every = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    layer(tokens())
    every.remove()
    assert seen.count(layer.query) == 1
    assert len(calls) == 1


def test_by_default_only_on_a_gpu_and_for_an_input_as_large_as_the_keys(calls):
    attention(jointly=None)(tokens(50))
    assert not calls
    with FakeTensorMode():
        layer = Attention(WIDTH, 2, PAIRS, 28, device="cuda")
        for rows in (3 * PAIRS - 1, 3 * PAIRS):
            layer(torch.empty(1, rows, WIDTH, device="cuda"))
            assert len(calls) == (rows == 3 * PAIRS)
        layer.joint = False
        layer(torch.empty(1, 3 * PAIRS, WIDTH, device="cuda"))
    assert len(calls) == 1


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh")
def test_compiled_blocks_share_their_code():
    layers, counter = nn.Sequential(*(attention() for _ in range(3))), CompileCounter()
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
    for batch in (2, 3, 5):
        layers(tokens(batch).requires_grad_()).sum().backward()
    assert counter.frame_count == 2  # the second has any batch size


def test_exports():
    layer, x = attention().eval(), tokens()
    expected = layer(x)
    dynamic = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=dynamic).module()
    traced = torch.jit.trace(layer, x)
    torch.jit.save(traced, io.BytesIO())
    more = tokens(3)
    for module in (torch.jit.script(layer), traced, exported):
        torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(exported(more), layer(more))


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_a_trace_on_a_gpu_does_not_ask_for_the_size(monkeypatch, calls):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layer, x = attention(jointly=None).eval(), tokens(50)
    layer(x)
    assert len(calls) == 1
    torch.jit.trace(layer, x, check_trace=False)
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_the_default(dtype, compiled, calls):
    layer = Attention(96, 2, 144, 96, device="cuda")
    twin = copy.deepcopy(layer)
    twin.joint = False
    exact = copy.deepcopy(twin).double()
    x = torch.randn(8, 197, 96, device="cuda")
    upstream = torch.randn_like(x)
    grads = {}
    for name, module in (("joint", layer), ("separate", twin), ("exact", exact)):
        if compiled and name != "exact":
            module.compile(fullgraph=True)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32 and name != "exact"):
            out = module(x.double() if name == "exact" else x)
        out.backward(upstream.to(out.dtype))
        grads[name] = [p.grad.double() for p in module.parameters()]
    assert compiled or len(calls) == 1
    for ours, single, b in zip(*grads.values(), strict=True):
        assert (ours - b).norm() <= 1.2 * (single - b).norm() + 1e-6 * b.norm()


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("count", [1, 8])
def test_few_tokens_without_gradient_share_theta_to_the_last_digit(theta, count, calls):
    layer, x = attention(None, theta=theta), torch.randn(1, count, WIDTH)
    layer.key.tau.mul_(1.5)  # each has its own
    with torch.no_grad():
        shared = layer.query_key_value(x)
        layer.joint = False
        for whole, part in zip(shared, layer.query_key_value(x), strict=True):
            if theta == "gelu_tanh_l2":  # PyTorch's tanh depends on the place in the tensor
                torch.testing.assert_close(whole, part)
            else:
                assert torch.equal(whole, part)
        layer.joint = None
        assert len(calls) == 1
        layer.query_key_value(tokens())
    layer.query_key_value(x)
    assert len(calls) == 1


@torch.no_grad()
def test_a_gpu_calls_other_layers_by_themselves(monkeypatch, calls):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layer = attention(jointly=None)
    layer.query = nn.Linear(WIDTH, WIDTH)
    assert layer.query_key_value(tokens(50))[0].shape == (50, 9, WIDTH)
    assert not calls


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@torch.no_grad()
def test_a_trace_of_few_tokens_takes_any_number():
    layer = attention(None).eval()
    traced = torch.jit.trace(layer, torch.randn(1, 1, WIDTH), check_trace=False)
    x = tokens()
    torch.testing.assert_close(traced(x), layer(x), rtol=1e-4, atol=1e-5)
