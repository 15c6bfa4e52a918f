import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from tokenformer_vit.ops import layer_norm


def inputs(dtype=torch.float32, shape=(3, 197, 48)):
    x = (3 * torch.randn(shape) + 0.5).to(dtype).requires_grad_()
    return x, torch.randn(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_one_rounding(dtype):
    x, upstream = inputs(dtype)
    exact = x.detach().double().requires_grad_()
    expected = F.layer_norm(exact, (48,), eps=1e-6)
    (exact_grad,) = torch.autograd.grad(expected, exact, upstream.to(dtype).double())
    y = layer_norm(x)
    (grad,) = torch.autograd.grad(y, x, upstream.to(dtype))
    assert y.dtype == grad.dtype == dtype
    limit = max(0.6 * torch.finfo(dtype).eps, 3e-7)
    assert (y.double() - expected).norm() < limit * expected.norm()
    # In low precision it is computed from the rounded output.
    assert (grad.double() - exact_grad).norm() < 1.5 * limit * exact_grad.norm()


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_derivatives_up_to_the_third(eps):
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def norm(x):
        return layer_norm(x, eps=eps)

    def slope(x):
        return torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)[0]

    assert gradcheck(norm, x, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(norm, x, check_batched_grad=True, check_fwd_over_rev=True)
    assert gradgradcheck(slope, x)


def test_keeps_its_output_alone():
    x, _ = inputs()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = layer_norm(x)
    assert y.dtype == torch.bfloat16
    assert sum(t.nbytes for t in kept) == y.nbytes + 4 * y[..., 0].numel()


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_code_has_the_digits_of_pytorch(trained):
    x, _ = inputs(shape=(3, 48))
    x = x.requires_grad_(trained) if trained else x.detach()
    ours = torch.compile(lambda x: layer_norm(x), fullgraph=True)(x)
    plain = torch.compile(lambda x: F.layer_norm(x, (48,), eps=1e-6), fullgraph=True)(x)
    assert torch.equal(ours, plain)
