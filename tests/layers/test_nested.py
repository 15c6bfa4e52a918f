"""A layer with a size computes with its first pairs what an ordinary layer of them computes."""

import pytest
import torch

from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS, default_tau

SIZES = (0.25, 0.5, 0.625)
NUMBERS = (12, 24, 30, 48)


def build(theta="gelu_l2", **kwargs):
    """Build a layer whose τ of each size is its own."""
    layer = Pattention(16, 20, 48, theta=theta, **kwargs)
    layer.set_nested(SIZES)
    layer.tau.detach().mul_(0.5 + torch.rand(4))
    return layer


@pytest.mark.parametrize("theta", THETAS)
def test_equals_an_ordinary_layer_bit_by_bit(theta):
    layer = build(theta)
    x = torch.randn(3, 7, 16, requires_grad=True)
    for share, size, tau in zip((*SIZES, 1.0), NUMBERS, layer.tau, strict=True):
        layer.size = share
        small = Pattention(16, 20, size, theta=theta)
        rows = {name: t[:size] if t.dim() > 1 else tau for name, t in layer.state_dict().items()}
        small.load_state_dict(rows)
        assert layer.num_used == small.num_param_tokens
        assert torch.equal(layer(x), small(x))
        assert torch.equal(layer.weights(x), small.weights(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), small(x))
        keys, grad = torch.autograd.grad(layer(x).square().sum(), (layer.key_param_tokens, x))
        assert not keys[size:].any()
        expected = torch.autograd.grad(small(x).square().sum(), (small.key_param_tokens, x))
        assert torch.equal(keys[:size], expected[0])
        assert torch.equal(grad, expected[1])


@pytest.mark.parametrize("theta", THETAS)
def test_the_initial_tau_of_a_size_is_that_of_an_ordinary_layer(theta):
    layer, plain = (Pattention(8, 8, 48, theta=theta) for _ in range(2))
    layer.set_nested(SIZES)
    for size in (1, 5, 12, 17, 24, 29, 30, 41, 47, 48):
        for each in (layer, plain):
            each.size = size / 48
            tau = each.used_tokens()[2].item()
            assert tau == pytest.approx(default_tau(theta, size), rel=1e-5)
            assert each.tau_at(size / 48).item() == pytest.approx(tau)
    assert layer.tau.tolist() == pytest.approx([default_tau(theta, n) for n in NUMBERS])
    tau = 2.0 if THETAS[theta].norm_order else 1.0
    other = Pattention(8, 8, 48, theta=theta, tau=tau)
    other.set_nested([0.25])
    start = tau * default_tau(theta, 12) / default_tau(theta, 48)
    assert other.tau.tolist() == pytest.approx([start, tau])


def test_each_size_gives_the_learned_taus_their_gradient():
    """DDP asks that every parameter has a gradient in every step."""
    layer, x = build(learn_tau=True), torch.randn(5, 16)
    assert {name for name, _ in layer.named_parameters()} >= {"tau"}
    for place, size in enumerate((*SIZES, 1.0)):
        layer.size, layer.tau.grad = size, None
        layer(x).square().sum().backward()
        assert (layer.tau.grad != 0).tolist() == [each == place for each in range(4)]
