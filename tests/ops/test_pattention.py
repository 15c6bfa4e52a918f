import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.ops import BACKENDS, THETAS, check_backend, default_tau, pattention

WIDTH, OUT = 48, 40
NAMES = ("output", "x", "keys", "values")
FAST = ("gelu_l2", "gelu_tanh_l2")


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


def exact(inputs, theta, tau, upstream, eps=1e-6):
    """Output and gradients of the reference in float64, for exactly the numbers of ``inputs``."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return run(
        lambda *i: pattention(*i, theta, tau.double(), eps, "reference"), inputs, upstream.double()
    )


def released(x, keys, values, theta):
    """The authors' code, in the precision of its operands; the tanh, and GELU alone, are ours."""
    scores, pairs = x @ keys.T, keys.shape[0]
    if theta == "softmax":
        weights = F.softmax(scores, dim=-1) * pairs
    elif theta == "gelu_l1":
        weights = F.gelu(scores)
        weights = weights / weights.norm(p=1, dim=-1, keepdim=True) * pairs
    elif theta in FAST:
        z = scores / scores.norm(p=2, dim=-1, keepdim=True) * math.sqrt(pairs)
        weights = F.gelu(z, approximate="none" if theta == "gelu_l2" else "tanh")
    elif theta == "gelu_l2_post":
        weights = F.gelu(scores)
        weights = weights / weights.norm(p=2, dim=-1, keepdim=True) * math.sqrt(pairs)
    else:
        weights = F.gelu(scores, approximate="none" if theta == "gelu" else "tanh")
    return weights @ values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "pairs"), [(1, 64), (1, 100), (197, 72), (197, 576)])
@pytest.mark.parametrize("theta", THETAS)
def test_output_and_gradients_are_the_released_ones(theta, tokens, pairs, backend):
    inputs = operands(tokens, pairs, torch.float64, batch=2)
    upstream = torch.randn(2, tokens, OUT, dtype=torch.float64)
    tau = torch.tensor(default_tau(theta, pairs), dtype=torch.float64)
    expected = run(lambda *i: released(*i, theta), inputs, upstream)
    actual = run(lambda *i: pattention(*i, theta, tau, 0.0, backend), inputs, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", [64, 72, 100, 576, 2304])
@pytest.mark.parametrize("tokens", [1, 197])
@pytest.mark.parametrize("theta", FAST)
def test_agrees_with_float64_for_any_tau(theta, tokens, pairs, backend):
    inputs = operands(tokens, pairs)
    with torch.no_grad():
        inputs[0][:, ::7] = 0  # rows of zeros among the others, and the only one of a single token
    upstream = torch.randn(1, tokens, OUT)
    for factor in (1.0, 0.37):
        tau = torch.tensor(factor * default_tau(theta, pairs))
        expected = exact(inputs, theta, tau, upstream)
        actual = run(lambda *i, t=tau: pattention(*i, theta, t, 1e-6, backend), inputs, upstream)
        for name, a, b in zip(NAMES, actual, expected, strict=True):
            error = (a.double() - b).norm()
            assert error <= 3e-6 * b.norm() + 1e-30, f"{name}: {error / b.norm():.1e}, tau {tau}"


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
@pytest.mark.parametrize("theta", THETAS)
def test_gradcheck(theta, eps):
    x, keys, values = (torch.randn(shape).double() for shape in ((2, 4), (5, 4), (5, 3)))
    inputs = [t.requires_grad_() for t in (x, keys, values, torch.tensor(1.7).double())]
    assert torch.autograd.gradcheck(lambda *i: pattention(*i[:3], theta, i[3], eps), inputs)
    assert torch.autograd.gradgradcheck(
        lambda *i: pattention(*i[:3], theta, i[3], eps, "reference"), inputs
    )


@pytest.mark.parametrize("theta", FAST)
def test_second_derivatives_are_refused(theta):
    x, keys, values = operands(3, 72)
    out = pattention(x, keys, values, theta, torch.tensor(5.0))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_low_precision_error_is_no_larger_than_that_of_plain_pytorch(theta, dtype):
    tau, ratios = torch.tensor(default_tau(theta, 576)), []
    for _ in range(3):  # a few tokens can have most of the error of softmax, by chance
        inputs, upstream = operands(394, 576, dtype), torch.randn(1, 394, OUT).to(dtype)
        expected = exact(inputs, theta, tau, upstream)
        stock = run(lambda *i: released(*i, theta), inputs, upstream)
        actual = run(lambda *i: pattention(*i, theta, tau), inputs, upstream)
        assert {each.dtype for each in actual} == {dtype}
        errors = [
            [(each.double() - c).norm() for each, c in zip(own, expected, strict=True)]
            for own in (actual, stock)
        ]
        ratios.append(torch.tensor(errors[0]) / torch.tensor(errors[1]))
    medians = torch.stack(ratios).median(dim=0).values
    assert (medians <= 1.05).all(), dict(zip(NAMES, medians, strict=True))


def test_bfloat16_is_more_accurate_than_the_released_formula():
    inputs = operands(1576, 576, torch.bfloat16)
    expected = exact(inputs, "gelu_l2", torch.tensor(24.0), torch.randn(1, 1576, OUT), 0.0)[0]

    def error(out):
        return (out.double() - expected).norm() / expected.norm()

    ours = error(pattention(*inputs, "gelu_l2", torch.tensor(24.0)))
    assert ours < 3.3e-3
    assert ours < 0.8 * error(released(*inputs, "gelu_l2"))


@pytest.mark.parametrize("theta", FAST)
def test_autocast_keeps_scores_weights_and_a_number_a_row(theta):
    pairs, rows = 576, 2 * 197
    inputs, tau = operands(197, pairs, batch=2), torch.tensor(24.0)
    kept = {}
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        out = pattention(*inputs, theta, tau)
    assert out.dtype == torch.bfloat16
    size = sum(t.untyped_storage().nbytes() for t in kept.values())
    of_parameters = 2 * pairs * (WIDTH + OUT) + 4  # their casts, and tau
    assert size - of_parameters == rows * (2 * WIDTH + 4 * pairs + 4)


def test_products_are_ordinary_and_none_is_for_what_is_frozen():
    product = 2 * 197 * 72 * WIDTH, 2 * 197 * 72 * OUT  # FLOPs of one with keys, with values
    # forward both; backward: through the values, to x, to the keys, to the values
    for frozen, expected in (
        ((), 3 * product[0] + 3 * product[1]),
        (("keys",), 2 * product[0] + 3 * product[1]),
        (("values",), 3 * product[0] + 2 * product[1]),
        (("x", "keys"), product[0] + 2 * product[1]),
    ):
        inputs = dict(zip(NAMES[1:], operands(197, 72), strict=True))
        for name in frozen:
            inputs[name].requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            pattention(*inputs.values(), "gelu_l2", torch.tensor(8.5)).sum().backward()
        assert counter.get_total_flops() == expected, frozen
        for name, tensor in inputs.items():
            assert (tensor.grad is None) == (name in frozen)


@pytest.mark.parametrize("theta", THETAS)
def test_gradients_of_single_samples(theta):
    x, keys, values = (tensor.detach() for tensor in operands(5, 72, torch.float64, batch=3))
    tau = torch.tensor(default_tau(theta, 72), dtype=torch.float64)

    def loss(keys, values, tau, x):
        return pattention(x, keys, values, theta, tau).square().sum()

    grad = torch.func.grad(loss, (0, 1, 2))
    grads = torch.func.vmap(grad, (None, None, None, 0))(keys, values, tau, x)
    for sample in range(3):
        for a, b in zip(grads, grad(keys, values, tau, x[sample]), strict=True):
            torch.testing.assert_close(a[sample], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [theta for theta in THETAS if THETAS[theta].norm_order])
def test_a_learned_tau_gets_its_gradient(theta, dtype):
    inputs = operands(197, 72, dtype)
    with torch.no_grad():
        inputs[0][:, ::7] = 0
        inputs[0][:, 1::7] *= 1e-3  # where eps counts
    tau = torch.tensor(0.37 * default_tau(theta, 72), requires_grad=True)
    upstream = torch.randn(1, 197, OUT)

    def grad_tau(inputs, tau, backend):
        out = pattention(*inputs, theta, tau, 1e-6, backend)
        return torch.autograd.grad(out, tau, upstream.to(out.dtype))[0]

    expected = grad_tau([tensor.double() for tensor in inputs], tau.double(), "reference")
    ours = grad_tau(inputs, tau, "auto")
    assert (ours.dtype, ours.shape) == (torch.float32, ())
    atol = 2e-5 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("theta", THETAS)
def test_a_float32_tau_costs_no_digit_of_float64(theta):
    inputs, upstream = operands(7, 20, torch.float64), torch.randn(1, 7, OUT)
    tau = torch.tensor(default_tau(theta, 20))  # √20 is not exact
    expected = exact(inputs, theta, tau, upstream)
    actual = run(lambda *i: pattention(*i, theta, tau), inputs, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("theta", "dtype"),
    [
        ("gelu_l2", torch.float32),
        *(pytest.param(theta, torch.bfloat16, marks=pytest.mark.slow) for theta in THETAS),
    ],
)
def test_compiled_in_one_graph(theta, dtype):
    inputs, tau = operands(37, 72, dtype), torch.tensor(default_tau(theta, 72))
    upstream = torch.randn(1, 37, OUT)

    def op(*tensors):
        return pattention(*tensors, theta, tau)

    plain = run(op, inputs, upstream)
    compiled = run(torch.compile(op, fullgraph=True), inputs, upstream)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    for a, b in zip(compiled, plain, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("shape", [(WIDTH,), (0, WIDTH), (2, 3, 5, WIDTH)])
def test_takes_what_linear_takes(shape):
    _, keys, values = operands(1, 72)
    inputs = (torch.randn(shape, requires_grad=True), keys, values)
    upstream, tau = torch.randn(*shape[:-1], OUT), torch.tensor(5.0)
    ours, plain = (
        run(lambda *i, b=b: pattention(*i, "gelu_l2", tau, 1e-6, b), inputs, upstream)
        for b in BACKENDS
    )
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match=r"backend .*auto, reference.*'cuda'"):
        check_backend("cuda")
