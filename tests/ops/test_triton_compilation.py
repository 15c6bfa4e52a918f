"""The Triton kernels compiled for an H100, and what torch.compile makes of them, without a GPU."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest
import timm
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import LM_PRESETS, TokenFormerLM, lm_config
from tokenformer_vit.ops import THETAS, triton_kernels, triton_theta
from tokenformer_vit.ops.triton_theta import MAX_PARAM_TOKENS, theta_backward, theta_forward

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are not compiled"
)

ARGUMENTS = {
    "forward": ("scores tau weights factors eps num_rows", 1),
    "backward": ("scores tau factors grad weights dots num_rows", 2),
}
"""Arguments, and numbers kept for each element."""


def test_without_triton():
    script = """
import sys
sys.modules["triton"] = None
import torch
from tokenformer_vit.errors import InputError
from tokenformer_vit.ops.triton_theta import theta_backward, theta_forward
one = torch.ones(1, 1)
for function, arguments in (
    (theta_forward, (one, "gelu_l2", one[0, 0], 0.0)),
    (theta_backward, (one, one, "gelu_l2", one[0, 0], one)),
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


def test_blocks_of_a_row():
    for pairs in (576, 768, 2304, 3072):  # no lane is idle
        layout = triton_theta._layout(pairs, 1)
        assert layout["LEFT"] + layout["RIGHT"] == pairs
    for pairs in range(1, MAX_PARAM_TOKENS + 1):
        for kept in (1, 2):
            layout = triton_theta._layout(pairs, kept)
            covered = layout["LEFT"] + layout["RIGHT"]
            assert pairs <= covered < 1.5 * pairs + 1
            assert layout["RIGHT"] < layout["LEFT"]
            assert layout["num_warps"] in (1, 2, 4, 8, 16, 32)
            assert covered * layout["ROWS"] <= 64 // kept * 32 * layout["num_warps"]


def hopper():
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


def compiled(name, theta, pairs, folder, segments=1, dtype="bf16", number="fp32"):
    """Compile a kernel; return SASS instructions for each score, registers, bytes of spills.

    The arguments that are no tensors have the type ``number`` if they are no integers.
    """
    triton = pytest.importorskip("triton", minversion="3.3")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        pytest.skip("this build of Triton has no cuobjdump")
    arguments, kept = ARGUMENTS[name]
    types = dict.fromkeys(("scores", "weights", "grad"), f"*{dtype}")
    types |= dict.fromkeys(("tau", "factors", "dots"), "*fp32")
    types |= {"eps": number, "num_rows": "i32"}
    signature = {argument: types[argument] for argument in arguments.split()}
    layout = triton_theta._layout(pairs, kept)
    num_warps = layout.pop("num_warps")
    constants = {"THETA": theta, "P": pairs, "SEGMENTS": segments, "PTX": True, **layout}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = triton.compiler.ASTSource(
        getattr(triton_kernels, f"{name}_kernel"),
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        aligned,
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=hopper(), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])

    def dump(option):
        return subprocess.run(
            [cuobjdump, option, binary], capture_output=True, text=True, check=True
        ).stdout

    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage")))
    # All of them, up to the end of the program; what follows is padding.
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*);", dump("-sass"), re.MULTILINE)
    issued = max(index for index, line in enumerate(code) if "EXIT" in line) + 1
    per_score = issued * 32 * num_warps / (pairs * layout["ROWS"])
    return per_score, int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def counts_of_the_readme():
    """Return {(Θ, P, kernel): (instructions for each score, registers)} of ops/README.md."""
    text = Path(triton_theta.__file__).with_name("README.md").read_text(encoding="utf-8")
    table = text[text.index("| Θ | P | forward |") :].partition("\n\n")[0]
    counts = {}
    for line in table.splitlines()[2:]:
        theta, pairs, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
        for index, name in enumerate(ARGUMENTS):
            own = numbers[2 * index : 2 * index + 2]
            counts[theta, int(pairs), name] = (float(own[0]), int(own[1]))
    return counts


COUNTS = counts_of_the_readme()


def test_the_readme_counts_every_variant():
    assert {theta for theta, _, _ in COUNTS} == set(triton_theta.VARIANTS) == set(THETAS)


@pytest.mark.parametrize(
    ("theta", "pairs", "name"),
    [case if case[1] == 576 else pytest.param(*case, marks=pytest.mark.slow) for case in COUNTS],
)
def test_instructions_and_registers_on_hopper(theta, pairs, name, cache):
    per_score, registers, spilled = compiled(name, theta, pairs, cache)
    assert spilled == 0
    expected, expected_registers = COUNTS[theta, pairs, name]
    # Versions of Triton differ a little; padded rows or a second exponential would be 30 % more.
    assert per_score == pytest.approx(expected, rel=0.12)
    assert registers <= 1.4 * expected_registers


@pytest.mark.parametrize("theta", THETAS)
def test_nothing_is_computed_in_float64(theta, cache):
    """Some versions of torch.compile pass a number in 64 bits, where Triton itself takes 32."""
    per_score, _, _ = compiled("forward", theta, 576, cache)
    wide, _, _ = compiled("forward", theta, 576, cache, number="fp64")
    assert wide < 1.02 * per_score


def pairs_of_all_models():
    """Return the P of every preset that is not too large for the kernels."""
    pairs = {1, 100}
    with torch.device("meta"):
        models = [timm.create_model(name, depth=1) for name in timm.list_models("tokenformer*")]
        models += [TokenFormerLM(lm_config(preset, depth=1)) for preset in LM_PRESETS]
    for layer in chain.from_iterable(model.modules() for model in models):
        if isinstance(layer, Pattention):
            pairs.add(layer.num_param_tokens)
    return sorted(each for each in pairs if each <= MAX_PARAM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("theta", THETAS)
def test_no_spills_for_any_model(theta, name, cache):
    cases = [(pairs, 1, "bf16") for pairs in pairs_of_all_models()]
    cases += [(pairs, *how) for pairs in (192, 576, 8620) for how in ((3, "bf16"), (1, "fp32"))]
    for pairs, segments, dtype in cases:
        _, registers, spilled = compiled(name, theta, pairs, cache, segments, dtype)
        assert spilled == 0, (pairs, segments, dtype)
        assert registers <= 192, (pairs, segments, dtype)


LAUNCH = torch.ops.higher_order.triton_kernel_wrapper_functional


class Driver:
    """The part of Triton's driver that finds out what a kernel writes."""

    @staticmethod
    def get_current_target():
        return hopper()

    @staticmethod
    def get_current_device():
        return 0


@pytest.fixture
def on_hopper(monkeypatch):
    """Let PyTorch trace kernels for an H100, whatever this machine has."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("theta", THETAS)
def test_torch_compile_sees_the_kernels(theta, dynamic):
    """One graph launches both kernels, for any number of rows, and copies no tensor for them."""
    graphs = []

    def keep(graph, inputs):
        reinplace_inplaceable_ops_core(graph.graph)  # Inductor's decision on copies
        graphs.append(graph.graph)
        return graph.forward

    def step(x, keys, values, tau):
        scores = x @ keys.t()
        weights, factors = theta_forward(scores, theta, tau, 1e-6)
        again, grad, dots = theta_backward(scores, factors, theta, tau, x @ values)
        return weights, again @ keys, grad @ keys, dots

    x = torch.empty(197, 64, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(576, 64, dtype=torch.bfloat16, device="meta")
    values, tau = keys.t().contiguous(), torch.empty((), device="meta")
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    backend = aot_autograd(fw_compiler=keep)
    torch.compile(step, fullgraph=True, backend=backend)(x, keys, values, tau)
    (graph,) = graphs
    launches = [node for node in graph.nodes if node.target is LAUNCH]
    kernels = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in launches]
    wanted = [triton_kernels.forward_kernel, triton_kernels.backward_kernel]
    assert [kernel.fn for kernel in kernels] == wanted  # of an Autotuner with one configuration
    for node in launches:
        assert node.kwargs["tensors_to_clone"] == []
        arguments = node.kwargs["kwargs"]
        assert (arguments["P"], arguments["THETA"]) == (576, theta)
        assert isinstance(arguments["num_rows"], torch.fx.Node) is dynamic
    assert not any("tokenformer_vit" in str(node.target) for node in graph.nodes)
