"""What is timed is what the names say, and every figure is what it is called."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.benchmarking.benchmark import Run, measure, measure_rounds
from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.models import LMConfig

CPU = torch.device("cpu")
_spec = importlib.util.spec_from_file_location(
    "benchmark_tool", Path(__file__).parents[2] / "tools/benchmark.py"
)
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


@pytest.fixture
def language():
    """Small language models; sequences have 12 tokens, of which 6 are decoded."""
    lm = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    shape = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return tool.Language(
        lambda: lm.TokenFormerForCausalLM(lm.TokenFormerConfig(**shape, rotary_share=0.5)),
        lambda: lm.matched_transformer(LMConfig(**shape, rotary_share=0.5)),
        vocab_size=61,
        num_tokens=12,
    )


def tiny():
    return timm.create_model("tokenformer_tiny", img_size=32, depth=1, num_classes=5)


def run(training=True, amp=False, compiled=False):
    batch = [torch.randn(2, 3, 32, 32), torch.tensor([3, 1])]

    def compute(model, images, labels):
        return cross_entropy(model(images), labels) if training else model(images)

    return Run(tiny, compiled, compute, [batch], training, amp)


def test_the_matched_vit_costs_as_much_and_has_random_weights():
    model = timm.create_model("tokenformer_cifar10_micro", depth=2)
    vit, _ = matched_vit(model)
    ours, theirs = (total(model_costs(each)) for each in (model, vit))
    assert theirs.parameters == pytest.approx(ours.parameters, rel=0.01)
    assert theirs.forward_flops == pytest.approx(ours.forward_flops, rel=0.01)
    assert type(vit).__name__ == "VisionTransformer"
    assert vit(torch.randn(1, 3, 32, 32)).std() > 0


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_trains_with_attention_by_products_in_bfloat16_on_a_cpu(amp):
    one = run(amp=amp)
    assert one.model.blocks[0].attn.fused_attn == (not amp)
    before = one.model.head.weight.clone()
    one.step()
    assert not torch.equal(one.model.head.weight, before)
    assert one.model.head.weight.grad is None
    assert run(training=False, amp=amp).forward().requires_grad is False


def test_rounds_rotate_and_every_timed_call_follows_its_own():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = measure_rounds(calls, 4, CPU)
    assert "".join(called) == "aabbccbbccaaccaabbaabbcc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_compiled_runs_are_measured_beside_eager_ones(training):
    runs = {str(compiled): run(training, True, compiled) for compiled in (False, True)}
    rows = measure(runs, 3)
    assert [len(row["seconds"]) for row in rows.values()] == [3, 3]
    assert all(min(row["seconds"]) > 0 for row in rows.values())


def test_saved_activations_of_a_small_network():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    whole = torch.randn(7, 20)  # of which the loss needs a part, and so keeps all
    float32 = tool.saved_bytes(lambda: (model(x) * whole[:5, :4]).sum(), model)
    assert float32 == 4 * (5 * 8 + 5 * 16 + 7 * 20)  # input, hidden layer after ReLU, factor
    with torch.autocast("cpu", torch.bfloat16):
        bfloat16 = tool.saved_bytes(lambda: model(x).sum(), model)
    assert bfloat16 == 2 * (5 * 8 + 5 * 16)  # and no copy of a weight


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("side", ["baseline", "auto"])
@pytest.mark.parametrize("mode", tool.Language.modes)
def test_what_is_timed_is_the_language_model_and_costs_what_is_said(side, mode, language):
    group = {"mode": mode, "dtype": "float32", "batch_size": 3, "items": language.items(mode, 3)}
    one = tool.Measured(language, side, False, group, CPU)
    model, (tokens, targets) = one.model, next(one.batches)
    one.compute(model, tokens, targets)  # makes the cache of decode
    with FlopCounterMode(display=False) as counter:
        result = one.compute(model, tokens, targets)
        if mode == "train":
            result.backward()
    parameters, flops = language.costs(model)
    # To a whole number for each token.
    assert flops[mode] == pytest.approx(counter.get_total_flops() / group["items"], abs=1)
    assert parameters == sum(p.numel() for p in model.parameters())
    expected = model(tokens, use_cache=False).logits
    if mode == "train":
        expected = cross_entropy(expected.transpose(1, 2), targets)
    elif mode == "decode":
        row = tokens[:, :7]  # half of the sequence, and the next token
        for _ in range(language.decoded):
            expected = model(row, use_cache=False).logits
            row = torch.cat((row, expected[:, -1:].argmax(dim=-1)), dim=1)
    expected = expected if mode == "train" else expected[:, -1:]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoded", [False, True])
def test_a_record_of_the_tool(decoded, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "matmul_rate", lambda place, dtype: 2e11)
    words = "--model tokenformer_tiny --baseline matched-vit --depth 1 --img-size 32 --modes train"
    if decoded:
        pytest.importorskip("transformers", reason="pip install '.[language]'")
        words = "--lm tiny --depth 1 --num-tokens 8 --modes decode"
    words += " --device cpu --batch-sizes 2 --precisions autocast --rounds 3 --eager"
    tool.main([*words.split(), "--out", str(tmp_path / "speed.json")])
    record = json.loads((tmp_path / "speed.json").read_text())
    (group,), unit = record["groups"], "token" if decoded else "image"
    baseline, ours = group["variants"]
    assert (baseline["variant"], ours["variant"]) == ("baseline eager", "auto eager")
    rate = group["items"] / np.median(ours["seconds"])
    assert ours[f"{unit}s_per_s"] == pytest.approx(rate, rel=1e-4)
    flops = record[f"flops_per_{unit}"]["model"][group["mode"]]
    assert ours["mfu"] == pytest.approx(flops * rate / 2e11, rel=1e-4)
    assert (ours[f"saved_mb_per_{unit}"] is None) == decoded
    if decoded:
        ratios = np.divide(baseline["seconds"], ours["seconds"])
        assert ours["ratio_p20"] == pytest.approx(np.percentile(ratios, 20), rel=1e-4)
    assert "auto eager" in capsys.readouterr().out
