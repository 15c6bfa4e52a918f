import functools
import math
import operator
import re
from pathlib import Path

import pytest
import torch

from tokenformer_vit.ops import (
    THETAS,
    default_tau,
    find_theta,
    norm_shares,
    theta_weights,
    triton_theta,
)

SIZES = [(1, 64), (1, 576), (197, 72), (197, 100)]


def gelu(a):
    return a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))


def gelu_tanh(a):
    return a * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


def formula(theta, a, tau):
    """The paper's Table 4 and the authors' language code, in the precision of ``a``."""
    if theta == "softmax":
        return tau * a.exp() / a.exp().sum(-1, keepdim=True)
    if theta == "gelu_l1":
        return tau * gelu(a) / gelu(a).abs().sum(-1, keepdim=True)
    if theta == "gelu_l2":
        return gelu(tau * a / torch.linalg.vector_norm(a, dim=-1, keepdim=True))
    if theta == "gelu_tanh_l2":
        return gelu_tanh(tau * a / torch.linalg.vector_norm(a, dim=-1, keepdim=True))
    return tau * gelu(a) / torch.linalg.vector_norm(gelu(a), dim=-1, keepdim=True)


def double(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "pairs"), SIZES)
@pytest.mark.parametrize("theta", THETAS)
def test_is_the_published_formula(theta, tokens, pairs):
    scores = 3 * torch.randn(tokens, pairs, dtype=torch.float64)
    tau = math.sqrt(pairs) if "l2" in theta else pairs
    weights = theta_weights(scores, theta, double(tau), 0.0)
    torch.testing.assert_close(weights, formula(theta, scores, tau), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("theta", THETAS)
def test_follows_the_stored_tau_and_not_the_size(theta):
    scores = torch.randn(5, 72, dtype=torch.float64)
    weights = theta_weights(scores, theta, double(3.7), 0.0)
    torch.testing.assert_close(weights, formula(theta, scores, 3.7), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("theta", THETAS)
def test_released_default_of_tau(theta):
    expected = {"softmax": 576, "gelu_l1": 576, "gelu_l2": 24, "gelu_l2_post": 24}
    expected["gelu_tanh_l2"] = expected["gelu_l2"]
    assert default_tau(theta, 576) == expected[theta]


@pytest.mark.parametrize("theta", THETAS)
def test_eps_hardly_moves_an_ordinary_row(theta):
    scores = torch.randn(64, 100, dtype=torch.float64)
    tau = double(default_tau(theta, 100))
    exact = theta_weights(scores, theta, tau, 0.0)
    change = (theta_weights(scores, theta, tau, 1e-6) - exact).norm() / exact.norm()
    assert change < 1e-5


@pytest.mark.parametrize("theta", THETAS)
def test_zero_rows_are_finite(theta):
    scores = torch.randn(4, 64)
    scores[1] = 0
    scores.requires_grad_()
    weights = theta_weights(scores, theta, torch.tensor(default_tau(theta, 64)), 1e-6)
    weights.square().sum().backward()
    assert weights.isfinite().all()
    assert scores.grad.isfinite().all()


def test_gelu_l2_does_not_see_the_scale_of_its_scores():
    scores, tau = torch.randn(8, 64, dtype=torch.float64), double(8.0)
    torch.testing.assert_close(
        theta_weights(1000 * scores, "gelu_l2", tau, 0.0),
        theta_weights(scores, "gelu_l2", tau, 0.0),
    )


def test_softmax_of_large_scores_is_finite():
    weights = theta_weights(torch.tensor([[1e4, 0.0, -1e4]]), "softmax", torch.tensor(3.0), 1e-6)
    torch.testing.assert_close(weights, torch.tensor([[3.0, 0.0, 0.0]]))


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
def test_rounds_once(theta, dtype):
    scores = torch.randn(64, 100).to(dtype)
    tau = torch.tensor(default_tau(theta, 100))
    weights = theta_weights(scores, theta, tau, 0.0)
    exact = formula(theta, scores.double(), tau.double())
    one_rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(weights.double(), exact, rtol=1.02 * one_rounding, atol=1e-5)


@pytest.mark.parametrize("theta", [theta for theta in THETAS if theta != "softmax"])
def test_norms_beyond_the_range_of_float16(theta):
    scores = torch.full((1, 576), 300.0, dtype=torch.float16)
    assert scores.sum() == math.inf
    tau = torch.tensor(default_tau(theta, 576))
    weights = theta_weights(scores, theta, tau, 1e-6)
    expected = formula(theta, scores.double(), tau.double())
    torch.testing.assert_close(weights.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("theta", THETAS)
def test_keeps_the_dtype(theta, dtype):
    scores = torch.randn(3, 64).to(dtype)
    assert theta_weights(scores, theta, torch.tensor(8.0), 1e-6).dtype == dtype


@pytest.mark.parametrize("theta", THETAS)
def test_every_variant_has_hand_written_gradients(theta):
    scores, tau = torch.randn(7, 100), torch.tensor(10.0)
    kernels = THETAS[theta].kernels
    assert kernels is not None
    weights, _ = kernels.forward(scores, tau, 1e-6)
    torch.testing.assert_close(weights, theta_weights(scores, theta, tau, 1e-6))


def test_triton_kernels_are_of_known_variants():
    assert triton_theta.KERNELS.keys() <= THETAS.keys()
    assert {name for name in THETAS if THETAS[name].has_gate} == {"softmax"}


@pytest.mark.parametrize("theta", THETAS)
def test_what_is_normed_is_what_the_weights_depend_on(theta):
    scores = torch.randn(5, 60, dtype=torch.float64)
    tau = double(default_tau(theta, 60))
    weights = theta_weights(scores, theta, tau, 0.0)
    shares = norm_shares(scores, weights, theta)
    torch.testing.assert_close(shares.sum(-1), torch.ones(5, dtype=torch.float64))
    # Without half the pairs, a τ that follows their shares leaves the weights of the others.
    left = shares[:, 30:].sum(-1, keepdim=True) ** (1 / THETAS[theta].norm_order)
    for row in range(5):
        alone = theta_weights(scores[row, 30:], theta, tau * left[row, 0], 0.0)
        torch.testing.assert_close(alone, weights[row, 30:])


@pytest.mark.parametrize("theta", [theta for theta in THETAS if THETAS[theta].norm_order == 2])
@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_the_range_of_the_l2_variants(theta, implementation):
    """A row's norm may be up to 1.8e19; the gradient of the reference needs one below 1e12 τ."""
    tau, direction = torch.tensor(default_tau(theta, 64)), torch.randn(7, 64)
    grad = torch.randn(7, 64)
    for size in (1e4, 1e11, 1e17):
        scores = size * direction
        exact = scores.double().requires_grad_()
        expected = theta_weights(exact, theta, tau.double(), 1e-6)
        (exact_slope,) = torch.autograd.grad(expected, exact, grad.double())
        if implementation == "fused":
            weights, kept = THETAS[theta].kernels.forward(scores, tau, 1e-6)
            slope = THETAS[theta].kernels.backward(kept, tau, grad)[1]
        else:
            scores.requires_grad_()
            weights = theta_weights(scores, theta, tau, 1e-6)
            weights.backward(grad)
            slope = scores.grad
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-5)
        if implementation == "fused" or size < 1e12:
            error = (slope.double() - exact_slope).norm() / exact_slope.norm()
            assert error < 1e-5, size


@pytest.mark.parametrize("theta", THETAS)
def test_the_range_of_float16(theta):
    scores = (60_000 * torch.rand(7, 576) - 30_000).half()
    scores[:, 0] = 65_504  # the largest float16
    tau = torch.tensor(default_tau(theta, 576))
    for weights in (
        theta_weights(scores, theta, tau, 1e-6),
        THETAS[theta].kernels.forward(scores, tau, 1e-6)[0],
    ):
        expected = theta_weights(scores.double(), theta, tau.double(), 1e-6)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("theta", [theta for theta in THETAS if theta != "softmax"])
def test_the_range_of_float16_gradients_in_a_row_of_zeros(theta):
    limit = 1.3e5 * (1e-6 if theta == "gelu_l1" else 1e-3)
    scores = torch.zeros(1, 64, dtype=torch.float16, requires_grad=True)
    tau = torch.tensor(default_tau(theta, 64))
    weights = theta_weights(scores, theta, tau, 1e-6)
    _, kept = THETAS[theta].kernels.forward(scores.detach(), tau, 1e-6)
    for factor, fits in ((0.99, True), (1.02, False)):
        grad = torch.full_like(weights, factor * limit)
        (slope,) = torch.autograd.grad(weights, scores, grad, retain_graph=True)
        assert slope.isfinite().all() == fits
        assert THETAS[theta].kernels.backward(kept, tau, grad)[1].isfinite().all() == fits


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


def test_the_readme_derives_every_hand_written_gradient():
    readme = Path(triton_theta.__file__).with_name("README.md").read_text(encoding="utf-8")
    kept, _, _ = readme.partition("## What is kept")
    table = kept[kept.index("| Θ | kept") :]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {
        name for name, theta in THETAS.items() if theta.kernels is not None
    }
