"""Every figure of tools/benchmark.py is what it is called."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

_file = Path(__file__).parents[2] / "tools/benchmark.py"
_spec = importlib.util.spec_from_file_location("benchmark_tool", _file)
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def test_saved_activations_of_a_small_network():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x, whole = torch.randn(5, 8), torch.randn(7, 20)  # the loss needs a part, and so keeps all
    float32 = tool.saved_bytes(lambda: (model(x) * whole[:5, :4]).sum(), model)
    assert float32 == 4 * (5 * 8 + 5 * 16 + 7 * 20)  # input, hidden layer after ReLU, factor
    with torch.autocast("cpu", torch.bfloat16):
        bfloat16 = tool.saved_bytes(lambda: model(x).sum(), model)
    assert bfloat16 == 2 * (5 * 8 + 5 * 16)  # and no copy of a weight


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("mode", tool.Language.modes)
def test_flops_of_language_are_those_of_what_is_timed(mode):
    lm = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    shape = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = lm.TokenFormerForCausalLM(lm.TokenFormerConfig(**shape, rotary_share=0.5))
    subject = tool.Language(lambda: model, lambda: model, 61, 12)  # of which 6 are decoded
    compute, batch = subject.compute(mode), subject.draw(3, torch.Generator())
    compute(model, *batch)  # makes the cache of decode
    with FlopCounterMode(display=False) as counter:
        result = compute(model, *batch)
        if mode == "train":
            result.backward()
    _, flops = subject.costs(model)
    # To a whole number for each token.
    each = counter.get_total_flops() / subject.items(mode, 3)
    assert flops[mode] == pytest.approx(each, abs=1)
    logits = model(batch[0], use_cache=False).logits
    expected = (
        cross_entropy(logits.transpose(1, 2), batch[1]) if mode == "train" else logits[:, -1:]
    )
    row = batch[0][:, :7]  # half of the sequence, and the next token
    for _ in range(6 if mode == "decode" else 0):
        expected = model(row, use_cache=False).logits[:, -1:]
        row = torch.cat((row, expected.argmax(dim=-1)), dim=1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("words", ["--model tokenformer_tiny --img-size 32", "--lm tiny"])
def test_a_record_of_the_tool(words, monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    monkeypatch.setattr(tool, "matmul_rate", lambda place, dtype: 2e11)
    words += " --baseline matched-vit --depth 1 --device cpu --batch-sizes 2 --rounds 3 --eager"
    words += " --num-tokens 8 --precisions autocast --out"
    tool.main([*words.split(), str(tmp_path / "speed.json")])
    record = json.loads((tmp_path / "speed.json").read_text())
    unit = record["unit"]
    for group in record["groups"]:
        _, ours = group["variants"]
        rate = group["items"] / np.median(ours["seconds"])
        assert ours[f"{unit}s_per_s"] == pytest.approx(rate, rel=1e-4)
        flops = record[f"flops_per_{unit}"]["model"][group["mode"]]
        assert ours["mfu"] == pytest.approx(flops * rate / 2e11, rel=1e-4)
        assert (ours[f"saved_mb_per_{unit}"] is None) == (group["mode"] != "train")
    if unit == "token":  # of decoding, which is never compiled
        baseline, ours = (np.array(row["seconds"]) for row in record["groups"][2]["variants"])
        ratio = record["groups"][2]["variants"][1]["ratio_p20"]
        assert ratio == pytest.approx(np.percentile(baseline / ours, 20), rel=1e-4)
