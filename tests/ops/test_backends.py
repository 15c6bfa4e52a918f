import gc
import importlib.util
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit import ops
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS, default_tau, layer_norm, pattention, pattention_reference

WIDTH, OUT = 48, 40
TAU = torch.tensor(5.0)
BACKENDS = ("reference", "fused")
NAMES = ("output", "x", "keys", "values")


@pytest.fixture
def poison():
    """Fill fresh memory with NaN, to show memory that is read before it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
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
        lambda *i: pattention_reference(*i, theta, tau.double(), eps), inputs, upstream.double()
    )


def kinks(inputs, tau, upstream, eps=1e-6):
    """Bound what scores near zero add to the error of the gradients of ``gelu_l1``.

    |gelu(a)| has a kink at zero. A score that float32 rounds to its other side changes its own
    gradient, r (g - sign(a) (g·w) / τ) gelu'(0), by r |g·w| / τ. Such scores are few.
    """
    x, keys, values = (tensor.detach().double() for tensor in inputs)
    scores = x @ keys.t()
    rounding = 2 * torch.finfo(torch.float32).eps * (x.abs() @ keys.abs().t())
    near = (scores.abs() <= rounding) & (scores != 0)  # a row of zeros has no sign to change
    mean = F.gelu(scores).abs().sum(-1, keepdim=True) / tau.double() + eps
    dot = (upstream.double() @ values.t() * F.gelu(scores) / mean).sum(-1, keepdim=True)
    change = near * (dot.abs() / mean / tau.double())
    return {
        "x": (change @ keys.abs()).norm(),
        "keys": (change.flatten(0, -2).t() @ x.abs().flatten(0, -2)).norm(),
    }


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairs", [64, 72, 100, 576, 768, 2304])
@pytest.mark.parametrize("tokens", [1, 197, pytest.param(1576, marks=pytest.mark.slow)])
@pytest.mark.parametrize("theta", THETAS)
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
            limit = 3e-6 * b.norm() + 1e-30
            if error > limit and theta == "gelu_l1":
                limit += kinks(inputs, tau, upstream).get(name, 0)
            assert error <= limit, f"{name}: {error / b.norm():.1e}, tau {tau}"


@pytest.mark.parametrize("tau", [None, 1.7])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
@pytest.mark.parametrize("theta", THETAS)
def test_gradients_and_their_gradients(theta, eps, tau):
    x, keys, values = (torch.randn(shape).double() for shape in ((2, 4), (5, 4), (5, 3)))
    tau = torch.tensor(default_tau(theta, 5) if tau is None else tau, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, keys, values, tau)]

    def op(*tensors):
        return pattention(*tensors[:3], theta, tensors[3], eps, "fused")

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairs", [576, 2304])
@pytest.mark.parametrize("theta", THETAS)
def test_autocast_rounds_where_the_reference_does(theta, pairs, dtype):
    inputs, tau = operands(197, pairs), torch.tensor(default_tau(theta, pairs))
    upstream = torch.randn(1, 197, OUT)
    low = [tensor.detach().to(dtype) for tensor in inputs]
    expected = exact(low, theta, tau, upstream.to(dtype))
    errors = {}
    for backend in BACKENDS:
        with torch.autocast("cpu", dtype):
            out = pattention(*inputs, theta, tau, 1e-6, backend)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, inputs, upstream.to(dtype))
        assert all(grad.dtype == torch.float32 for grad in grads)
        errors[backend] = [
            (a.double() - b).norm() / b.norm() for a, b in zip((out, *grads), expected, strict=True)
        ]
    for name, ours, stock in zip(NAMES, errors["fused"], errors["reference"], strict=True):
        assert ours <= 1.2 * stock, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_a_gradient_that_all_pairs_share_is_as_accurate_as_the_reference(theta, dtype):
    # Under softmax it has no effect, so that what is left of it is rounding alone.
    inputs, tau = operands(197, 576), torch.tensor(default_tau(theta, 576))
    with torch.no_grad():
        inputs[1] *= 5
        inputs[2] += 10 * inputs[2].std()
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    upstream = torch.randn(1, 197, OUT).to(dtype)
    expected = exact(inputs, theta, tau, upstream)
    errors = [
        [
            (a.double() - b).norm()
            for a, b in zip(
                run(lambda *i, b=backend: pattention(*i, theta, tau, 1e-6, b), inputs, upstream),
                expected,
                strict=True,
            )
        ]
        for backend in ("fused", "reference")
    ]
    for name, ours, stock in zip(NAMES, *errors, strict=True):
        assert ours <= 2 * stock, name


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_may_run_under_autocast(theta, backend):
    inputs, tau = operands(197, 72), torch.tensor(default_tau(theta, 72))
    upstream = torch.randn(1, 197, OUT)
    out = pattention(*inputs, theta, tau, 1e-6, backend)
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(out, inputs, upstream)
    for a, b in zip(grads, exact(inputs, theta, tau, upstream)[1:], strict=True):
        assert a.dtype == torch.float32
        assert (a.double() - b).norm() <= 2e-2 * b.norm()


def test_bfloat16_is_more_accurate_than_the_released_formula():
    inputs, tau = operands(1576, 576, torch.bfloat16), torch.tensor(24.0)
    expected = exact(inputs, "gelu_l2", tau, torch.randn(1, 1576, OUT), eps=0.0)[0]
    x, keys, values = inputs
    scores = x @ keys.T
    released = F.gelu(scores / scores.norm(dim=-1, keepdim=True) * 24) @ values
    ours = pattention(*inputs, "gelu_l2", tau)

    def error(out):
        return (out.double() - expected).norm() / expected.norm()

    assert error(ours) < 3.3e-3
    assert error(ours) < 0.8 * error(released)


@pytest.mark.parametrize("theta", THETAS)
def test_keeps_input_scores_and_a_number_or_two_a_row(theta):
    pairs, rows = 576, 2 * 197
    inputs, tau = operands(197, pairs, batch=2), torch.tensor(default_tau(theta, pairs))
    kept = {}
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        pattention(*inputs, theta, tau)
    size = sum(t.untyped_storage().nbytes() for t in kept.values())
    numbers = 2 if theta == "softmax" else 1
    of_parameters = 2 * pairs * (WIDTH + OUT) + 4  # their casts, and tau
    assert size - of_parameters == rows * (2 * WIDTH + 2 * pairs + 4 * numbers)


@pytest.mark.parametrize("theta", THETAS)
def test_no_products_for_what_is_frozen(theta):
    product = 2 * 197 * 72 * WIDTH, 2 * 197 * 72 * OUT  # FLOPs of one with keys, with values
    # forward both; backward: through the values, to x, to the keys, to the values
    for frozen, expected in (
        ((), 3 * product[0] + 3 * product[1]),
        (("keys",), 2 * product[0] + 3 * product[1]),
        (("values",), 3 * product[0] + 2 * product[1]),
        (("keys", "values"), 2 * product[0] + 2 * product[1]),
        (("x",), 2 * product[0] + 3 * product[1]),
        (("x", "keys"), product[0] + 2 * product[1]),
    ):
        inputs = dict(zip(NAMES[1:], operands(197, 72), strict=True))
        for name in frozen:
            inputs[name].requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            out = pattention(*inputs.values(), theta, torch.tensor(default_tau(theta, 72)))
            out.sum().backward()
        assert counter.get_total_flops() == expected, frozen
        for name, tensor in inputs.items():
            assert (tensor.grad is None) == (name in frozen)


@pytest.mark.parametrize("op", [pattention, layer_norm])
def test_no_autograd_function_where_no_gradient_is_wanted(op, monkeypatch):
    x, *tokens = operands(3, 72)
    rest = (*tokens, "gelu_l2", TAU) if op is pattention else (WIDTH,)
    with torch.no_grad():
        expected = op(x, *rest, backend="reference")

    def refuse(*args):
        raise AssertionError("an autograd function costs more than the rest of a small layer")

    monkeypatch.setattr(torch.autograd.Function, "apply", refuse)
    with pytest.raises(AssertionError):
        op(x, *rest)
    with torch.no_grad():
        torch.testing.assert_close(op(x, *rest), expected)
    for tensor in (x, *tokens):
        tensor.requires_grad_(False)
    torch.testing.assert_close(op(x, *rest), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_nothing(reentrant):
    inputs, tau = operands(197, 72), torch.tensor(5.0)
    upstream = torch.randn(1, 197, OUT)

    def op(*tensors):
        return pattention(*tensors, "gelu_l2", tau)

    plain = run(op, inputs, upstream)
    out = checkpoint(op, *inputs, use_reentrant=reentrant)
    out.backward(upstream)
    assert torch.equal(out, plain[0])
    for tensor, grad in zip(inputs, plain[1:], strict=True):
        assert torch.equal(tensor.grad, grad)


def test_a_layer_used_twice_gets_both_gradients():
    layer, x = Pattention(WIDTH, WIDTH, 72), torch.randn(5, WIDTH)
    layer(layer(x)).sum().backward()
    twice = layer.key_param_tokens.grad
    layer.zero_grad()
    layer.backend = "reference"
    layer(layer(x)).sum().backward()
    torch.testing.assert_close(twice, layer.key_param_tokens.grad, rtol=1e-4, atol=1e-5)


def test_what_was_kept_is_let_go():
    inputs = operands(197, 72)
    out = pattention(*inputs, "gelu_l2", torch.tensor(5.0))
    node = weakref.ref(out.grad_fn)
    out.sum().backward()
    del out
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("theta", THETAS)
def test_gradients_of_single_samples(theta):
    x, keys, values = (tensor.detach() for tensor in operands(5, 72, torch.float64, batch=3))
    tau = torch.tensor(default_tau(theta, 72), dtype=torch.float64)

    def loss(keys, values, x):
        return pattention(x, keys, values, theta, tau).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(keys, values, x)
    for sample in range(3):
        single = torch.func.grad(loss, (0, 1))(keys, values, x[sample])
        for a, b in zip(grads, single, strict=True):
            torch.testing.assert_close(a[sample], b)


def test_what_the_user_holds_is_not_written():
    inputs = [tensor.requires_grad_() for tensor in operands(7, 11)]
    upstream = torch.randn(1, 7, OUT)
    before = [tensor.detach().clone() for tensor in (*inputs, upstream)]
    out = pattention(*inputs, "gelu_l2", TAU)
    first = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(out, inputs, upstream)
    for a, b in zip((*inputs, upstream), before, strict=True):
        assert torch.equal(a, b)
    for a, b, c in zip(first, copies, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_batch_of_gradients():
    inputs = [tensor.requires_grad_() for tensor in operands(7, 11, torch.float64)]
    upstreams = torch.randn(3, 1, 7, OUT, dtype=torch.float64)
    out = pattention(*inputs, "gelu_l2", TAU)
    batched = torch.autograd.grad(out, inputs, upstreams, is_grads_batched=True, retain_graph=True)
    for index, upstream in enumerate(upstreams):
        single = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
        for a, b in zip(batched, single, strict=True):
            torch.testing.assert_close(a[index], b)


def test_transforms_of_torch_func():
    x, keys, values = operands(7, 11, torch.float64)

    def op(x, keys, backend="fused"):
        return pattention(x, keys, values, "gelu_l2", TAU, backend=backend)

    tangent = torch.randn_like(x)
    actual = torch.func.jvp(lambda x: op(x, keys), (x,), (tangent,))
    expected = torch.func.jvp(lambda x: op(x, keys, "reference"), (x,), (tangent,))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.func.vmap(op, (0, None))(x, keys), op(x, keys))


def test_forward_mode_outside_torch_func_is_refused():
    x, keys, values = operands(7, 11)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.randn_like(x))
        with pytest.raises((NotImplementedError, RuntimeError)):
            pattention(dual, keys, values, "gelu_l2", TAU, backend="fused")


def test_takes_what_linear_takes():
    _, keys, values = operands(1, 72)
    for shape in ((WIDTH,), (0, WIDTH), (2, 3, 5, WIDTH)):
        x = torch.randn(shape, requires_grad=True)
        upstream = torch.randn(*shape[:-1], OUT)
        ours, plain = (
            run(
                lambda *i, b=b: pattention(*i, "gelu_l2", TAU, 1e-6, b), (x, keys, values), upstream
            )
            for b in ("fused", "reference")
        )
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for wrong in (torch.randn(3, WIDTH, dtype=torch.bfloat16), torch.ones(3, WIDTH).long()):
        for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            if wrong.is_floating_point() and not isinstance(context, nullcontext):
                continue  # autocast makes these fit
            with context, pytest.raises(RuntimeError, match="dtype"):
                pattention(wrong, keys, values, "gelu_l2", TAU, backend="fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", THETAS)
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

    exact = grad_tau([tensor.double() for tensor in inputs], tau.double(), "reference")
    stock, ours = (grad_tau(inputs, tau, backend) for backend in BACKENDS)
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    if dtype == torch.float32:
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-5)
    else:  # softmax keeps its rounded weights rather than the scores
        atol = 0.03 if theta == "softmax" else 1e-4
        torch.testing.assert_close(ours, stock, rtol=0, atol=atol)
        assert (ours - exact).abs() < 0.3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("theta", THETAS)
def test_a_float32_tau_costs_no_digit_of_float64(theta, backend):
    inputs, upstream = operands(7, 20, torch.float64), torch.randn(1, 7, OUT)
    tau = torch.tensor(default_tau(theta, 20), requires_grad=True)  # √20 is not exact
    expected = exact(inputs, theta, tau.detach(), upstream)
    actual = run(lambda *i: pattention(*i, theta, tau, 1e-6, backend), inputs, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    pattention(*inputs, theta, tau, 1e-6, backend).sum().backward()
    assert tau.grad.dtype == torch.float32


def test_a_learned_tau_is_fused_as_well_and_costs_no_product():
    x, keys, values = operands(197, 72)
    flops = {}
    for learned in (False, True):
        tau = torch.tensor(5.0, requires_grad=learned)
        with FlopCounterMode(display=False) as counter:
            out = pattention(x, keys, values, "gelu_l2", tau)
            assert type(out.grad_fn).__name__ == "_PattentionBackward"
            out.sum().backward()
        assert (tau.grad is not None) is learned
        flops[learned] = counter.get_total_flops()
    assert flops[True] == flops[False]


@pytest.mark.parametrize("theta", THETAS)
def test_a_learned_tau_alone_and_through_torch_func(theta):
    inputs = [tensor.detach() for tensor in operands(5, 72, torch.float64)]
    tau = torch.tensor(default_tau(theta, 72), dtype=torch.float64)
    expected, actual = (
        torch.func.grad(lambda t, b=b: pattention(*inputs, theta, t, backend=b).square().sum())(tau)
        for b in BACKENDS
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("theta", [theta for theta in THETAS if not THETAS[theta].has_gate])
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_keys_change_nothing_while_tau_is_kept(theta, backend):
    x, keys, values = operands(197, 768)
    tau = torch.tensor(default_tau(theta, 768))
    grown = torch.cat([keys, torch.zeros(1024, WIDTH)])
    more = torch.cat([values, torch.randn(1024, OUT)])
    before = pattention(x, keys, values, theta, tau, backend=backend)
    after = pattention(x, grown, more, theta, tau, backend=backend)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6 * before.detach().std().item())


@pytest.mark.parametrize(
    ("theta", "dtype"),
    [
        ("gelu_l2", torch.float32),
        # Whole models of every Θ are compiled in tests/models/test_export.py.
        *(pytest.param(theta, torch.bfloat16, marks=pytest.mark.slow) for theta in THETAS),
    ],
)
def test_compiled_code_computes_the_same(theta, dtype):
    inputs, tau = operands(37, 72, dtype), torch.tensor(default_tau(theta, 72))
    upstream = torch.randn(1, 37, OUT)

    def op(*tensors):
        return pattention(*tensors, theta, tau)

    out = torch.compile(op, fullgraph=True)(*inputs)
    grads = torch.autograd.grad(out, inputs, upstream.to(dtype))
    plain = run(op, inputs, upstream)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    for a, b in zip((out, *grads), plain, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_compiled_code_for_a_cpu_stores_the_factor_of_each_row():
    x, keys, values = (tensor.detach() for tensor in operands(5, 8))
    tau, graphs = torch.tensor(3.0), []

    class Layer(torch.nn.Module):
        def forward(self, x):
            return pattention(x, keys, values, "gelu_l2", tau)

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def stored(graph):
        return [node for node in graph.graph.nodes if "as_strided" in str(node.target)]

    layer = Layer()
    out = torch.compile(layer, fullgraph=True, backend=keep)(x)
    assert torch.equal(out, layer(x))
    assert len(stored(graphs[0])) == 1
    assert not stored(torch.export.export(layer, (x,)).graph_module)


def test_backend_is_chosen_by_argument_then_by_variable(monkeypatch):
    def is_fused(backend):
        out = pattention(*operands(1, 4), "gelu_l2", torch.tensor(2.0), backend=backend)
        return type(out.grad_fn).__name__ == "_PattentionBackward"

    assert is_fused("auto")
    assert not is_fused("reference")
    monkeypatch.setattr(ops, "_DEFAULT", "reference")
    assert not is_fused("auto")
    assert is_fused("fused")


@pytest.mark.parametrize("value", ["reference", "fast"])
def test_variable_is_read_at_import(monkeypatch, value):
    monkeypatch.setenv("PATTENTION_BACKEND", value)
    spec = importlib.util.find_spec("tokenformer_vit.ops")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    if value == "reference":
        assert fresh.check_backend("auto") == "auto"
        out = fresh.pattention(*operands(1, 4), "gelu_l2", TAU)
        assert type(out.grad_fn).__name__ != "_PattentionBackward"
    else:
        with pytest.raises(InputError, match=r"PATTENTION_BACKEND .*auto, reference.*'fast'"):
            fresh.check_backend("auto")


@pytest.mark.parametrize("op", [pattention, layer_norm])
def test_unknown_backend_lists_the_known(op):
    rest = (*operands(1, 4)[1:], "gelu_l2", TAU) if op is pattention else (WIDTH,)
    with pytest.raises(ValueError, match=r"backend .*reference, fused, triton.*'cuda'"):
        op(torch.randn(1, WIDTH), *rest, backend="cuda")
