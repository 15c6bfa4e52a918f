"""The kernels on CUDA, in Triton's interpreter on the CPU, and compiled for an H100 without one.

Triton decides at its import whether it interprets. Therefore the tests on the CPU exist only if
TRITON_INTERPRET=1 was set at the start; test_in_the_interpreter starts such a process.
"""

import importlib
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch._subclasses import FakeTensorMode

import tokenformer_vit
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import triton_theta
from tokenformer_vit.ops.theta import THETAS, GeluL2
from tokenformer_vit.ops.triton_theta import gelu_l2, gelu_l2_backward

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = list(itertools.product((1, 5, 197), (1, 64, 72, 100, 576, 1792, 2304), DTYPES))
if INTERPRETED:  # where a kernel takes a second for one of the large ones
    SIZES = [size for size in SIZES if size[0] * size[1] < 100_000]
EPS = 1e-6

on_each_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [CUDA])


def inputs(rows, pairs, dtype=torch.float32, device="cpu"):
    """Scores with a scale of its own for each row, a τ that is not the default, a gradient."""
    scores = torch.randn(rows, pairs, device=device) * torch.rand(rows, 1, device=device).add(0.5)
    tau = torch.tensor(0.7 * math.sqrt(pairs) + 0.3, device=device)
    return scores.to(dtype), tau, torch.randn(rows, pairs, device=device).to(dtype)


def plain(scores, tau, grad):
    """Weights and gradient of the scores by plain PyTorch, in the precision of the scores."""
    scores = scores.detach().requires_grad_()
    weights = THETAS["gelu_l2"].weights(scores, tau, EPS)
    return weights.detach(), *torch.autograd.grad(weights, scores, grad)


def kernels(scores, tau, grad):
    weights, factors = gelu_l2(scores, tau, EPS)
    return weights, gelu_l2_backward(scores, tau, factors, grad)[0]


@on_each_device
@pytest.mark.parametrize(("rows", "pairs", "dtype"), SIZES)
def test_error_is_that_of_plain_pytorch(device, rows, pairs, dtype):
    scores, tau, grad = inputs(rows, pairs, dtype, device)
    exact = plain(scores.double(), tau.double(), grad.double())
    # Few numbers can be right by chance, so a rounding of the gradient's terms counts as well. The
    # interpreter cuts bfloat16 off where a GPU rounds.
    epsilon = torch.finfo(dtype).eps * (2 if INTERPRETED or dtype == torch.float32 else 0.5)
    factor = tau / scores.double().norm(dim=-1, keepdim=True)
    sizes = exact[0].norm(), (factor * grad).norm()
    others = plain(scores, tau, grad), exact, sizes
    for ours, stock, truth, size in zip(kernels(scores, tau, grad), *others, strict=True):
        assert ours.dtype == dtype
        times = 1.5 if dtype == torch.float32 else 1.2
        standard = times * (stock - truth).norm() + (epsilon * size if rows * pairs < 20_000 else 0)
        if INTERPRETED and dtype == torch.bfloat16:
            standard += 0.5 * epsilon * size
        assert (ours - truth).norm() <= standard


@on_each_device
def test_gelu_and_its_slope_over_their_whole_range(device):
    # With this τ the factor is nearly 1, so the scores are what GELU is applied to.
    for row in torch.linspace(-14, 14, 8 * 997, device=device).view(8, 1, 997):
        tau, grad = row.norm(), torch.ones_like(row)
        weights, slope = plain(row.double(), tau.double(), grad.double())
        ours, our_slope = kernels(row, tau, grad)
        assert ((ours - weights).abs() / row.abs().clamp(min=1)).max() < 6e-7
        assert (our_slope - slope).abs().max() < 2e-6


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_and_sums_beyond_float16(device, dtype):
    scores, tau, grad = inputs(5, 576, dtype, device)
    scores[::2], scores[1] = 0, 300
    expected = plain(scores.double(), tau.double(), grad.double())
    for ours, exact in zip(kernels(scores, tau, grad), expected, strict=True):
        rtol, atol = 4 * torch.finfo(dtype).eps, 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours, exact.to(dtype), rtol=rtol, atol=atol)


@on_each_device
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_an_operation(device, compiled):
    """They reach scores and a learned τ, also of (B, N, P) scores that are not contiguous."""
    scores, tau, _ = inputs(6, 100, device=device)
    scores = torch.stack([scores, scores], dim=-1)[..., 0].view(2, 3, 100).requires_grad_()
    tau.requires_grad_()
    upstream = torch.randn(2, 3, 100, device=device)

    def run(op, scores, tau, upstream):
        weights = op(scores, tau)
        return weights, *torch.autograd.grad(weights, (scores, tau), upstream)

    def op(scores, tau):
        return GeluL2.apply(scores, tau, EPS)

    wide = scores.detach().double().requires_grad_(), tau.detach().double().requires_grad_()
    expected = run(lambda s, t: THETAS["gelu_l2"].weights(s, t, EPS), *wide, upstream.double())
    if compiled:
        op = torch.compile(
            op, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
        )
    for ours, exact in zip(run(op, scores, tau, upstream), expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@on_each_device
def test_registration(device):
    scores, tau, grad = inputs(5, 72, torch.bfloat16, device)
    ops = torch.ops.tokenformer_vit
    factors = gelu_l2(scores, tau, EPS)[1]
    for each in (scores, scores.t().contiguous().t(), scores[:0]):
        torch.library.opcheck(ops.gelu_l2.default, (each, tau, EPS))
    torch.library.opcheck(ops.gelu_l2_backward.default, (scores, tau, factors, grad))


@pytest.mark.gpu
def test_a_layer_on_a_gpu_uses_the_kernels_and_waits_for_nothing():
    layer = Pattention(48, 48, 576).to("cuda", torch.bfloat16)
    x = torch.randn(197, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile() as profile:
        layer(x)
    assert any("forward_kernel" in event.key for event in profile.key_averages())
    samples = x.detach().view(197, 1, 48)  # torch.func has no kernels, and gets plain PyTorch
    grads = torch.func.vmap(torch.func.grad(lambda x: layer(x).sum()))(samples)
    single = torch.func.grad(lambda x: layer(x).sum())(samples[0])
    torch.testing.assert_close(grads[0], single)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    scores = torch.ones(2**31 // 2304 + 197, 2304, dtype=torch.bfloat16, device="cuda")
    last, tau, _ = inputs(197, 2304, torch.bfloat16, "cuda")
    scores[-197:] = last
    weights = gelu_l2(scores, tau, EPS)[0]
    assert torch.equal(weights[-197:], gelu_l2(last, tau, EPS)[0])


def test_what_kernels_do_not_serve(in_another_process, monkeypatch):
    if INTERPRETED:
        assert triton_theta.serves(torch.empty(5, 8))
    assert not triton_theta.serves(torch.empty(5, 8).double())
    assert not triton_theta.serves(torch.empty(1, triton_theta.MAX_PARAM_TOKENS + 1))
    with FakeTensorMode():  # has no memory of its own
        assert not triton_theta.serves(torch.empty(5, 8))
    monkeypatch.setenv("TOKENFORMER_TRITON", "0")
    done = in_another_process(lambda: print(importlib.reload(triton_theta)._ENABLED))
    assert (done.status, done.out) == (0, "False\n"), done.err


@pytest.mark.slow
def test_in_the_interpreter(seed):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SEED": str(seed), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(tokenformer_vit.__file__).parents[1]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def pairs_of_the_presets():
    with torch.device("meta"):
        models = [timm.create_model(name) for name in timm.list_models("tokenformer*")]
    modules = [module for model in models for module in model.modules()]
    return sorted({each.num_param_tokens for each in modules if isinstance(each, Pattention)})


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled")
def test_no_kernel_spills_on_an_h100(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = pytest.importorskip("triton", minversion="3.3")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        pytest.skip("this build of Triton has no cuobjdump")
    from triton.backends.compiler import GPUTarget

    kept = {triton_theta.forward_kernel: 1, triton_theta.backward_kernel: 2}
    types = dict.fromkeys(("scores", "weights", "grad", "grad_scores"), "*bf16")
    types |= dict.fromkeys(("tau", "factors", "dots"), "*fp32") | {"eps": "fp32", "num_rows": "i32"}
    for kernel, pairs in itertools.product(kept, pairs_of_the_presets()):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        pointers = [place for place, kind in enumerate(signature.values()) if kind[0] == "*"]
        constants = triton_theta._options(pairs, kept[kernel]) | {"PTX": True}
        options = {each: constants.pop(each) for each in ("num_warps", "enable_fp_fusion")}
        aligned = {(place,): [["tt.divisibility", 16]] for place in pointers}
        source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [cuobjdump, "--dump-resource-usage", binary]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        spilled = sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))
        print(kernel.__name__, pairs, *re.findall(r"REG:\d+", usage))
        assert not spilled, f"{kernel.__name__} of {pairs} pairs"
