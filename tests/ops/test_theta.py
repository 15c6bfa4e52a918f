import functools
import math
import operator

import pytest
import torch

from tokenformer_vit.ops import THETAS, default_tau, find_theta
from tokenformer_vit.ops.theta import norm_shares, theta_weights

SIZES = [(1, 64), (1, 576), (197, 72), (197, 100)]


def gelu(a):
    return a * 0.5 * torch.erfc(-a / math.sqrt(2))


def gelu_tanh(a):
    return a * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


def formula(theta, a, tau):
    """The paper's Table 4, the authors' language code and GELUs, in the precision of ``a``."""
    if theta == "softmax":
        return tau * a.exp() / a.exp().sum(-1, keepdim=True)
    if theta == "gelu_l1":
        return tau * gelu(a) / gelu(a).abs().sum(-1, keepdim=True)
    if theta == "gelu_l2":
        return gelu(tau * a / torch.linalg.vector_norm(a, dim=-1, keepdim=True))
    if theta == "gelu_l2_post":
        return tau * gelu(a) / torch.linalg.vector_norm(gelu(a), dim=-1, keepdim=True)
    return gelu_tanh(a) if theta == "gelu_tanh" else gelu(a)


def double(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "pairs"), SIZES)
@pytest.mark.parametrize("theta", THETAS)
def test_is_the_published_formula_for_any_tau(theta, tokens, pairs):
    scores = 3 * torch.randn(tokens, pairs, dtype=torch.float64)
    for tau in (math.sqrt(pairs) if "l2" in theta else pairs, 3.7):
        weights = theta_weights(scores, theta, double(tau), 0.0)
        torch.testing.assert_close(weights, formula(theta, scores, tau), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("theta", THETAS)
def test_released_default_of_tau(theta):
    expected = {"softmax": 576, "gelu_l1": 576, "gelu": 1, "gelu_tanh": 1}
    assert default_tau(theta, 576) == expected.get(theta, 24)  # √576 under L2


@pytest.mark.parametrize("theta", THETAS)
def test_zero_rows_are_finite(theta):
    scores = torch.randn(4, 64)
    scores[1] = 0
    scores.requires_grad_()
    weights = theta_weights(scores, theta, torch.tensor(default_tau(theta, 64)), 1e-6)
    weights.square().sum().backward()
    assert weights.isfinite().all()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("theta", ["gelu_l1", "gelu_l2_post"])
def test_rows_far_below_zero_keep_their_digits(theta):
    scores = -5 - 3 * torch.rand(5, 64)
    exact = scores.double().requires_grad_()
    scores.requires_grad_()
    tau = double(default_tau(theta, 64))
    expected = theta_weights(exact, theta, tau, 0.0)
    weights = theta_weights(scores, theta, tau.float(), 0.0)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)
    upstream = torch.randn(5, 64)
    (grad,) = torch.autograd.grad(weights, scores, upstream)
    (exact_grad,) = torch.autograd.grad(expected, exact, upstream.double())
    assert (grad.double() - exact_grad).norm() < 1e-4 * exact_grad.norm()


@pytest.mark.parametrize("theta", THETAS)
def test_norms_are_summed_in_float32(theta):
    pairs = 576
    scores = torch.ones(1, pairs, dtype=torch.bfloat16)
    low_precision_sum = functools.reduce(operator.add, scores[0])
    assert low_precision_sum < 0.5 * pairs

    tau = torch.tensor(default_tau(theta, pairs))
    with torch.autocast("cpu", torch.bfloat16):
        weights = theta_weights(scores, theta, tau, 1e-6)
    expected = formula(theta, scores.double(), tau.double())
    torch.testing.assert_close(weights.double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_rounds_once_and_keeps_the_dtype(theta, dtype):
    scores = torch.randn(64, 100).to(dtype)
    tau = torch.tensor(default_tau(theta, 100))
    weights = theta_weights(scores, theta, tau, 0.0)
    exact = formula(theta, scores.double(), tau.double())
    one_rounding = torch.finfo(dtype).eps / 2
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.double(), exact, rtol=1.02 * one_rounding, atol=1e-5)


@pytest.mark.parametrize("theta", THETAS)
def test_what_is_normed_is_what_the_weights_depend_on(theta):
    scores = torch.randn(5, 60, dtype=torch.float64)
    tau = double(default_tau(theta, 60))
    weights = theta_weights(scores, theta, tau, 0.0)
    shares, order = norm_shares(scores, weights, theta), THETAS[theta].norm_order
    torch.testing.assert_close(shares.sum(-1), double([float(order > 0)] * 5))
    # Without half the pairs, a τ that follows their shares leaves the weights of the others.
    left = shares[:, 30:].sum(-1, keepdim=True) ** (1 / order) if order else 1 + shares
    for row in range(5):
        alone = theta_weights(scores[row, 30:], theta, tau * left[row, 0], 0.0)
        torch.testing.assert_close(alone, weights[row, 30:])


@pytest.mark.parametrize("theta", [theta for theta in THETAS if THETAS[theta].norm_order == 2])
def test_the_range_of_the_l2_variants(theta):
    """A row's norm may be up to 1.8e19; the gradient needs one below 1e12 τ."""
    tau, direction = torch.tensor(default_tau(theta, 64)), torch.randn(7, 64)
    grad = torch.randn(7, 64)
    for size in (1e4, 1e11, 1e17):
        scores = (size * direction).requires_grad_()
        exact = scores.detach().double().requires_grad_()
        expected = theta_weights(exact, theta, tau.double(), 1e-6)
        (exact_slope,) = torch.autograd.grad(expected, exact, grad.double())
        weights = theta_weights(scores, theta, tau, 1e-6)
        weights.backward(grad)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-5)
        if size < 1e12:
            error = (scores.grad.double() - exact_slope).norm() / exact_slope.norm()
            assert error < 1e-5, size


@pytest.mark.parametrize(
    "call",
    [
        lambda: find_theta("relu"),
        lambda: default_tau("relu", 4),
        lambda: theta_weights(torch.randn(2, 4), "relu", torch.tensor(2.0), 1e-6),
    ],
)
def test_unknown_theta_lists_the_known(call):
    with pytest.raises(ValueError, match="'relu'") as error:
        call()
    assert all(theta in str(error.value) for theta in THETAS)
