"""A layer with a size computes with its first pairs what an ordinary layer of them computes."""

import pytest
import torch

from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS, default_tau

SIZES = (0.25, 0.5, 0.625)
NUMBERS = (12, 24, 30, 48)


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
    layer, x = Pattention(16, 20, 48, learn_tau=True), torch.randn(5, 16)
    layer.set_nested(SIZES)
    assert {name for name, _ in layer.named_parameters()} >= {"tau"}
    for place, size in enumerate((*SIZES, 1.0)):
        layer.size, layer.tau.grad = size, None
        layer(x).square().sum().backward()
        assert (layer.tau.grad != 0).tolist() == [each == place for each in range(4)]
