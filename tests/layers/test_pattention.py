import copy
import io

import pytest
import torch
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import model_pattention_args
from tokenformer_vit.layers.pattention import TOKENS, join_state_dict
from tokenformer_vit.ops import THETAS, default_tau, pattention


def reload(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("theta", THETAS)
def test_computes_the_op_with_its_own_parameters(theta):
    tau = 5.5 if THETAS[theta].norm_order else 1.0
    layer = Pattention(24, 40, 72, theta=theta, tau=tau, eps=1e-4)
    x = torch.randn(2, 3, 5, 24)
    expected = pattention(
        x, layer.key_param_tokens, layer.value_param_tokens, theta, torch.tensor(tau), 1e-4
    )
    assert layer(x).shape == (2, 3, 5, 40)
    assert torch.equal(layer(x), expected)


@pytest.fixture(params=[False, True], ids=["stored", "learned"])
def learn_tau(request):
    return request.param


nested_or_not = pytest.mark.parametrize("nested", [(), (0.25, 0.5)])


def build(nested, **kwargs):
    layer = Pattention(8, 8, 768, **kwargs)
    layer.set_nested(nested)
    layer.reset_parameters()
    return layer


@nested_or_not
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tau_survives_casts_and_checkpoints_bit_by_bit(dtype, learn_tau, nested):
    layer = build(nested, learn_tau=learn_tau)
    tau = layer.tau.detach().clone()
    layer.size = 0.5
    assert not torch.equal(tau.to(torch.bfloat16).float(), tau)

    layer.to(dtype)
    assert layer.key_param_tokens.dtype == dtype
    assert layer.tau.dtype == torch.float32
    assert torch.equal(layer.tau, tau)
    assert layer(torch.randn(3, 8, dtype=dtype)).dtype == dtype

    for learned_there in (False, True):  # a checkpoint of one kind loads into the other
        other = build(nested, tau=1.0, learn_tau=learned_there).to(dtype)
        other.load_state_dict(reload(layer.state_dict()))
        assert torch.equal(other.tau, tau)
        assert torch.equal(copy.deepcopy(other).float().tau, tau)
        assert (other.size, copy.deepcopy(layer).size) == (1, 0.5)  # a size is not saved
    with pytest.raises(RuntimeError, match="size mismatch for tau"):
        build([0.5]).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("assign", [False, True])
@nested_or_not
def test_tau_survives_a_state_dict_that_another_tool_has_cast(nested, assign):
    layer, cast = build(nested), build(nested)
    halved = {name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}
    cast.load_state_dict(halved, assign=assign)
    assert torch.equal(cast.tau, layer.tau)
    assert halved["tau"].dtype == torch.bfloat16
    other = torch.full_like(layer.tau, 5.3)  # one that no default explains
    cast.load_state_dict({**halved, "tau": other.bfloat16()}, assign=assign)
    assert cast.tau.dtype == torch.float32
    torch.testing.assert_close(cast.tau, other, rtol=4e-3, atol=0)


def test_a_learned_tau_stays_one_parameter_and_keeps_its_gradient():
    layer = Pattention(8, 8, 768, learn_tau=True)
    tau = layer.tau
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 8)).square().sum().backward()
    gradient = tau.grad.clone()
    assert gradient != 0
    for cast in (layer.half, layer.bfloat16, layer.float):
        cast()
        assert layer.tau is tau
        assert isinstance(layer.tau, nn.Parameter)
        assert layer.tau.dtype == layer.tau.grad.dtype == torch.float32
        assert torch.equal(layer.tau.grad, gradient)
    optimizer.step()
    # PyTorch may round once or twice.
    torch.testing.assert_close(layer.tau.detach(), 768**0.5 - 0.1 * gradient, rtol=3e-7, atol=0)


@nested_or_not
def test_meta_construction_then_reset(learn_tau, nested):
    how = {"tau": 3.5, "learn_tau": learn_tau}
    layer = build(nested, **how, device="meta")
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    layer.to(torch.bfloat16).to_empty(device="cpu")
    layer.reset_parameters()
    assert torch.equal(layer.tau, build(nested, **how).tau)
    assert layer.tau.dtype == torch.float32
    assert layer.key_param_tokens.dtype == torch.bfloat16
    assert layer(torch.randn(64, 8, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": -1.0}, "eps must be at least 0 .* got -1.0"),
        ({"tau": 0.0}, "tau positive, .* and 0.0"),
        ({"theta": "gelu", "tau": 2.0}, "'gelu' has no norm: leave out tau and learn_tau"),
        ({"theta": "gelu_tanh", "learn_tau": True}, "'gelu_tanh' has no norm: leave out tau"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pattention(8, 8, 8, **arguments)


def test_released_initialization_is_that_of_the_released_code():
    args = model_pattention_args({"eps": 0.1, "init": "released"}, 64, 6)
    assert args == {"eps": 0.1, "key_init_std": 0.02, "value_init_std": 2 / (6 * 8)}
    stds = [part.std().item() for part in Pattention(64, 64, 512, **args).parameters()]
    assert stds == pytest.approx(
        [0.02, 2 / 48], rel=0.03
    )  # seven standard errors of 32,768 numbers
    with pytest.raises(InputError, match=r"init .* scaled, released.*'wang'"):
        model_pattention_args({"init": "wang"}, 64, 6)


def split(num_old=13, **kwargs):
    """Build a layer of 20 pairs that holds the last ones apart."""
    layer = Pattention(8, 12, num_old, **kwargs)
    layer.new_key_param_tokens = nn.Parameter(torch.randn(20 - num_old, 8))
    layer.new_value_param_tokens = nn.Parameter(torch.randn(20 - num_old, 12))
    return layer


def test_state_dicts_of_all_forms_load_into_all():
    plain, layer, otherwise, x = Pattention(8, 12, 20), split(), split(5), torch.randn(3, 8)
    names = {*TOKENS, "tau", *(f"new_{name}" for name in TOKENS)}
    assert set(layer.state_dict()) == names
    assert set(join_state_dict(layer.state_dict())) == set(plain.state_dict())
    for source in (plain, layer, otherwise):
        source.reset_parameters()
        source.tau.fill_(source.tau.item() + 1)
        saved = source.state_dict()
        for other in (plain, layer, otherwise):
            other.load_state_dict(saved)
            assert torch.equal(other(x), source(x))
        assert set(saved) == set(source.state_dict())  # it is the caller's
    names = [name for name, _ in split(learn_tau=True).named_parameters()]
    assert names == [*TOKENS, *(f"new_{name}" for name in TOKENS), "tau"]


@pytest.mark.parametrize("gain", [1.0, 0.2])
@pytest.mark.parametrize("theta", THETAS)
def test_outputs_start_at_init_gain(theta, gain):
    layer = Pattention(256, 128, 576, theta=theta, init_gain=gain)
    with torch.no_grad():
        out = layer(torch.randn(512, 256))
    assert out.std() == pytest.approx(gain, rel=0.1)
    tau = torch.tensor(default_tau(theta, 4096))
    weights = THETAS[theta].weights(torch.randn(200, 4096), tau, 0.0)
    moment = weights.square().mean().item()  # to a percent, for softmax
    assert THETAS[theta].second_moment == pytest.approx(moment, rel=0.04)


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "limit"), [(200, 1.5), (400, 1.05)])  # two products, and one
def test_autocast_is_nearly_as_exact_as_a_linear_layer(tokens, limit):
    linear, x = nn.Linear(256, 256), torch.randn(tokens, 256)
    layer = Pattention.from_linear(linear)
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = layer(x), linear(x)
    exact = linear.double()(x.double())
    assert found.dtype == theirs.dtype == torch.bfloat16
    assert (found - exact).norm() <= limit * (theirs - exact).norm()
