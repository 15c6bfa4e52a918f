"""The kernels on CUDA, and on the CPU in Triton's interpreter.

Triton decides at its import whether it interprets. Therefore the tests on the CPU exist only if
TRITON_INTERPRET=1 was set at the start; test_in_the_interpreter starts such a process.
"""

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import default_tau, pattention, triton_theta
from tokenformer_vit.ops.theta import gelu_l2
from tokenformer_vit.ops.triton_theta import MAX_PARAM_TOKENS, gelu_l2_backward, gelu_l2_forward

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [1, 64, 72, 100, 576, 768, 2304]
SIZES: list[tuple[int, int, torch.dtype]] = list(itertools.product((1, 5, 197), PAIRS, DTYPES))
if INTERPRETED:  # where a kernel takes a second for one of the large ones
    SIZES = [(rows, pairs, dtype) for rows, pairs, dtype in SIZES if rows * pairs < 100_000]
    SIZES += [(197, 576, torch.float32), (197, 2304, torch.bfloat16)]
else:
    SIZES += itertools.product([1576], [576, 2304, 3072, MAX_PARAM_TOKENS - 1], DTYPES)
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


def inputs(rows, pairs, dtype=torch.float32, device="cpu"):
    """Scores with a scale of its own for each row, a τ that is not the default, a gradient."""
    scores = torch.randn(rows, pairs, device=device) * torch.rand(rows, 1, device=device).add(0.5)
    tau = torch.tensor(0.7 * default_tau("gelu_l2", pairs) + 0.3, device=device)
    return scores.to(dtype), tau, torch.randn(rows, pairs, device=device).to(dtype)


def plain(scores, tau, grad):
    """Weights and gradient of the scores by plain PyTorch, in the precision of the scores."""
    scores = scores.detach().requires_grad_()
    weights = gelu_l2(scores, tau.to(torch.promote_types(scores.dtype, tau.dtype)), EPS)
    (grad_scores,) = torch.autograd.grad(weights, scores, grad)
    return weights.detach(), grad_scores


def kernels(scores, tau, grad):
    """Weights, factor, the weights again, gradient of the scores; ``grad`` stays as it is."""
    weights, factor = gelu_l2_forward(scores, tau, EPS)
    return weights, factor, *gelu_l2_backward(scores, factor, tau, grad.clone())


@on_each_device
@pytest.mark.parametrize(("rows", "pairs", "dtype"), SIZES)
def test_error_is_at_most_twice_that_of_plain_pytorch(device, rows, pairs, dtype, fences):
    scores, tau, grad = inputs(rows, pairs, dtype, device)
    exact_weights, exact_grad = plain(scores.double(), tau, grad.double())
    exact_factor = (scores.double().square().sum(1, keepdim=True) / tau.double() ** 2 + EPS) ** -0.5
    stock_weights, stock_grad = plain(scores, tau, grad)

    own_scores, own_grad = fences.copy(scores), fences.copy(grad)
    weights, factor = gelu_l2_forward(own_scores, tau, EPS)
    again, grad_scores = gelu_l2_backward(own_scores, factor, tau, own_grad)
    fences.check()
    assert torch.equal(own_scores, scores)
    assert grad_scores.data_ptr() == own_grad.data_ptr()
    assert factor.dtype == torch.float32
    torch.testing.assert_close(factor.double(), exact_factor, rtol=5e-7, atol=0)

    # Few numbers, or a factor they have in common, can be right by chance, so what one rounding
    # does on average counts as well. In a row of one entry, which is parallel to its scores, hardly
    # anything is left of the terms of the gradient, which were rounded.
    epsilon = torch.finfo(dtype).eps
    by_chance = 2 * epsilon if dtype == torch.float32 else 0.25 * epsilon
    if rows > 100 and pairs > 1:
        by_chance = 0.0
    if INTERPRETED and dtype == torch.bfloat16:
        by_chance = 0.5 * epsilon  # it cuts off where a GPU rounds
    for name, ours, stock, exact, terms in (
        ("weights", weights, stock_weights, exact_weights, exact_weights),
        ("weights again", again, stock_weights, exact_weights, exact_weights),
        ("gradient", grad_scores, stock_grad, exact_grad, exact_factor * grad),
    ):
        assert ours.dtype == dtype
        standard = max((stock - exact).norm(), by_chance * terms.norm())
        assert (ours - exact).norm() <= 2 * standard, name


@on_each_device
def test_gelu_and_its_slope_over_their_whole_range(device):
    # with this τ the factor is nearly 1, so the scores are what GELU is applied to
    for row in torch.linspace(-14, 14, 8 * 997, device=device).view(8, 1, 997):
        tau, grad = row.norm(), torch.ones_like(row)
        exact_weights, exact_grad = plain(row.double(), tau, grad.double())
        weights, _, _, grad_scores = kernels(row, tau, grad)
        error = (weights - exact_weights).abs() / row.abs().clamp(min=1)
        assert error.max() < 6e-7
        assert (grad_scores - exact_grad).abs().max() < 2e-6


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairs", [72, 2304])
def test_zero_rows_are_finite(device, dtype, pairs):
    scores, tau, grad = inputs(5, pairs, dtype, device)
    scores[::2] = 0
    weights, factor, again, grad_scores = kernels(scores, tau, grad)
    assert not weights[::2].any()
    assert not again[::2].any()
    torch.testing.assert_close(factor[::2], torch.full_like(factor[::2], EPS**-0.5))
    exact = 0.5 * EPS**-0.5 * grad[::2].double()  # gelu'(0) is a half
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(grad_scores[::2].double(), exact, rtol=tolerance, atol=0)
    assert grad_scores.isfinite().all()


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_beyond_the_range_and_precision_of_the_scores(device, dtype):
    scores = torch.full((2, 576), 300.0, dtype=dtype, device=device)
    weights, factor = gelu_l2_forward(scores, torch.tensor(24.0, device=device), 0.0)
    torch.testing.assert_close(factor, torch.full_like(factor, 1 / 300))
    exact = torch.full_like(weights, 0.8413447460685429)  # gelu(1)
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(weights, exact, rtol=tolerance, atol=0)


@on_each_device
def test_the_range_of_float32_scores(device):
    scores, tau, grad = inputs(5, 100, torch.float32, device)
    for size in (1e4, 1e17):  # a row's norm may be up to 1.8e19
        exact_weights, exact_grad = plain((size * scores).double(), tau, grad.double())
        weights, _, _, grad_scores = kernels(size * scores, tau, grad)
        torch.testing.assert_close(weights.double(), exact_weights, rtol=1e-5, atol=1e-5)
        error = (grad_scores.double() - exact_grad).norm() / exact_grad.norm()
        assert error < 1e-5, size


@on_each_device
def test_other_layouts_of_memory(device):
    scores, tau, grad = inputs(5, 100, device=device)
    expected = kernels(scores, tau, grad)
    apart = torch.stack([scores, grad], dim=-1)
    before = apart.clone()
    weights, factor = gelu_l2_forward(apart[..., 0], tau, EPS)
    again, grad_scores = gelu_l2_backward(
        apart[..., 0], factor.expand(5, 2)[:, :1], tau, apart[..., 1]
    )
    for actual, wanted in zip((weights, factor, again, grad_scores), expected, strict=True):
        assert torch.equal(actual, wanted)
        assert actual.is_contiguous()
    assert torch.equal(apart, before)

    # a compiler may pad the rows of what it passes on, and the gradient must end up there
    padded = torch.zeros(5, 104, device=device)
    padded[:, :100] = grad
    again = torch.ops.tokenformer_vit.gelu_l2_backward(scores, factor, tau, padded[:, :100])
    assert torch.equal(again, expected[2])
    assert torch.equal(padded[:, :100], expected[3])
    assert not padded[:, 100:].any()


@on_each_device
def test_reruns_are_bit_equal(device):
    scores, tau, grad = inputs(197, 100, torch.float16, device)
    for first, second in zip(*(kernels(scores, tau, grad) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@on_each_device
def test_no_rows(device):
    scores, tau, grad = inputs(0, 72, torch.bfloat16, device)
    weights, factor, again, grad_scores = kernels(scores, tau, grad)
    assert weights.shape == again.shape == grad_scores.shape == (0, 72)
    assert factor.shape == (0, 1)


@on_each_device
def test_registration(device):
    scores, tau, grad = inputs(5, 72, torch.bfloat16, device)
    _, factor = gelu_l2_forward(scores, tau, EPS)
    ops = torch.ops.tokenformer_vit
    torch.library.opcheck(ops.gelu_l2_forward.default, (scores, tau, EPS))
    torch.library.opcheck(ops.gelu_l2_forward.default, (scores.t().contiguous().t(), tau, EPS))
    torch.library.opcheck(ops.gelu_l2_backward.default, (scores, factor, tau, grad))


@on_each_device
def test_compiled_in_one_graph(device):
    def step(scores, tau, grad):
        weights, factor = gelu_l2_forward(2 * scores, tau, EPS)
        return weights + 1, *gelu_l2_backward(2 * scores, factor, tau, 3 * grad)

    scores, tau, grad = inputs(5, 100, device=device)
    expected = step(scores, tau, grad)
    backend = "aot_eager" if device == "cpu" else "inductor"
    actual = torch.compile(step, fullgraph=True, backend=backend)(scores, tau, grad)
    for ours, wanted in zip(actual, expected, strict=True):
        assert torch.equal(ours, wanted)


@on_each_device
@pytest.mark.parametrize("compiled", [False, True])
def test_backend(device, compiled):
    shapes = ((2, 9, 48), (100, 48), (100, 40))
    operands = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    tau, upstream = torch.tensor(7.0, device=device), torch.randn(2, 9, 40, device=device)

    def results(operands, upstream, function=pattention, **kwargs):
        out = function(*operands, "gelu_l2", tau, **kwargs)
        return out, *torch.autograd.grad(out, operands, upstream)

    exact_operands = [operand.detach().double().requires_grad_() for operand in operands]
    expected = results(exact_operands, upstream.double(), backend="reference")
    function = pattention
    if compiled:
        backend = "aot_eager" if device == "cpu" else "inductor"
        function = torch.compile(pattention, fullgraph=True, backend=backend)
    for actual, exact in zip(
        results(operands, upstream, function, backend="triton"), expected, strict=True
    ):
        assert (actual - exact).norm() <= 2e-6 * exact.norm()


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
        ({"factor": torch.ones(5)}, r"factor must be \(5, 1\) torch.float32, not \(5,\)"),
        ({"factor": torch.ones(5, 1).half()}, r"factor must be .* not \(5, 1\) torch.float16"),
        ({"grad": torch.randn(5, 64)}, r"grad_weights must be \(5, 72\) .*, not \(5, 64\)"),
        ({"grad": torch.randn(5, 72).bfloat16()}, "grad_weights must be .* torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(device, change, message):
    scores, tau, grad = inputs(5, 72)
    given = {"scores": scores, "tau": tau, "grad": grad, "factor": torch.ones(5, 1), **change}
    given = {name: t if t.is_meta else t.to(device) for name, t in given.items()}
    with pytest.raises(InputError, match=message) as error:
        gelu_l2_backward(given["scores"], given["factor"], given["tau"], given["grad"])
    assert "\n" not in str(error.value)
    if "scores" in change or "tau" in change:
        with pytest.raises(InputError, match=message):
            gelu_l2_forward(given["scores"], given["tau"], EPS)


@compiles_for_itself
def test_scores_on_the_cpu():
    pytest.importorskip("triton")
    with pytest.raises(InputError, match="on the CPU: choose fused, or set TRITON_INTERPRET=1"):
        gelu_l2_forward(*inputs(5, 72)[:2], EPS)


@compiles_for_itself
def test_without_triton():
    script = """
import sys
sys.modules["triton"] = None
import torch
from tokenformer_vit.errors import InputError
from tokenformer_vit.ops.triton_theta import gelu_l2_backward, gelu_l2_forward
one = torch.ones(1, 1)
for function, arguments in (
    (gelu_l2_forward, (one, one[0, 0], 0.0)),
    (gelu_l2_backward, (one, one, one[0, 0], one)),
):
    try:
        function(*arguments)
    except InputError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    line = "the triton backend needs Triton: pip install triton, or choose fused\n"
    assert result.stdout == 2 * line


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


def test_blocks_of_a_row():
    for pairs in (576, 768, 2304, 3072):  # no lane is idle
        layout = triton_theta._layout(pairs, 1)
        assert layout["LEFT"] + layout["RIGHT"] == pairs
    for pairs in range(1, MAX_PARAM_TOKENS + 1):
        for kept in (1, 2):
            layout = triton_theta._layout(pairs, kept)
            covered = layout["LEFT"] + layout["RIGHT"]
            assert pairs <= covered < 1.5 * pairs + 1
            assert layout["num_warps"] in (1, 2, 4, 8, 16, 32)
            assert covered * layout["ROWS"] <= 64 // kept * 32 * layout["num_warps"]


KERNELS = {
    "forward": ("scores tau weights factor eps num_rows", 1, 72, 28),
    "backward": ("scores factor tau grad weights num_rows", 2, 104, 36),
}
"""Arguments, numbers kept for each element, limits of registers and instructions an element."""


@compiles_for_itself
@pytest.mark.parametrize("pairs", [576, 768, 2304, 3072])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper_without_spills(name, pairs, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", minversion="3.3")
    from triton.backends.compiler import GPUTarget

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        pytest.skip("this build of Triton has no cuobjdump")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    arguments, kept, max_registers, max_instructions = KERNELS[name]
    types = {"scores": "*bf16", "weights": "*bf16", "grad": "*bf16", "eps": "fp32"}
    types |= {"tau": "*fp32", "factor": "*fp32", "num_rows": "i32"}
    signature = {argument: types[argument] for argument in arguments.split()}
    layout = triton_theta._layout(pairs, kept)
    num_warps = layout.pop("num_warps")
    constants = {"P": pairs, "PTX": True, **layout}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = triton.compiler.ASTSource(
        getattr(triton_theta, f"_{name}_kernel"),
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        aligned,
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])

    def dump(option):
        return subprocess.run(
            [cuobjdump, option, binary], capture_output=True, text=True, check=True
        ).stdout

    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage")))
    assert usage["STACK"] == usage["LOCAL"] == "0"
    assert int(usage["REG"]) <= max_registers
    # All of them, up to the end of the program; what follows is padding.
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*);", dump("-sass"), re.MULTILINE)
    issued = max(index for index, line in enumerate(code) if "EXIT" in line) + 1
    assert issued * 32 * num_warps / (pairs * layout["ROWS"]) <= max_instructions


@pytest.mark.gpu
@compiles_for_itself
def test_waits_for_nothing():
    scores, tau, grad = inputs(197, 576, torch.bfloat16, "cuda")
    kernels(scores, tau, grad)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels(scores, tau, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@compiles_for_itself
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_allocates_the_weights_alone(compiled):
    def step(scores, factor, tau, grad, values):
        weights, grad_scores = gelu_l2_backward(scores, factor, tau, grad @ values)
        return weights.sum(), grad_scores.sum()

    if compiled:
        step = torch.compile(step, fullgraph=True)
    scores, tau, _ = inputs(25216, 2304, torch.bfloat16, "cuda")
    grad = torch.randn(25216, 64, dtype=torch.bfloat16, device="cuda")
    values = torch.randn(64, 2304, dtype=torch.bfloat16, device="cuda")
    _, factor = gelu_l2_forward(scores, tau, EPS)
    step(scores, factor, tau, grad, values)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(scores, factor, tau, grad, values)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2.5 * scores.nbytes  # the gradient that came in, and the weights


@pytest.mark.gpu
@compiles_for_itself
def test_more_than_two_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    rows = 2**31 // 2304 + 197
    scores = torch.ones(rows, 2304, dtype=torch.bfloat16, device="cuda")
    last, tau, grad = inputs(197, 2304, torch.bfloat16, "cuda")
    scores[-197:] = last
    expected = kernels(last, tau, grad)
    grads = torch.ones_like(scores)
    grads[-197:] = grad
    weights, factor = gelu_l2_forward(scores, tau, EPS)
    again, grad_scores = gelu_l2_backward(scores, factor, tau, grads)
    for actual, wanted in zip((weights, factor, again, grad_scores), expected, strict=True):
        assert torch.equal(actual[-197:], wanted)
