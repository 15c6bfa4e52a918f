import math

import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.ops import THETAS, default_tau, pattention, pattention_reference

SIZES = [(1, 64), (1, 100), (197, 72), (197, 576)]


def plain(x, keys, values, theta):
    """The authors' code, in the precision of its operands; the tanh is ours."""
    scores, pairs = x @ keys.T, keys.shape[0]
    if theta == "softmax":
        weights = F.softmax(scores, dim=-1) * pairs
    elif theta == "gelu_l1":
        weights = F.gelu(scores)
        weights = weights / weights.norm(p=1, dim=-1, keepdim=True) * pairs
    elif theta == "gelu_l2":
        weights = F.gelu(scores / scores.norm(p=2, dim=-1, keepdim=True) * math.sqrt(pairs))
    elif theta == "gelu_tanh_l2":
        z = scores / scores.norm(p=2, dim=-1, keepdim=True) * math.sqrt(pairs)
        weights = F.gelu(z, approximate="tanh")
    else:
        weights = F.gelu(scores)
        weights = weights / weights.norm(p=2, dim=-1, keepdim=True) * math.sqrt(pairs)
    return weights @ values


def operands(tokens, pairs, width=48, out=40, dtype=torch.float64, batch=2):
    x = torch.randn(batch, tokens, width, dtype=dtype)
    keys = torch.randn(pairs, width, dtype=dtype) / math.sqrt(width)
    values = torch.randn(pairs, out, dtype=dtype) / math.sqrt(pairs)
    return [tensor.requires_grad_() for tensor in (x, keys, values)]


def tau_of(theta, pairs):
    return torch.tensor(default_tau(theta, pairs), dtype=torch.float64)


@pytest.mark.parametrize("op", [pattention, pattention_reference])
@pytest.mark.parametrize(("tokens", "pairs"), SIZES)
@pytest.mark.parametrize("theta", THETAS)
def test_output_and_gradients_are_the_released_ones(op, theta, tokens, pairs):
    inputs = operands(tokens, pairs)
    expected = plain(*inputs, theta)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    actual = op(*inputs, theta, tau_of(theta, pairs), 0.0)
    actual_grads = torch.autograd.grad(actual, inputs, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tau", [None, 1.7])
@pytest.mark.parametrize("theta", THETAS)
def test_gradcheck(theta, tau):
    x, keys, values = operands(tokens=2, pairs=5, width=4, out=3)
    tau = tau_of(theta, 5) if tau is None else torch.tensor(tau, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *tensors: pattention(*tensors, theta, tau, 1e-6), (x, keys, values)
    )


@pytest.mark.parametrize("theta", THETAS)
def test_zero_tokens_give_finite_outputs_and_gradients(theta):
    x, keys, values = operands(tokens=5, pairs=72, dtype=torch.float32)
    x = (x * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])[:, None]).detach().requires_grad_()
    out = pattention(x, keys, values, theta, tau_of(theta, 72).float())
    out.square().sum().backward()
    for tensor in (out, x.grad, keys.grad, values.grad):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "pairs"), SIZES)
@pytest.mark.parametrize("theta", THETAS)
def test_low_precision_error_is_at_most_twice_that_of_plain_pytorch(theta, tokens, pairs, dtype):
    # enough rows that the comparison of two rounding errors is not itself a matter of chance
    inputs = operands(tokens, pairs, batch=64 if tokens == 1 else 2)
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in low]
    upstream = torch.randn(*low[0].shape[:2], 40, dtype=dtype)

    def run(out, inputs):
        grads = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
        return [out.detach().double(), *(grad.double() for grad in grads)]

    exact = run(plain(*exact_inputs, theta), exact_inputs)
    stock = run(plain(*low, theta), low)
    ours = run(pattention(*low, theta, tau_of(theta, pairs).float()), low)
    for name, a, b, c in zip(("output", "x", "keys", "values"), ours, stock, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm(), name


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 300.0)])
@pytest.mark.parametrize("theta", [theta for theta in THETAS if theta != "softmax"])
def test_autocast_computes_the_norm_in_float32(theta, dtype, size):
    pairs = (
        576  # a running sum of so many ones stops at 256 in bfloat16; 576 · 300 is inf in float16
    )
    x, keys, values = torch.full((1, 1), size), torch.ones(pairs, 1), torch.eye(pairs)
    expected = plain(x.double(), keys.double(), values.double(), theta)
    with torch.autocast("cpu", dtype):
        out = pattention(x, keys, values, theta, tau_of(theta, pairs).float())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("theta", THETAS)
def test_keeps_dtype_and_leading_axes(theta, dtype):
    x, keys, values = operands(tokens=3, pairs=64)
    tau = torch.tensor(default_tau(theta, 64))
    tensors = [tensor.to(dtype) for tensor in (x[:, None].expand(2, 4, 3, 48), keys, values)]
    out = pattention(*tensors, theta, tau)
    assert out.dtype == dtype
    assert out.shape == (2, 4, 3, 40)


@pytest.mark.parametrize("theta", THETAS)
def test_reruns_are_bit_equal(theta):
    x, keys, values = operands(tokens=197, pairs=100, dtype=torch.float32)
    tau = tau_of(theta, 100).float()
    runs = []
    for _ in range(2):
        out = pattention(x, keys, values, theta, tau)
        runs.append([out, *torch.autograd.grad(out.square().sum(), (x, keys, values))])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_unknown_theta_lists_the_known():
    with pytest.raises(ValueError, match="'relu'") as error:
        pattention(*operands(1, 64), "relu", torch.tensor(8.0))
    assert all(theta in str(error.value) for theta in THETAS)
