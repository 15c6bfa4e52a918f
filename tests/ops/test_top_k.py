"""Top-k Pattention is the dense one with the weakest weights of each input token set to zero."""

import math

import pytest
import torch
import torch.nn.functional as F

from tokenformer_vit.ops import THETAS, default_tau, pattention_reference, pattention_top_k
from tokenformer_vit.ops.theta import theta_weights

PAIRS = 72


def operands(dtype=torch.float64, pairs=PAIRS):
    x = torch.randn(2, 7, 24, dtype=dtype)
    keys = torch.randn(pairs, 24, dtype=dtype) / math.sqrt(24)
    values = torch.randn(pairs, 40, dtype=dtype) / math.sqrt(pairs)
    return [tensor.requires_grad_() for tensor in (x, keys, values)]


def tau_of(theta, dtype=torch.float64):
    return torch.tensor(default_tau(theta, PAIRS), dtype=dtype)


def with_zeros(x, keys, values, theta, tau, k, gate=None):
    """Compute densely, with all but the k largest weights of each row set to zero."""
    weights = theta_weights(x @ keys.T, theta, tau, 1e-6, gate)
    kth = weights.abs().sort(dim=-1, descending=True).values[..., k - 1, None]
    return torch.where(weights.abs() >= kth, weights, 0.0) @ values


@pytest.mark.parametrize("k", [1, 5, PAIRS - 1, PAIRS])
@pytest.mark.parametrize("theta", THETAS)
def test_output_and_gradients_are_those_of_a_dense_layer_with_zeros(theta, k):
    inputs, tau = operands(), tau_of(theta)
    expected = with_zeros(*inputs, theta, tau, k)
    upstream = torch.randn_like(expected)
    actual = pattention_top_k(*inputs, theta, tau, 1e-6, k)
    assert actual.shape == (2, 7, 40)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("theta", THETAS)
def test_all_pairs_are_the_dense_layer(theta):
    inputs, tau = operands(torch.float32), tau_of(theta, torch.float32)
    dense = pattention_reference(*inputs, theta, tau, 1e-6)
    torch.testing.assert_close(pattention_top_k(*inputs, theta, tau, 1e-6, PAIRS), dense)


@pytest.mark.parametrize("theta", THETAS)
def test_error_in_float32_is_that_of_the_dense_layer(theta):
    exact = operands()
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    out = pattention_top_k(*single, theta, tau_of(theta, torch.float32), 1e-6, 9)
    expected = with_zeros(*exact, theta, tau_of(theta), 9)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(out, single, upstream.float())
    for ours, theirs in zip(grads, torch.autograd.grad(expected, exact, upstream), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("k", [4, 20])
def test_a_gate_chooses_among_open_pairs_first(k):
    inputs, tau, gate = operands(), tau_of("softmax"), torch.ones(PAIRS, dtype=torch.float64)
    gate[4:] = 0
    few = [inputs[0], inputs[1][:4], inputs[2][:4]]
    # Beyond the open pairs there are only weights of zero left to choose.
    actual = pattention_top_k(*inputs, "softmax", tau, 1e-6, k, gate)
    torch.testing.assert_close(actual, pattention_reference(*few, "softmax", tau, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_the_dtype(dtype):
    inputs = operands(dtype)
    out = pattention_top_k(*inputs, "gelu_l2", tau_of("gelu_l2", torch.float32), 1e-6, 9)
    assert out.dtype == dtype
    out.sum().backward()
    assert all(tensor.grad.dtype == dtype for tensor in inputs)


def test_runs_under_autocast():
    inputs, tau = operands(torch.float32), tau_of("gelu_l2", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = pattention_top_k(*inputs, "gelu_l2", tau, 1e-6, 9)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    expected = with_zeros(*inputs, "gelu_l2", tau, 9)
    # Of two weights of nearly the same size bfloat16 may choose the other: not in most tokens.
    assert F.cosine_similarity(out.float(), expected, dim=-1).median() > 0.999


def test_gradient_reaches_the_pairs_that_are_read_alone():
    inputs = operands()
    weights = theta_weights(inputs[0] @ inputs[1].T, "gelu_l2", tau_of("gelu_l2"), 1e-6)
    pattention_top_k(*inputs, "gelu_l2", tau_of("gelu_l2"), 1e-6, 2).sum().backward()
    read = torch.zeros(PAIRS, dtype=torch.bool)
    read[weights.abs().topk(2).indices.flatten()] = True
    assert torch.equal((inputs[2].grad != 0).any(dim=-1), read)
    assert not read.all()


def test_more_pairs_than_there_are():
    with pytest.raises(RuntimeError, match="out of range"):
        pattention_top_k(*operands(), "gelu_l2", tau_of("gelu_l2"), 1e-6, PAIRS + 1)
