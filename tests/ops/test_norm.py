import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.ops import layer_norm, rms_norm


@pytest.fixture(params=[layer_norm, rms_norm])
def norm(request):
    return request.param


def exact(norm, x, upstream):
    x = x.detach().double().requires_grad_()
    centred = x - x.mean(-1, keepdim=True) if norm is layer_norm else x
    out = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return out.detach(), torch.autograd.grad(out, x, upstream.double())[0]


def inputs(dtype=torch.float32, shape=(2, 197, 768)):
    x = (3 * torch.randn(shape) + 2).to(dtype).requires_grad_()
    return x, torch.randn(shape)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_agrees_with_float64(norm, backend):
    x, upstream = inputs()
    out = norm(x, x.shape[-1], backend=backend)
    (grad,) = torch.autograd.grad(out, x, upstream)
    for actual, expected in zip((out, grad), exact(norm, x, upstream), strict=True):
        assert (actual.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gradients_and_their_gradients(norm, eps):
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: norm(x, 7, eps), x)
    assert torch.autograd.gradgradcheck(lambda x: norm(x, 7, eps), x)

    def thrice(x):
        (first,) = torch.autograd.grad(norm(x, 7, eps).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return second

    assert torch.autograd.gradcheck(thrice, x, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_that_of_plain_pytorch(norm, dtype):
    x, upstream = inputs(dtype)
    upstream = upstream.to(dtype)
    expected = exact(norm, x, upstream)
    errors = {}
    for backend in ("reference", "fused"):
        out = norm(x, x.shape[-1], backend=backend)
        assert out.dtype == dtype
        (grad,) = torch.autograd.grad(out, x, upstream)
        assert grad.dtype == dtype
        errors[backend] = [
            (a.double() - b).norm() for a, b in zip((out, grad), expected, strict=True)
        ]
    assert all(f <= 2 * r for f, r in zip(errors["fused"], errors["reference"], strict=True))


def test_keeps_only_the_input_of_the_product_behind_it(norm):
    x, _ = inputs()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        out = norm(x, 768)
        F.linear(out, torch.randn(8, 768, dtype=torch.bfloat16, requires_grad=True))
    assert out.dtype == torch.bfloat16
    assert {t.data_ptr() for t in kept if t.numel() == x.numel()} == {out.data_ptr()}
    weight, rstd = 2 * 8 * 768, 4 * 2 * 197
    assert sum(t.nbytes for t in kept if t.data_ptr() != out.data_ptr()) == weight + rstd


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_code_for_a_cpu_stores_one_number_a_row(norm, trained):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    class Norm(torch.nn.Module):
        def forward(self, x):
            return norm(x, 48)

    def stored(graph):
        modules = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
        nodes = [node for each in modules for node in each.graph.nodes]
        return [node for node in nodes if "as_strided" in str(node.target)]

    module = Norm()
    x = torch.randn(2, 5, 48, requires_grad=trained)
    out = torch.compile(module, fullgraph=True, backend=keep)(x)
    torch.testing.assert_close(out, module(x), rtol=1e-6, atol=1e-6)
    # Without a gradient, the RMSNorm is PyTorch's.
    assert len(stored(graphs[0])) == (trained or norm is layer_norm)
    assert not stored(torch.export.export(module, (x,)).graph_module)


def test_compiled_layer_norm_has_the_digits_of_pytorch():
    x, _ = inputs(shape=(3, 48))

    def ours(x):
        return layer_norm(x, 48), layer_norm(x.detach(), 48)

    def plain(x):
        return F.layer_norm(x, (48,), eps=1e-6)

    for out in torch.compile(ours, fullgraph=True)(x):
        assert torch.equal(out, torch.compile(plain, fullgraph=True)(x))


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_rows_are_finite(norm, value):
    x = torch.full((2, 8), value, requires_grad=True)
    norm(x, 8).square().sum().backward()
    assert x.grad.isfinite().all()


def test_gradients_of_single_samples(norm):
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def loss(x):
        return norm(x, 8).pow(3).sum()

    single = torch.stack([torch.func.grad(loss)(sample) for sample in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), single)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_refuses_what_is_no_token_of_its_width(norm, backend):
    for trained in (False, True):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            norm(torch.randn(3, 9, requires_grad=trained), 8, backend=backend)
    if norm is layer_norm or backend == "fused":  # PyTorch's RMSNorm takes whole numbers
        with pytest.raises((TypeError, NotImplementedError)):
            norm(torch.ones(3, 8, dtype=torch.long), 8, backend=backend)
