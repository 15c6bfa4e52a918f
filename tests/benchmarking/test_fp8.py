"""The errors of 8-bit products are of the right tensors; the counts follow from FLOPs and bytes."""

import json

import pytest
import torch

from tokenformer_vit.benchmarking import fp8


def test_a_relative_error_is_of_all_tensors_together():
    exact = [torch.full((3,), 4.0), torch.tensor([[3.0], [0.0]])]
    results = [exact[0], exact[1] + 5.7]
    expected = (2 * 5.7**2 / (3 * 16 + 9)) ** 0.5
    assert fp8.relative_error(results, exact) == pytest.approx(expected, rel=1e-3)


def test_rounding_keeps_three_or_two_bits_of_mantissa():
    numbers = torch.tensor([1.0, 1.06, 1.07, 1.19, 448.0])
    assert fp8.rounded(numbers, fp8.E4M3, False).tolist() == [1.0, 1.0, 1.125, 1.25, 448.0]
    numbers = torch.tensor([1.0, 1.12, 1.13, 57344.0])
    assert fp8.rounded(numbers, fp8.E5M2).tolist() == [1.0, 1.0, 1.25, 57344.0]
    large = torch.tensor([1e9, -5e8])
    torch.testing.assert_close(fp8.rounded(large, fp8.E4M3), large)


def test_without_a_limit_of_bandwidth_a_third_is_saved(monkeypatch):
    monkeypatch.setitem(fp8.RATES, "copy_gb_per_s", 1e15)
    rows, width, pairs = 1000, 512, 768
    plain = fp8.layer_seconds(rows, width, pairs, False)
    products = 6 * 2 * rows * width * pairs
    assert plain == pytest.approx(products / (fp8.RATES["bfloat16_tflops"] * 1e12))
    assert fp8.layer_seconds(rows, width, pairs, True) == pytest.approx(2 / 3 * plain)


def test_where_only_bytes_count_8_bits_cost_more(monkeypatch):
    for name in ("bfloat16_tflops", "fp8_tflops"):
        monkeypatch.setitem(fp8.RATES, name, 1e15)
    rows, width, pairs = 10**9, 1, 2  # parameters are few
    seconds = [fp8.layer_seconds(rows, width, pairs, each) for each in (False, True)]
    moved = [each * fp8.RATES["copy_gb_per_s"] for each in seconds]
    # Each product reads or writes tokens and scores once. Θ moves 12 bytes a score, 11 in 8 bits;
    # rounding moves 3 bytes a score, and 8 a token.
    assert moved[0] == pytest.approx(6 * 2 * (1 + 2) + 12 * 2, rel=1e-6)
    products = 2 * (1 + 2 * 2) + 2 * (2 + 2 * 1) + 2 * 2 * (1 + 2)
    assert moved[1] == pytest.approx(products + (11 + 3) * 2 + 8, rel=1e-6)


@pytest.mark.slow
def test_the_record_has_every_layer_and_the_block(tmp_path, capsys):
    out = tmp_path / "fp8.json"
    fp8.main(["--out", str(out)])
    record = json.loads(out.read_text())
    found = {(e["of"], e["computed"]): e for e in record["errors"]}
    assert len(found) == 3 * (2 + len(fp8.EMULATED)) + 2 * 2
    for (_, way), entry in found.items():
        low, high = (0.001, 0.02) if way == "bfloat16" else (0.01, 0.3)
        assert all(low < entry[part] < high for part in ("output", "x", "keys", "values"))
    for entry in record["savings"]:
        assert 0.5 * entry["bfloat16_ms"] < entry["fp8_ms"] < entry["bfloat16_ms"]
        assert entry["bfloat16_ms"] < entry["step_ms"]
    assert "block, backend fp8" in capsys.readouterr().out
