"""Records of a GPU decide which backend is the default there."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenformer_vit import benchmarking, ops
from tokenformer_vit.benchmarking.facts import facts_from_record, merge_facts, render_facts
from tokenformer_vit.models import lm_config
from tokenformer_vit.ops import measured, triton_theta

GPU = "Imagined GPU"


def variant(implementation, compiled, seconds):
    return {"implementation": implementation, "compiled": compiled, "seconds_p50": seconds}


def group(precision, **seconds):
    """A group whose times are given by implementation, eager and compiled."""
    rows = [
        variant(name, compiled, times[compiled])
        for name, times in seconds.items()
        for compiled in (False, True)
    ]
    return {"precision": precision, "variants": rows}


def record(*groups, **changes):
    model = {"model": "tokenformer_base_matched", "unit": "image", "ceilings": {"x": {}}}
    return {"device": "cuda", "hardware": GPU, **model, "groups": list(groups), **changes}


def test_the_fastest_in_every_group():
    faster = group("autocast", fused=(3.0, 2.0), triton=(2.0, 1.9), baseline=(9.0, 9.0))
    slower = group("autocast", fused=(3.0, 2.0), triton=(2.0, 2.1))
    other = group("float32", fused=(3.0, 2.0), triton=(3.0, 2.0))
    facts = facts_from_record(record(faster, other))
    both = {"576": "triton", "2304": "triton"}
    assert facts == {GPU: {"bfloat16": both, "float32": both}}
    facts = facts_from_record(record(faster, slower, other))
    assert facts[GPU]["bfloat16"] == {"576": "fused", "2304": "fused"}
    assert facts[GPU]["float32"] == both


def test_what_is_no_fact():
    faster = group("bfloat16", fused=(3.0, 2.0), triton=(2.0, 1.9))
    assert facts_from_record(record(faster, device="cpu")) == {}
    assert facts_from_record(record(group("bfloat16", fused=(3.0, 2.0)))) == {}
    failed = group("bfloat16", fused=(3.0, 2.0), triton=(2.0, 1.9))
    for row in failed["variants"]:
        if row["implementation"] == "triton":
            row["failed"] = "out of memory"
            del row["seconds_p50"]
    assert facts_from_record(record(failed)) == {}


@pytest.mark.parametrize(
    ("preset", "pairs"), [("150m", ("768", "3072")), ("grown_354m", ("2140", "8560"))]
)
def test_language_models_have_their_own_pairs(preset, pairs):
    config = asdict(lm_config(preset))
    groups = [group("bfloat16", fused=(3.0, 2.0), triton=(2.0, 1.9))]
    facts = facts_from_record(record(*groups, unit="token", config=config))
    assert facts == {GPU: {"bfloat16": dict.fromkeys(pairs, "triton")}}


def test_records_that_disagree():
    triton, fused = ({GPU: {"float16": {"64": name}}} for name in ("triton", "fused"))
    more = {GPU: {"float16": {"1024": "triton"}}, "Other": {"float16": {"64": "triton"}}}
    assert merge_facts([triton, fused, more]) == {
        GPU: {"float16": {"64": "fused", "1024": "triton"}},
        "Other": {"float16": {"64": "triton"}},
    }


def test_the_facts_are_those_of_the_records():
    records = Path(benchmarking.__file__).with_name("results")
    assert measured.PATH.read_text(encoding="utf-8") == render_facts(records)


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """Facts about an imagined GPU, written from its record, and tensors that seem to be there."""
    pytest.importorskip("triton")
    own = record(group("autocast", fused=(3.0, 2.0), triton=(2.0, 1.9)))
    (tmp_path / "speed_imagined.json").write_text(json.dumps(own))
    path = tmp_path / "measured.json"
    path.write_text(render_facts(tmp_path))
    monkeypatch.setattr(measured, "_FACTS", measured.read_facts(path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)


class Tokens:
    """What a choice depends on, for a tensor on a GPU that this machine lacks."""

    device = torch.device("cuda", 0)

    def __init__(self, dtype):
        self.dtype = dtype

    def is_floating_point(self):
        return self.dtype.is_floating_point


@pytest.mark.usefixtures("facts")
def test_auto_follows_the_facts(monkeypatch):
    tokens = Tokens(torch.bfloat16)
    kernels = triton_theta.KERNELS["gelu_l2"]
    assert ops._kernels("auto", tokens, "gelu_l2", 576) is kernels
    for other in (
        ops._kernels("auto", tokens, "gelu_l2", 768),
        ops._kernels("auto", Tokens(torch.float32), "gelu_l2", 576),
        ops._kernels("auto", torch.empty(1, dtype=torch.bfloat16), "gelu_l2", 576),
        ops._kernels("fused", tokens, "gelu_l2", 576),
    ):
        assert other is None
    assert ops._kernels("triton", tokens, "gelu_l2", 768) is kernels
    monkeypatch.setattr(ops, "_DEFAULT", "fused")  # PATTENTION_BACKEND
    assert ops._kernels(ops._choose("auto"), tokens, "gelu_l2", 576) is None


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch.compile takes no fake tensors here")
@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_choice_breaks_no_graph(dynamic):
    def choose(x, keys):
        return x + 1 if measured.fastest_backend(x, len(keys)) == "triton" else x - 1

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 8, dtype=torch.bfloat16, device="cuda")
        for pairs in (576, 768):
            keys = torch.empty(pairs, 8, dtype=torch.bfloat16, device="cuda")
            torch.compile(choose, fullgraph=True, backend=keep, dynamic=dynamic)(x, keys)
    assert ["+ 1" in code for code in graphs] == [True, False]


@pytest.mark.gpu
def test_the_choice_can_be_compiled(monkeypatch):
    name = torch.cuda.get_device_name()
    monkeypatch.setattr(measured, "_FACTS", {name: {"float32": {"100": "triton"}}})
    shapes = ((5, 48), (100, 48), (100, 40))
    operands = [torch.randn(shape, device="cuda") for shape in shapes]
    tau = torch.tensor(7.0, device="cuda")
    compiled = torch.compile(ops.pattention, fullgraph=True)
    out = compiled(*operands, "gelu_l2", tau)
    torch.testing.assert_close(out, ops.pattention(*operands, "gelu_l2", tau, backend="reference"))
