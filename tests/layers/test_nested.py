"""A layer with a size computes with its first pairs what an ordinary layer of them computes."""

import copy

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS, default_tau

SIZES = (12, 24, 30)


def build(theta="gelu_l2", **kwargs):
    """Build a layer whose τ of each size is its own."""
    layer = Pattention(16, 20, 48, theta=theta, nested=SIZES, **kwargs)
    with torch.no_grad():
        layer.nested_tau.mul_(0.5 + torch.rand(len(SIZES)))
        layer.tau.mul_(1.5)
        if layer.gate is not None:
            layer.gate.normal_()
    return layer


def alone(layer, size, tau):
    """Build an ordinary layer of the first pairs."""
    gate = "none" if layer.gate is None else "fixed"
    small = Pattention(16, 20, size, theta=layer.theta, gate=gate, backend=layer.backend)
    state = {name: t for name, t in layer.state_dict().items() if "nested" not in name}
    small.load_state_dict({name: t[:size] if t.dim() else tau for name, t in state.items()})
    return small


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(
    ("theta", "gate"), [*((theta, "none") for theta in THETAS), ("softmax", "learned")]
)
def test_equals_an_ordinary_layer_bit_by_bit(theta, gate, backend):
    layer = build(theta, gate=gate, backend=backend)
    x = torch.randn(3, 7, 16, requires_grad=True)
    assert layer.nested_tau is not None
    for size, tau in zip((*SIZES, 48), (*layer.nested_tau, layer.tau), strict=True):
        layer.size = size
        small = alone(layer, size, tau)
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
    layer = Pattention(8, 8, 48, theta=theta, nested=SIZES)
    plain = Pattention(8, 8, 48, theta=theta)
    for size in (1, 5, 12, 17, 24, 29, 30, 41, 47, 48):
        for each in (layer, plain):
            each.size = size
            tau = each.used_tokens()[3].item()
            assert tau == pytest.approx(default_tau(theta, size), rel=1e-5)
    assert layer.nested_tau.tolist() == pytest.approx([default_tau(theta, n) for n in SIZES])
    tau = 2.0 if THETAS[theta].norm_order else 1.0
    other = Pattention(8, 8, 48, theta=theta, tau=tau, nested=(12,))
    start = tau * default_tau(theta, 12) / default_tau(theta, 48)
    assert other.nested_tau.item() == pytest.approx(start)


def test_a_size_that_was_not_trained_has_the_default_ratio():
    layer = build()
    layer.size = 17
    assert layer.used_tokens()[3].item() == pytest.approx(layer.tau.item() * (17 / 48) ** 0.5)


def test_a_learned_tau_of_a_size_gets_a_gradient():
    layer = build(learn_tau=True)
    assert {name for name, _ in layer.named_parameters()} >= {"tau", "nested_tau"}
    x = torch.randn(5, 16)
    layer.size = 12
    layer(x).square().sum().backward()
    assert (layer.nested_tau.grad != 0).tolist() == [True, False, False]
    layer.size = 27
    layer(x).square().sum().backward()
    assert layer.tau.grad != 0


@pytest.mark.parametrize("learned", [False, True])
def test_tau_of_a_size_survives_casts_and_checkpoints(learned):
    layer = build(learn_tau=learned)
    tau, x = layer.nested_tau.detach().clone(), torch.randn(5, 16)
    layer.size = 24
    expected = layer(x)
    again = Pattention(16, 20, 48, nested=SIZES)
    again.load_state_dict(layer.state_dict())
    assert again.size is None  # a size is not saved
    again.size = 24
    assert torch.equal(again(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    layer.bfloat16().float()
    assert torch.equal(layer.nested_tau, tau)


def test_an_empty_layer_is_filled_again():
    layer = Pattention(8, 8, 48, nested=SIZES, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.nested_tau.tolist() == pytest.approx([n**0.5 for n in SIZES])
    assert layer.nested_sizes.tolist() == [*SIZES]


@pytest.mark.parametrize("size", [0, 49, -1])
def test_sizes_out_of_range_are_refused(size):
    layer = build()
    with pytest.raises(InputError, match=f"from 1 to 48 .*{size!r}"):
        layer.size = size
    assert layer.size is None


def test_a_size_with_a_mask_is_refused():
    layer = build()
    layer.active = torch.arange(5)
    with pytest.raises(InputError, match=r"mask .*activate\(\)"):
        layer.size = 12


@pytest.mark.parametrize("nested", [(0,), (24, 12), (49,)])
def test_nested_sizes_out_of_order_are_refused(nested):
    with pytest.raises(InputError, match=r"nested .* 1 to 48 .* contain one another"):
        Pattention(8, 8, 48, nested=nested)


@pytest.mark.parametrize("nested", [(), (12, 24), (12, 24, 31)])
def test_a_checkpoint_of_other_sizes_is_refused(nested):
    other = Pattention(16, 20, 48, nested=nested)
    with pytest.raises(InputError, match=r"\[12, 24, 30\].*(none|\[12, 24.*\]).*`nested`"):
        other.load_state_dict(build().state_dict())


def test_of_equal_sizes_the_last_has_tau():
    layer, x = Pattention(16, 20, 8, nested=(2, 2, 4, 8)), torch.randn(5, 16)
    with torch.no_grad():
        layer.nested_tau.copy_(torch.tensor([100.0, 1, 2, 100]))
        layer.tau.fill_(4)
    for size, tau in ((1, 2**0.5), (2, 1.0), (4, 2.0), (8, 4.0)):
        layer.size = size
        assert layer.used_tokens()[3].item() == pytest.approx(tau)
        assert layer.tau_of(size).item() == pytest.approx(tau)
        assert layer(x).isfinite().all()
