"""The kernels on CUDA, and on the CPU in Triton's interpreter.

Triton decides at its import whether it interprets. Therefore the tests on the CPU exist only if
TRITON_INTERPRET=1 was set at the start; test_in_the_interpreter starts such a process.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import THETAS, default_tau, pattention, pattention_joint, theta_weights
from tokenformer_vit.ops.triton_theta import (
    KERNELS,
    MAX_PARAM_TOKENS,
    theta_backward,
    theta_forward,
)

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [1, 64, 72, 100, 576, 768, 1792, 2304]
SIZES: list[tuple[int, int, torch.dtype]] = list(itertools.product((1, 5, 197), PAIRS, DTYPES))
if INTERPRETED:  # where a kernel takes a second for one of the large ones
    SIZES = [(rows, pairs, dtype) for rows, pairs, dtype in SIZES if rows * pairs < 100_000]
    SIZES += [(197, 576, torch.float32), (197, 2304, torch.bfloat16)]
else:
    SIZES += itertools.product([1576], [576, 2304, 3072, MAX_PARAM_TOKENS - 1], DTYPES)
CASES = [("gelu_l2", *size) for size in SIZES]
for other in (name for name in THETAS if name != "gelu_l2"):  # the same frame, so fewer sizes
    CASES += [(other, *size) for size in SIZES if size[0] > 1 and size[1] in (72, 100, 576, 2304)]
EPS = 1e-6
FENCE = 64

on_each_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [CUDA])
compiles_for_itself = pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled here")


class Fences:
    """Memory that is NaN until it is written, between NaNs that nobody may write or use."""

    def __init__(self):
        self.buffers = []

    def empty(self, *shape, dtype, device):
        buffer = torch.full((math.prod(shape) + 2 * FENCE,), math.nan, dtype=dtype, device=device)
        self.buffers.append(buffer)
        return buffer[FENCE:-FENCE].view(shape)

    def empty_like(self, tensor):
        return self.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def copy(self, tensor):
        return self.empty_like(tensor).copy_(tensor)

    def check(self):
        for buffer in self.buffers:
            assert buffer[:FENCE].isnan().all()
            assert buffer[-FENCE:].isnan().all()


@pytest.fixture
def fences(monkeypatch):
    fences = Fences()
    monkeypatch.setattr(torch, "empty", fences.empty)
    monkeypatch.setattr(torch, "empty_like", fences.empty_like)
    return fences


def inputs(rows, pairs, dtype=torch.float32, device="cpu", theta="gelu_l2"):
    """Scores with a scale of its own for each row, a τ that is not the default, a gradient."""
    scores = torch.randn(rows, pairs, device=device) * torch.rand(rows, 1, device=device).add(0.5)
    tau = torch.tensor(0.7 * default_tau(theta, pairs) + 0.3, device=device)
    return scores.to(dtype), tau, torch.randn(rows, pairs, device=device).to(dtype)


def plain(scores, tau, grad, theta="gelu_l2", eps=EPS):
    """Weights and gradient of the scores by plain PyTorch, in the precision of the scores."""
    scores = scores.detach().requires_grad_()
    tau = tau.to(torch.promote_types(scores.dtype, tau.dtype))
    weights = theta_weights(scores, theta, tau, eps)
    (grad_scores,) = torch.autograd.grad(weights, scores, grad)
    return weights.detach(), grad_scores


def kernels(scores, tau, grad, theta="gelu_l2"):
    """Weights, factors, weights again, gradient, dot products; ``grad`` stays as it is."""
    weights, factors = theta_forward(scores, theta, tau, EPS)
    return weights, factors, *theta_backward(scores, factors, theta, tau, grad.clone())


@on_each_device
@pytest.mark.parametrize(("theta", "rows", "pairs", "dtype"), CASES)
def test_error_is_at_most_twice_that_of_plain_pytorch(device, theta, rows, pairs, dtype, fences):
    scores, tau, grad = inputs(rows, pairs, dtype, device, theta)
    exact = scores.double()
    exact_weights, exact_grad = plain(exact, tau, grad.double(), theta)
    _, (_, exact_factors) = THETAS[theta].kernels.forward(exact, tau.double(), EPS)
    stock_weights, stock_grad = plain(scores, tau, grad, theta)

    own_scores, own_grad = fences.copy(scores), fences.copy(grad)
    weights, factors = theta_forward(own_scores, theta, tau, EPS)
    again, grad_scores, _ = theta_backward(own_scores, factors, theta, tau, own_grad)
    fences.check()
    assert torch.equal(own_scores, scores)
    assert grad_scores.data_ptr() == own_grad.data_ptr()
    assert factors.dtype == torch.float32
    torch.testing.assert_close(factors.double(), exact_factors, rtol=1e-6, atol=0)

    # Few numbers, or a factor they have in common, can be right by chance, so what one rounding
    # does on average counts as well. In a row of one entry, which is parallel to its scores, hardly
    # anything is left of the terms of the gradient, which were rounded.
    epsilon = torch.finfo(dtype).eps
    by_chance = 2 * epsilon if dtype == torch.float32 else 0.25 * epsilon
    if rows > 100 and pairs > 1:
        by_chance = 0.0
    if INTERPRETED and dtype == torch.bfloat16:
        by_chance = 0.5 * epsilon  # it cuts off where a GPU rounds
    terms = exact_factors * grad if theta == "gelu_l2" else exact_grad
    for name, ours, stock, exact, size in (
        ("weights", weights, stock_weights, exact_weights, exact_weights),
        ("weights again", again, stock_weights, exact_weights, exact_weights),
        ("gradient", grad_scores, stock_grad, exact_grad, terms),
    ):
        assert ours.dtype == dtype
        standard = max((stock - exact).norm(), by_chance * size.norm())
        assert (ours - exact).norm() <= 2 * standard, name


@on_each_device
def test_gelu_and_its_slope_over_their_whole_range(device):
    # with this τ the factor is nearly 1, so the scores are what GELU is applied to
    for theta in ("gelu_l2", "gelu_tanh_l2"):
        for row in torch.linspace(-14, 14, 8 * 997, device=device).view(8, 1, 997):
            tau, grad = row.norm(), torch.ones_like(row)
            exact_weights, exact_grad = plain(row.double(), tau, grad.double(), theta)
            weights, _, _, grad_scores, _ = kernels(row, tau, grad, theta)
            error = (weights - exact_weights).abs() / row.abs().clamp(min=1)
            assert error.max() < 6e-7
            assert (grad_scores - exact_grad).abs().max() < 2e-6


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairs", [72, 2304])
@pytest.mark.parametrize("theta", THETAS)
def test_zero_rows_are_finite(device, theta, pairs, dtype):
    scores, tau, grad = inputs(5, pairs, dtype, device, theta)
    scores[::2] = 0
    weights, factors, again, grad_scores, dots = kernels(scores, tau, grad, theta)
    exact = scores.double()
    exact_weights, kept = THETAS[theta].kernels.forward(exact, tau.double(), EPS)
    _, exact_grad, _ = THETAS[theta].kernels.backward(kept, tau.double(), grad.double())
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-6)
    for actual, wanted in (
        (weights, exact_weights),
        (again, exact_weights),
        (factors, kept[1]),
        (grad_scores, exact_grad),
    ):
        atol = tolerance * grad.abs().max().item() if theta == "softmax" else 0
        # 1 / eps, the factor of gelu_l1, is beyond the range of float16
        rounded = wanted[::2].to(actual.dtype)
        torch.testing.assert_close(actual[::2], rounded, rtol=tolerance, atol=atol)
        assert not actual.isnan().any()
    assert dots.isfinite().all()


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_beyond_the_range_and_precision_of_the_scores(device, dtype):
    scores = torch.full((2, 576), 300.0, dtype=dtype, device=device)
    weights, factor = theta_forward(scores, "gelu_l2", torch.tensor(24.0, device=device), 0.0)
    torch.testing.assert_close(factor, torch.full_like(factor, 1 / 300))
    exact = torch.full_like(weights, 0.8413447460685429)  # gelu(1)
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(weights, exact, rtol=tolerance, atol=0)
    for theta in ("gelu_l1", "gelu_l2_post", "softmax"):  # these weights are all 1
        tau = torch.tensor(default_tau(theta, 576), device=device)
        weights, _ = theta_forward(scores, theta, tau, 0.0)
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=tolerance, atol=0)


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_the_range_of_float32_scores(device, theta):
    scores, tau, grad = inputs(5, 100, torch.float32, device, theta)
    for size in (1e4, 1e17):  # the norm of a row may be up to 1.8e19 under the L2 variants
        exact_weights, exact_grad = plain((size * scores).double(), tau, grad.double(), theta)
        weights, _, _, grad_scores, _ = kernels(size * scores, tau, grad, theta)
        torch.testing.assert_close(weights.double(), exact_weights, rtol=1e-5, atol=1e-5)
        error = (grad_scores.double() - exact_grad).norm()
        assert error <= 1e-5 * exact_grad.norm() + 1e-9, size


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("theta", THETAS)
def test_segments_have_their_own_tau(device, theta, dtype):
    """Rows (token, segment) with a τ for each segment are three calls with one τ each."""
    for pairs in (72, 300):  # programs of several rows and of one
        scores, tau, grad = inputs(3 * 7, pairs, dtype, device, theta)
        taus = tau * torch.tensor([[1.0], [0.4], [2.5]], device=device)
        scores, grad = scores.view(7, 3, pairs), grad.view(7, 3, pairs)
        weights, kept = KERNELS[theta].forward(scores, taus, EPS)
        again, grad_scores, dots = KERNELS[theta].backward(kept, taus, grad.clone())
        assert kept[1].shape[:-1] == (7, 3)
        for s in range(3):
            own, own_kept = KERNELS[theta].forward(scores[:, s], taus[s, 0], EPS)
            expected = KERNELS[theta].backward(own_kept, taus[s, 0], grad[:, s].clone())
            assert torch.equal(weights[:, s], own)
            assert torch.equal(kept[1][:, s], own_kept[1])
            for actual, wanted in zip((again, grad_scores, dots), expected, strict=True):
                assert torch.equal(actual[:, s], wanted)


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_other_layouts_of_memory(device, theta):
    scores, tau, grad = inputs(6, 100, device=device, theta=theta)
    expected = kernels(scores, tau, grad, theta)
    apart = torch.stack([scores, grad], dim=-1)
    before = apart.clone()
    weights, factors = theta_forward(apart[..., 0], theta, tau, EPS)
    spread = torch.stack([factors, factors], dim=-1)[..., 0]
    results = theta_backward(apart[..., 0], spread, theta, tau, apart[..., 1])
    for actual, wanted in zip((weights, factors, *results), expected, strict=True):
        assert torch.equal(actual, wanted)
        assert actual.is_contiguous()
    assert torch.equal(apart, before)
    taus = torch.stack([tau, tau, 2 * tau])[:2].flip(0)
    assert torch.equal(theta_forward(scores, theta, taus, EPS)[0], weights)

    # a compiler may pad the rows of what it passes on, and the gradient must end up there
    padded = torch.zeros(6, 104, device=device)
    padded[:, :100] = grad
    again, _ = torch.ops.tokenformer_vit.theta_backward(
        scores, factors, theta, tau, padded[:, :100]
    )
    assert torch.equal(again, expected[2])
    assert torch.equal(padded[:, :100], expected[3])
    assert not padded[:, 100:].any()


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_reruns_are_bit_equal(device, theta):
    scores, tau, grad = inputs(197, 100, torch.float16, device, theta)
    for first, second in zip(*(kernels(scores, tau, grad, theta) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_no_rows(device, theta):
    scores, tau, grad = inputs(0, 72, torch.bfloat16, device)
    weights, factors, again, grad_scores, dots = kernels(scores, tau, grad, theta)
    assert weights.shape == again.shape == grad_scores.shape == (0, 72)
    assert factors.shape == (0, 2 if theta == "softmax" else 1)
    assert dots.shape == (0, 1)

    x = torch.randn(2, 0, 48, device=device, requires_grad=True)
    keys, values = torch.randn(3, 72, 48, device=device), torch.randn(3, 72, 40, device=device)
    for layers in (1, 3):
        tokens = [*keys[:layers]], [*values[:layers]]
        outs = pattention_joint(x, *tokens, theta, layers * [tau], backend="triton")
        (grad_x,) = torch.autograd.grad([out.sum() for out in outs], x)
        assert [out.shape for out in outs] == layers * [(2, 0, 40)]
        assert grad_x.shape == x.shape


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_registration(device, theta):
    scores, tau, grad = inputs(5, 72, torch.bfloat16, device)
    _, factors = theta_forward(scores, theta, tau, EPS)
    ops = torch.ops.tokenformer_vit
    apart = scores.t().contiguous().t()
    torch.library.opcheck(ops.theta_forward.default, (scores, theta, tau, EPS))
    torch.library.opcheck(ops.theta_forward.default, (apart, theta, tau, EPS))
    torch.library.opcheck(ops.theta_backward.default, (scores, factors, theta, tau, grad))


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_compiled_in_one_graph(device, theta):
    def step(scores, tau, grad):
        weights, factors = theta_forward(2 * scores, theta, tau, EPS)
        return weights + 1, *theta_backward(2 * scores, factors, theta, tau, 3 * grad)

    scores, tau, grad = inputs(5, 100, device=device, theta=theta)
    expected = step(scores, tau, grad)
    backend = "aot_eager" if device == "cpu" else "inductor"
    actual = torch.compile(step, fullgraph=True, backend=backend)(scores, tau, grad)
    for ours, wanted in zip(actual, expected, strict=True):
        assert torch.equal(ours, wanted)


@on_each_device
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("theta", THETAS)
def test_backend(device, theta, compiled):
    shapes = ((2, 9, 48), (100, 48), (100, 40), ())
    operands = [torch.randn(shape, device=device) for shape in shapes[:-1]]
    operands.append(torch.tensor(0.7 * default_tau(theta, 100), device=device))  # learned
    upstream = torch.randn(2, 9, 40, device=device)

    def op(x, keys, values, tau, backend):
        return pattention(x, keys, values, theta, tau, backend=backend)

    def results(operands, upstream, op, backend):
        operands = [operand.requires_grad_() for operand in operands]
        out = op(*operands, backend)
        return out, *torch.autograd.grad(out, operands, upstream)

    exact = [operand.double() for operand in operands]
    expected = results(exact, upstream.double(), op, "reference")
    stock = results(operands, upstream, op, "fused")
    if compiled:
        backend = "aot_eager" if device == "cpu" else "inductor"
        op = torch.compile(op, fullgraph=True, backend=backend)
    ours = results(operands, upstream, op, "triton")
    for actual, fused, wanted in zip(ours, stock, expected, strict=True):
        # the gradient of τ is a sum of both signs, which may be right by chance
        standard = max((fused - wanted).norm(), 1e-6 * wanted.norm().clamp(min=1))
        assert (actual - wanted).norm() <= 2 * standard


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_layers_with_the_same_input(device, theta):
    x = torch.randn(2, 9, 48, device=device)
    keys, values = torch.randn(3, 100, 48, device=device), torch.randn(3, 100, 40, device=device)
    taus = torch.tensor([0.4, 1.0, 1.7], device=device) * default_tau(theta, 100)
    upstream = torch.randn(3, 2, 9, 40, device=device)
    operands = [tensor.clone().requires_grad_() for tensor in (x, *keys, *values, *taus)]

    def results(operands, backend):
        x, *rest = operands
        outs = pattention_joint(x, rest[:3], rest[3:6], theta, rest[6:], backend=backend)
        return *outs, *torch.autograd.grad(outs, operands, [*upstream.to(x.dtype)])

    exact = [operand.detach().double().requires_grad_() for operand in operands]
    expected = results(exact, "reference")
    all_results = zip(
        results(operands, "triton"), results(operands, "fused"), expected, strict=True
    )
    for actual, fused, wanted in all_results:
        least = 1e-6 if wanted.ndim else 1e-5  # a τ sums numbers of both signs
        standard = max((fused - wanted).norm(), least * wanted.norm())
        assert (actual - wanted).norm() <= 2 * standard


@on_each_device
@pytest.mark.parametrize("theta", THETAS)
def test_a_batch_of_gradients(device, theta):
    x = torch.randn(9, 48, device=device, requires_grad=True)
    keys, values = torch.randn(2, 72, 48, device=device), torch.randn(2, 72, 40, device=device)
    taus = 2 * [torch.tensor(default_tau(theta, 72), device=device)]
    outs = pattention_joint(x, [*keys], [*values], theta, taus, backend="triton")
    grads = torch.randn(2, 3, 9, 40, device=device)
    (batch,) = torch.autograd.grad(outs, x, [*grads], is_grads_batched=True, retain_graph=True)
    for index in range(3):
        (single,) = torch.autograd.grad(outs, x, [*grads[:, index]], retain_graph=True)
        # Under softmax the largest elements are near 1000, and others cancel.
        assert (batch[index] - single).norm() < 1e-5 * single.norm()


@on_each_device
def test_rows_that_are_too_long_use_the_plain_kernels(device):
    shapes = ((2, 4), (MAX_PARAM_TOKENS + 1, 4), (MAX_PARAM_TOKENS + 1, 3))
    operands = [torch.randn(shape, device=device) for shape in shapes]
    tau = torch.tensor(default_tau("gelu_l2", MAX_PARAM_TOKENS), device=device)
    ours, fused = (
        pattention(*operands, "gelu_l2", tau, backend=backend) for backend in ("triton", "fused")
    )
    assert torch.equal(ours, fused)


@on_each_device
def test_backward_may_run_under_autocast(device):
    shapes = ((9, 48), (100, 48), (100, 40))
    operands = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    out = pattention(*operands, "gelu_l2", torch.tensor(7.0, device=device), backend="triton")
    with torch.autocast(device, torch.bfloat16):
        grads = torch.autograd.grad(out.sum(), operands)
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


@on_each_device
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.randn(5, 72, dtype=torch.float64)}, "float64: choose fused"),
        ({"scores": torch.ones(5, 72, dtype=torch.int32)}, "int32: choose fused"),
        ({"scores": torch.randn(2, 5, 72)}, r"\(2, 5, 72\): choose fused"),
        ({"scores": torch.randn(5, 0)}, r"\(5, 0\): choose fused"),
        ({"scores": torch.randn(1, MAX_PARAM_TOKENS + 1)}, r"16384, not \(1, 16385\): choose"),
        ({"tau": torch.tensor(8.0, device="meta")}, "tau is on meta.*: move tau"),
        ({"tau": torch.ones(3)}, "multiple of the 3 segments .* it is 5: give"),
        ({"tau": torch.ones(0)}, "multiple of the 0 segments .* it is 5: give"),
        ({"theta": "relu"}, "theta must be one of softmax, .*, but got 'relu'"),
        ({"factors": torch.ones(5)}, r"factors must be \(5, 1\) torch.float32, not \(5,\)"),
        ({"factors": torch.ones(5, 1).half()}, r"factors must be .* not \(5, 1\) torch.float16"),
        ({"theta": "softmax"}, r"factors must be \(5, 2\) torch.float32, not \(5, 1\)"),
        ({"grad": torch.randn(5, 64)}, r"grad_weights must be \(5, 72\) .*, not \(5, 64\)"),
        ({"grad": torch.randn(5, 72).bfloat16()}, "grad_weights must be .* torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(device, change, message):
    scores, tau, grad = inputs(5, 72)
    given = {"scores": scores, "tau": tau, "grad": grad, "factors": torch.ones(5, 1)}
    given |= {name: value for name, value in change.items() if name != "theta"}
    given = {name: t if t.is_meta else t.to(device) for name, t in given.items()}
    theta = change.get("theta", "gelu_l2")
    with pytest.raises(InputError, match=message) as error:
        theta_backward(given["scores"], given["factors"], theta, given["tau"], given["grad"])
    assert "\n" not in str(error.value)
    if "scores" in change or "tau" in change or theta == "relu":
        with pytest.raises(InputError, match=message):
            theta_forward(given["scores"], theta, given["tau"], EPS)


@compiles_for_itself
def test_scores_on_the_cpu():
    pytest.importorskip("triton")
    scores, tau, _ = inputs(5, 72)
    with pytest.raises(InputError, match="on the CPU: choose fused, or set TRITON_INTERPRET=1"):
        theta_forward(scores, "gelu_l2", tau, EPS)


@pytest.mark.slow
@compiles_for_itself
def test_in_the_interpreter(seed):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SEED": str(seed), "PYTEST_ADDOPTS": ""}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.gpu
@compiles_for_itself
@pytest.mark.parametrize("theta", THETAS)
def test_waits_for_nothing(theta):
    scores, tau, grad = inputs(197, 576, torch.bfloat16, "cuda", theta)
    kernels(scores, tau, grad, theta)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels(scores, tau, grad, theta)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@compiles_for_itself
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("theta", THETAS)
def test_backward_allocates_the_weights_alone(theta, compiled):
    def step(scores, factors, tau, grad, values):
        weights, grad_scores, _ = theta_backward(scores, factors, theta, tau, grad @ values)
        return weights.sum(), grad_scores.sum()

    if compiled:
        step = torch.compile(step, fullgraph=True)
    scores, tau, _ = inputs(25216, 2304, torch.bfloat16, "cuda", theta)
    grad = torch.randn(25216, 64, dtype=torch.bfloat16, device="cuda")
    values = torch.randn(64, 2304, dtype=torch.bfloat16, device="cuda")
    _, factors = theta_forward(scores, theta, tau, EPS)
    step(scores, factors, tau, grad, values)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(scores, factors, tau, grad, values)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2.5 * scores.nbytes  # the gradient that came in, and the weights


@pytest.mark.gpu
@compiles_for_itself
@pytest.mark.parametrize("theta", THETAS)
def test_more_than_two_to_the_31_elements(theta):
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    rows = 2**31 // 2304 + 197
    scores = torch.ones(rows, 2304, dtype=torch.bfloat16, device="cuda")
    last, tau, grad = inputs(197, 2304, torch.bfloat16, "cuda", theta)
    scores[-197:] = last
    expected = kernels(last, tau, grad, theta)
    grads = torch.ones_like(scores)
    grads[-197:] = grad
    weights, factors = theta_forward(scores, theta, tau, EPS)
    results = theta_backward(scores, factors, theta, tau, grads)
    for actual, wanted in zip((weights, factors, *results), expected, strict=True):
        assert torch.equal(actual[-197:], wanted)
