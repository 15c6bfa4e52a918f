"""The rows of the benchmarks of language models are what their records say."""

import json

import pytest

from tokenformer_vit.experiments import render


def variant(name, rate, ratio, seconds, saved, peak):
    return {
        "variant": name,
        "tokens_per_s": rate,
        **dict(zip(("ratio_p20", "ratio_p50", "ratio_p80"), ratio, strict=True)),
        "seconds": seconds,
        "saved_mb_per_token": saved,
        "peak_mib": peak,
        "mfu": 0.414,
    }


def group(mode, compiled, saved):
    one = (1.0, 1.0, 1.0)
    kind = "eager" if mode == "decode" else compiled
    return {
        **{"mode": mode, "precision": "float32", "dtype": "float32", "batch_size": 3},
        "variants": [
            variant(f"baseline {kind}", 1234.5, one, [2.0, 2.0, 2.0], saved and 0.2, 200),
            variant("released eager", 9.0, one, [3.0, 4.5, 3.5], saved and 0.3, 300),
            variant(f"fused {kind}", 87.65, (0.7, 0.8, 0.9), [2.0, 3.0, 2.5], saved, 150),
        ],
    }


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    return tmp_path


def test_rows_of_language_models(results):
    assert render.language_speed_rows() == "| not run | | | | | | | |\n"
    record = {"model": "150m", "num_tokens": 64, "hardware": "2 cores", "device": "cpu"}
    record["groups"] = [group("train", "compiled", 0.15), group("decode", "compiled", None)]
    (results / "speed_lm_150m_64_cpu.json").write_text(json.dumps(record))
    link = "[`150m`, 64 tokens, 2 cores](ablations/results/speed_lm_150m_64_cpu.json)"
    assert render.language_speed_rows() == (
        f"| {link}, train, float32, batch 3 | 1,234 | 87.7 | **0.80** (0.70–0.90) | 1.50 "
        "| 150.0 / 200.0 = 0.75 | 0.75 | 41 |\n"
        f"| {link}, decode, float32, batch 3 | 1,234 | 87.7 | **0.80** (0.70–0.90) | 1.50 "
        "| – | 0.75 | 41 |\n"
    )
    text = "<!-- language-speed -->\nold\n<!-- /language-speed -->"
    assert link in render.render(text)
    assert "old" not in render.render(text)
    assert link not in render.speed_rows()  # they are of images
