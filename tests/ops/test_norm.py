import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.ops import layer_norm

BACKENDS = ("auto", "reference")


def inputs(dtype=torch.float32, shape=(3, 197, 48)):
    x = (3 * torch.randn(shape) + 0.5).to(dtype).requires_grad_()
    return x, torch.randn(shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_one_rounding(dtype, backend):
    x, upstream = inputs(dtype)
    exact = x.detach().double().requires_grad_()
    expected = F.layer_norm(exact, (48,), eps=1e-6)
    (exact_grad,) = torch.autograd.grad(expected, exact, upstream.to(dtype).double())
    y = layer_norm(x, 48, backend=backend)
    (grad,) = torch.autograd.grad(y, x, upstream.to(dtype))
    assert y.dtype == grad.dtype == dtype
    limit = max(0.6 * torch.finfo(dtype).eps, 3e-7)
    assert (y.double() - expected).norm() < limit * expected.norm()
    # In low precision it is computed from the rounded output.
    assert (grad.double() - exact_grad).norm() < 1.5 * limit * exact_grad.norm()


def test_gradcheck():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer_norm(x, 7), x)
    assert torch.autograd.gradgradcheck(lambda x: layer_norm(x, 7, backend="reference"), x)


def test_second_derivatives_are_refused():
    x, _ = inputs()
    (grad,) = torch.autograd.grad(layer_norm(x, 48).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_keeps_its_output_alone():
    x, _ = inputs()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = layer_norm(x, 48)
    assert y.dtype == torch.bfloat16
    assert sum(t.nbytes for t in kept) == y.nbytes + 4 * y[..., 0].numel()


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_code_has_the_digits_of_pytorch(trained):
    x, _ = inputs(shape=(3, 48))
    x = x.requires_grad_(trained) if trained else x.detach()
    ours = torch.compile(lambda x: layer_norm(x, 48), fullgraph=True)(x)
    plain = torch.compile(lambda x: F.layer_norm(x, (48,), eps=1e-6), fullgraph=True)(x)
    assert torch.equal(ours, plain)


def test_gradients_of_single_samples():
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def loss(x):
        return layer_norm(x, 8).pow(3).sum()

    single = torch.stack([torch.func.grad(loss)(sample) for sample in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), single)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trained", [False, True])
def test_refuses_tokens_of_another_width(backend, trained):
    with pytest.raises(RuntimeError, match="normalized_shape"):
        layer_norm(torch.randn(3, 9, requires_grad=trained), 8, backend=backend)
