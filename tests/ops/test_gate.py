"""The gate of softmax: open it is softmax, closed it is a layer without the pair."""

import math

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS, pattention
from tokenformer_vit.ops.theta import theta_weights

OPEN, CLOSED = 40, 9
TAU = torch.tensor(40.0, dtype=torch.float64)


def operands():
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    keys = torch.randn(OPEN + CLOSED, 24, dtype=torch.float64) / math.sqrt(24)
    values = torch.randn(OPEN + CLOSED, 32, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in (x, keys, values)]


def half_closed():
    gate = torch.ones(OPEN + CLOSED, dtype=torch.float64)
    gate[OPEN:] = 0
    return gate.requires_grad_()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_of_ones_is_softmax():
    inputs = operands()
    gated = pattention(*inputs, "softmax", TAU, gate=torch.ones(OPEN + CLOSED).double())
    plain = pattention(*inputs, "softmax", TAU, 1e-6)
    close(gated, plain)
    upstream = torch.randn_like(plain)
    for ours, theirs in zip(
        torch.autograd.grad(gated, inputs, upstream),
        torch.autograd.grad(plain, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_of_zeros_leaves_the_pairs_out():
    x, keys, values = operands()
    closed = pattention(x, keys, values, "softmax", TAU, gate=half_closed())
    without = pattention(x, keys[:OPEN], values[:OPEN], "softmax", TAU, 1e-6)
    close(closed, without)


def test_gradient_of_a_closed_gate_is_that_of_finite_differences():
    x, keys, values = (tensor.detach() for tensor in operands())
    gate = half_closed()
    upstream = torch.randn(2, 7, 32, dtype=torch.float64)

    def loss(gate):
        return (upstream * pattention(x, keys, values, "softmax", TAU, gate=gate)).sum()

    (grad,) = torch.autograd.grad(loss(gate), gate)

    def slope(moved):
        return (loss(gate + moved) - loss(gate - moved)).detach() / (2 * moved.sum())

    for index, direction in enumerate(1e-5 * torch.eye(len(gate), dtype=torch.float64)):
        # Its size enters the norm as |g|, so that the error falls no faster than the step.
        extrapolated = 2 * slope(direction / 2) - slope(direction)
        torch.testing.assert_close(grad[index], extrapolated, rtol=1e-6, atol=1e-5)


def test_gradcheck_between_open_and_closed():
    x, keys, values = (t[..., :6].detach().requires_grad_() for t in operands())
    gate = torch.rand(OPEN + CLOSED, dtype=torch.float64) - 0.5
    gate = (gate + 0.1 * gate.sign()).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *tensors: pattention(*tensors[:3], "softmax", TAU, gate=tensors[3]),
        (x[:1, :2], keys, values, gate),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", [100.0, 1e4, 1e30])
def test_a_closed_pair_of_huge_score_stays_finite(score, dtype):
    scores = torch.tensor([[0.5, -1.0, score]], dtype=dtype, requires_grad=True)
    gate = torch.tensor([1.0, 1.0, 0.0], requires_grad=True)
    weights = theta_weights(scores, "softmax", torch.tensor(3.0), 1e-6, gate)
    open_alone = 3 * torch.softmax(scores[:, :2].detach().float(), dim=-1)
    torch.testing.assert_close(weights[:, :2].float(), open_alone, rtol=1e-2, atol=0)
    assert weights[0, 2] == 0
    weights.sum().backward()
    assert scores.grad.isfinite().all()
    assert gate.grad.isfinite().all()


def test_layer_computes_with_its_gate():
    layer = Pattention(24, 32, OPEN, "softmax", gate="learned")
    x = torch.randn(5, 24)
    with torch.no_grad():
        layer.gate[3:] = 0
    keys, values = layer.key_param_tokens[:3], layer.value_param_tokens[:3]
    few = pattention(x, keys, values, "softmax", layer.tau, layer.eps)
    torch.testing.assert_close(layer(x), few)
    torch.testing.assert_close(layer.weights(x) @ layer.value_param_tokens, few)


@pytest.mark.parametrize("theta", [name for name in THETAS if not THETAS[name].gated])
def test_other_variants_have_none_because_zero_keys_close_pairs(theta):
    zero = theta_weights(torch.tensor([[1.0, 0.0]]), theta, torch.tensor(1.0), 1e-6)[0, 1]
    assert zero == 0
    with pytest.raises(ValueError, match=r"no gate.* zero key"):
        theta_weights(torch.randn(2, 3), theta, torch.tensor(1.0), 1e-6, torch.ones(3))
    with pytest.raises(InputError, match=rf"{theta}.*one of none, but got 'learned'"):
        Pattention(8, 8, 8, theta, gate="learned")
