import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.ops import THETAS, default_tau, layer_norm, pattention

from .test_theta import released

WIDTH, OUT = 48, 40
NAMES = ("output", "x", "keys", "values", "tau")


@pytest.fixture
def poison():
    """Fill fresh memory with NaN, to show memory that is read before it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def operands(tokens, pairs, dtype=torch.float32, batch=1):
    x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64)
    keys = torch.randn(pairs, WIDTH, dtype=torch.float64) / math.sqrt(WIDTH)
    values = torch.randn(pairs, OUT, dtype=torch.float64) / math.sqrt(pairs)
    return [tensor.to(dtype).requires_grad_() for tensor in (x, keys, values)]


def run(op, inputs, upstream):
    out = op(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


def plain(x, keys, values, theta, tau, eps=1e-6):
    return THETAS[theta].weights(x @ keys.T, tau, eps) @ values


def exact(inputs, theta, tau, upstream, eps=1e-6):
    """Output and gradients of the plain formulas in float64, for exactly these inputs."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return run(lambda *i: plain(*i, theta, tau.double(), eps), inputs, upstream.double())


def stock(x, keys, values, theta, tau):
    return released(x @ keys.T, theta, tau) @ values


@pytest.mark.parametrize(("tokens", "pairs"), [(1, 64), (1, 100), (197, 72), (197, 576)])
@pytest.mark.parametrize("theta", THETAS)
def test_output_and_gradients_are_the_released_ones_for_any_tau(theta, tokens, pairs):
    inputs = operands(tokens, pairs, torch.float64, batch=2)
    upstream = torch.randn(2, tokens, OUT, dtype=torch.float64)
    for tau in torch.tensor([default_tau(theta, pairs), 3.7]):  # float32 costs no digit
        expected = run(lambda *i, t=tau: stock(*i, theta, t.double()), inputs, upstream)
        actual = run(lambda *i, t=tau: pattention(*i, theta, t, 0.0), inputs, upstream)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("pairs", [64, 72, 100, 576, 2304])
@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (1, 197), (2, 3, 5)])
def test_agrees_with_float64_for_any_tau(shape, pairs):
    inputs = [torch.randn(*shape, WIDTH), *operands(1, pairs)[1:]]
    inputs[0].view(-1, WIDTH)[::7] = 0  # rows of zeros among the others, and a single one
    inputs[0].requires_grad_()
    upstream = torch.randn(*shape, OUT)
    for factor in (1.0, 0.37):
        tau = torch.tensor(factor * default_tau("gelu_l2", pairs), requires_grad=True)
        wide = [tensor.detach().double().requires_grad_() for tensor in (*inputs, tau)]
        expected = run(lambda *i: plain(*i[:3], "gelu_l2", i[3]), wide, upstream)
        actual = run(lambda *i: pattention(*i[:3], "gelu_l2", i[3]), (*inputs, tau), upstream)
        for name, a, b in zip(NAMES, actual, expected, strict=True):
            error, least = (a.double() - b).norm(), 2e-5 if name == "tau" else 1e-30  # a sum of all
            assert a.dtype == torch.float32
            assert error <= 3e-6 * b.norm() + least, f"{name}: {error / b.norm():.1e}, tau {tau}"


def leaves():
    """Inputs of three rows and five pairs, and a τ, in float64."""
    shapes = ((2, 4), (5, 4), (5, 3))
    drawn = [*(torch.randn(shape).double() for shape in shapes), torch.tensor(1.7).double()]
    return [tensor.requires_grad_() for tensor in drawn]


@pytest.mark.parametrize("more", [False, True])  # also of τ, or of the biases
@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize(("theta", "pairs"), [*((theta, 5) for theta in THETAS), ("linear", 1)])
def test_first_and_second_derivatives(theta, pairs, eps, more):
    if THETAS[theta].norm_order:
        tokens, shapes = (2,), {"tau": ()}
    else:  # six tokens, for which Vᵀ K is multiplied out if there are five linear pairs
        tokens, shapes = (2, 3), {"bias": (3,), "score_bias": (pairs,)}
    names = [name for name in shapes if more and (name != "score_bias" or theta != "linear")]
    sizes = (*tokens, 4), (pairs, 4), (pairs, 3), *(shapes[name] for name in names)
    inputs = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]

    def op(x, keys, values, *others):
        given = {"tau": torch.tensor(1.7).double(), **dict(zip(names, others, strict=True))}
        return pattention(x, keys, values, theta, eps=eps, **given)

    assert gradcheck(op, inputs, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(op, inputs, check_batched_grad=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_third_derivatives(eps):
    def slopes(*inputs):
        loss = pattention(*inputs[:3], "gelu_l2", inputs[3], eps).pow(3).sum()
        return torch.autograd.grad(loss, inputs, create_graph=True)

    assert gradgradcheck(slopes, leaves())


@pytest.mark.parametrize("theta", THETAS)
def test_transforms_of_torch_func(theta):
    x, keys, values, tau = (tensor.detach() for tensor in leaves())

    def loss(keys, tau, x=x):
        return pattention(layer_norm(x), keys, values, theta, tau).pow(3).sum()

    scales = torch.stack([tau, 2 * tau])
    many = vmap(lambda tau: loss(keys, tau))(scales)
    torch.testing.assert_close(many, torch.stack([loss(keys, scale) for scale in scales]))
    samples = vmap(grad(loss, (0, 1)), (None, None, 0))(keys, tau, x)
    for sample in range(2):
        single = grad(loss, (0, 1))(keys, tau, x[sample])
        torch.testing.assert_close(tuple(each[sample] for each in samples), single)
    expected = torch.autograd.functional.hessian(loss, (keys, tau))
    for inner, outer in ((jacrev, jacfwd), (jacrev, jacrev), (jacfwd, jacfwd)):
        ours = outer(inner(loss, (0, 1)), (0, 1))(keys, tau)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_low_precision_error_is_no_larger_than_that_of_plain_pytorch(theta, dtype):
    tau, ratios = torch.tensor(default_tau(theta, 576)), []
    for _ in range(3):  # a few tokens can have most of the error of softmax, by chance
        inputs, upstream = operands(394, 576, dtype), torch.randn(1, 394, OUT).to(dtype)
        expected = exact(inputs, theta, tau, upstream)
        of_stock = run(lambda *i: stock(*i, theta, tau.item()), inputs, upstream)
        actual = run(lambda *i: pattention(*i, theta, tau), inputs, upstream)
        assert {each.dtype for each in actual} == {dtype}
        norms = [
            torch.stack([(each.double() - c).norm() for each, c in zip(own, expected, strict=True)])
            for own in (actual, of_stock)
        ]
        ratios.append(norms[0] / norms[1])
        if (theta, dtype) == ("gelu_l2", torch.bfloat16):
            assert norms[0][0] < 3.3e-3 * expected[0].norm()
            assert ratios[-1][0] < 0.8
    medians = torch.stack(ratios).median(dim=0).values
    assert (medians <= 1.05).all(), dict(zip(NAMES[:4], medians, strict=True))


def test_autocast_keeps_scores_weights_and_a_number_a_row():
    pairs, rows = 576, 2 * 197
    inputs, tau = operands(197, pairs, batch=2), torch.tensor(24.0)
    kept = {}
    hooks = lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    with torch.autograd.graph.saved_tensors_hooks(*hooks), torch.autocast("cpu", torch.bfloat16):
        out = pattention(*inputs, "gelu_l2", tau)
    assert out.dtype == torch.bfloat16
    size = sum(t.untyped_storage().nbytes() for t in kept.values())
    of_parameters = 2 * pairs * (WIDTH + OUT) + 4  # their casts, and tau
    assert size - of_parameters == rows * (2 * WIDTH + 4 * pairs + 4)


@pytest.mark.parametrize("theta", ["gelu_l2", "gelu"])
def test_one_autocast_casts_parameters_once(theta):
    x, *tokens = operands(5, 72)
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile(record_shapes=True) as calls:
        for _ in range(3):
            pattention(x, *tokens, theta, torch.tensor(8.5))
    cast = [each.input_shapes[0] for each in calls.events() or () if each.name == "aten::_to_copy"]
    assert [cast.count([*each.shape]) for each in tokens] == [1, 1]


def test_products_are_ordinary_and_none_is_for_what_is_frozen():
    # forward both; backward: through the values, to x, to the keys, to the values
    products = {(): (3, 3), ("keys",): (2, 3), ("values",): (3, 2), ("x", "keys"): (1, 2)}
    for frozen, (with_keys, with_values) in products.items():
        inputs = dict(zip(NAMES[1:4], operands(197, 72), strict=True))
        for name in frozen:
            inputs[name].requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            pattention(*inputs.values(), "gelu_l2", torch.tensor(8.5)).sum().backward()
        expected = 2 * 197 * 72 * (with_keys * WIDTH + with_values * OUT)
        assert counter.get_total_flops() == expected, frozen
        for name, tensor in inputs.items():
            assert (tensor.grad is None) == (name in frozen)


ALL = [pytest.param(theta, torch.bfloat16, marks=pytest.mark.slow) for theta in THETAS]


@pytest.mark.parametrize(("theta", "dtype"), [("gelu_l2", torch.float32), *ALL])
def test_compiled_in_one_graph(theta, dtype):
    inputs, upstream = operands(37, 72, dtype), torch.randn(1, 37, OUT)
    tau = torch.tensor(default_tau(theta, 72))

    def op(*tensors):
        return pattention(*tensors, theta, tau)

    eager = run(op, inputs, upstream)
    compiled = run(torch.compile(op, fullgraph=True), inputs, upstream)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    for a, b in zip(compiled, eager, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()
