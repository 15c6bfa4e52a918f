import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.ops import THETAS, default_tau


def released(scores, theta, tau):
    """Weights by the authors' code, in their precision; those without a norm are ours."""
    if theta == "linear":
        return scores
    if theta == "softmax":
        return F.softmax(scores, dim=-1) * tau
    if theta == "gelu_l2":
        return F.gelu(scores / scores.norm(p=2, dim=-1, keepdim=True) * tau)
    weights = F.gelu(scores, approximate="tanh" if theta == "gelu_tanh" else "none")
    if order := {"gelu_l1": 1, "gelu_l2_post": 2}.get(theta):
        weights = weights / weights.norm(p=order, dim=-1, keepdim=True) * tau
    return weights


def test_released_default_of_tau():
    expected = {"softmax": 576, "gelu_l1": 576, "gelu": 1, "gelu_tanh": 1, "linear": 1}
    assert all(default_tau(theta, 576) == expected.get(theta, 24) for theta in THETAS)  # √576


def with_truth(scores, theta, eps):
    """Return weights and the gradient of scores in float32, and both in float64."""
    upstream, tau = torch.randn_like(scores), torch.tensor(default_tau(theta, scores.shape[-1]))
    found = []
    for a, scale in ((scores, tau), (scores.double(), tau.double())):
        weights = THETAS[theta].weights(a.requires_grad_(), scale, eps)
        (grad,) = torch.autograd.grad(weights, a, upstream.to(a.dtype))
        found += [weights.detach().double(), grad.double()]
    return found


@pytest.mark.parametrize("theta", THETAS)
def test_zero_rows_are_finite(theta):
    scores = torch.randn(4, 64)
    scores[1] = 0
    assert all(each.isfinite().all() for each in with_truth(scores, theta, 1e-6))


@pytest.mark.parametrize("theta", ["gelu_l1", "gelu_l2_post"])
def test_rows_far_below_zero_keep_their_digits(theta):
    weights, grad, expected, exact = with_truth(-5 - 3 * torch.rand(5, 64), theta, 0.0)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    assert (grad - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_sums_in_float32_and_rounds_once_to_the_dtype(theta, dtype):
    # A sum of ones in bfloat16 stops at 256.
    scores = torch.cat([torch.randn(64, 576), torch.ones(1, 576)]).to(dtype)
    tau = default_tau(theta, 576)
    with torch.autocast("cpu", torch.bfloat16):
        weights = THETAS[theta].weights(scores, torch.tensor(tau), 0.0)
    one_rounding = torch.finfo(dtype).eps / 2
    exact = released(scores.double(), theta, tau)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.double(), exact, rtol=1.02 * one_rounding, atol=1e-5)


@pytest.mark.parametrize("theta", [theta for theta in THETAS if THETAS[theta].norm_order == 2])
def test_the_range_of_the_l2_variants(theta):
    """A row's norm may be up to 1.8e19; the gradient needs one below 1e12 τ."""
    direction = torch.randn(7, 64)
    for size in (1e4, 1e11, 1e17):
        weights, grad, expected, exact = with_truth(size * direction, theta, 1e-6)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
        assert size > 1e12 or (grad - exact).norm() < 1e-5 * exact.norm(), size
