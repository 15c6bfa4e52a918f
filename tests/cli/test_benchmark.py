"""The benchmark records what it measures, and needs torch and timm alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenformer_vit.benchmarking import benchmark as measuring
from tokenformer_vit.cli import benchmark
from tokenformer_vit.errors import InputError

TINY = ["--model", "tokenformer_tiny", "--baseline", "vit_tiny_patch16_224"]
TINY += ["--depth", "1", "--img-size", "32", "--device", "cpu"]
# What a machine that only measures may lack.
ABSENT = ("matplotlib", "mmcv", "mmengine", "mmpretrain", "rich", "transformers")


def check_arithmetic(record, unit="image"):
    """Compute the figures of a record again, with NumPy, from the raw seconds."""
    for group in record["groups"]:
        items, rows = group["items"], {row["variant"]: row for row in group["variants"]}
        against = "baseline eager" if group["mode"] == "decode" else "baseline compiled"
        for row in rows.values():
            assert len(row["seconds"]) == record["n"]
            points = np.percentile(row["seconds"], (20, 50, 80))
            assert [row[f"seconds_p{p}"] for p in (20, 50, 80)] == pytest.approx(points, rel=1e-4)
            assert row[f"{unit}s_per_s"] == pytest.approx(items / points[1], rel=1e-4)
            ours = "baseline" if row["implementation"] == "baseline" else "model"
            rate = record[f"flops_per_{unit}"][ours][group["mode"]] * items / points[1]
            assert row["mfu"] == pytest.approx(rate / group["matmul_tflops"] / 1e12, rel=1e-4)
            assert ("ratio_p50" in row) == (against in rows)
            if against in rows:
                ratios = np.divide(rows[against]["seconds"], row["seconds"])
                points = np.percentile(ratios, (20, 50, 80))
                assert [row[f"ratio_p{p}"] for p in (20, 50, 80)] == pytest.approx(points, rel=1e-4)


@pytest.mark.slow
def test_where_only_torch_and_timm_are_installed(tmp_path):
    path = tmp_path / "deep" / "speed.json"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); "
        "from tokenformer_vit.cli import benchmark; benchmark.main(sys.argv[1:])"
    )
    words = ["--eager", "--precisions", "autocast", "--batch-sizes", "2", "--rounds", "3"]
    run = subprocess.run(
        [sys.executable, "-c", code, *TINY, *words, "--out", path], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == (
        f"Done. Record: {path}; no chart: pip install matplotlib, then "
        f"tokenformer-vit benchmark --draw {path}"
    )
    record = json.loads(path.read_text())
    assert "--precisions autocast" in record["command"]
    assert record["hardware"].startswith(f"{os.cpu_count()} CPU cores")
    assert record["versions"].keys() >= {"python", "torch", "timm"}
    assert [group["mode"] for group in record["groups"]] == ["train", "infer"]
    for group in record["groups"]:
        assert (group["precision"], group["dtype"]) == ("autocast", "bfloat16 autocast")
        for row in group["variants"]:
            assert (row["saved_mb_per_image"] is None) == (group["mode"] == "infer")
            assert f"{row['images_per_s']:.2f}" in run.stdout
    saved = [row["saved_mb_per_image"] for row in record["groups"][0]["variants"]]
    _, released, reference, auto = saved
    assert auto < released < reference
    check_arithmetic(record)


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement by random seconds; return the measured groups."""
    groups = []

    def measure_group(subject, device, group, variants, rounds):
        groups.append(group)
        if group.batch_size == 13:
            raise KeyboardInterrupt
        saved = 1.0 if group.mode == "train" else None
        rows = [{"variant": str(each), **each._asdict()} for each in variants]
        for row in rows:
            row |= {"seconds": (0.1 + torch.rand(rounds)).tolist(), "peak_mib": 9.0}
            row[f"saved_mb_per_{subject.unit}"] = saved
        common = {"dtype": group.precision, "matmul_tflops": 0.2, "items": subject.items(group)}
        return {**group._asdict(), **common, "variants": rows}

    monkeypatch.setattr(measuring, "measure_group", measure_group)
    return groups


def run(path, *arguments):
    benchmark.main([*TINY, "--out", str(path), *map(str, arguments)])
    return json.loads(path.read_text())


def test_the_record_has_every_finished_group(measured, tmp_path):
    path = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, "--precisions", "float32", "--modes", "train", "--batch-sizes", 1, 13)
    record = json.loads(path.read_text())
    assert [group["batch_size"] for group in record["groups"]] == [1]
    check_arithmetic(record)


def test_record_and_chart(measured, tmp_path, capsys):
    path = tmp_path / "speed.json"
    record = run(path, "--rounds", 4, "--backends", "auto", "--precisions", "float32")
    assert (record["n"], record["depth"], record["device"]) == (4, 1, "cpu")
    assert {(g["precision"], g["batch_size"]) for g in record["groups"]} == {("float32", 4)}
    names = [row["variant"] for row in record["groups"][0]["variants"]]
    assert names == [
        f"{name} {how}"
        for name in ("baseline", "released", "auto")
        for how in ("eager", "compiled")
    ]
    check_arithmetic(record)
    chart = path.with_suffix(".png")
    assert f"Record: {path}; chart: {chart}" in capsys.readouterr().out
    chart.unlink()
    benchmark.main(["--draw", str(path)])
    assert capsys.readouterr().out == f"chart: {chart}\n"
    with Image.open(chart) as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 10


@pytest.mark.parametrize("record", ["tokenformer_base_matched_cuda", "lm_tiny_256_cpu"])
def test_earlier_records_can_be_drawn(record, tmp_path):
    results = Path(measuring.__file__).with_name("results")
    (tmp_path / "a.json").write_bytes((results / f"speed_{record}.json").read_bytes())
    benchmark.main(["--draw", str(tmp_path / "a.json")])
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(("positions", "baseline"), [("learned", ""), ("rotary", ", rotary")])
def test_language_models(measured, tmp_path, capsys, positions, baseline):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    path = tmp_path / "speed.json"
    words = ["--lm", "tiny", "--depth", "2", "--num-tokens", "96", "--batch-sizes", "3"]
    words += ["--precisions", "bfloat16", "--rounds", "4", "--device", "cpu", "--out", str(path)]
    benchmark.main([*words, "--positions", positions])
    record = json.loads(path.read_text())
    modes = {group["mode"]: group for group in record["groups"]}
    assert list(modes) == ["train", "prefill", "decode"]
    assert [group["items"] for group in modes.values()] == [3 * 96, 3 * 96, 3 * 32]
    names = [row["variant"] for row in modes["train"]["variants"]]
    assert [row["variant"] for row in modes["decode"]["variants"]] == names[::2]
    assert (record["unit"], record["model"]) == ("token", "tiny")
    assert record["baseline"] == f"transformer{baseline}"
    assert (record["num_tokens"], record["depth"], record["config"]["depth"]) == (96, 2, 2)
    weights = 50_304 * 128 + 2 * (4 * 128**2 + 2 * 128 * 6 * 128)  # embedding, two blocks
    weights += 2 * ((3 + 1 + 6 + 1) * 128 + 2 * 2 * 128) + 2 * 128  # biases and norms
    others = record["parameters"]["baseline"] - weights
    assert others == (256 * 128 if positions == "learned" else 0)
    assert "transformers" in record["versions"]
    check_arithmetic(record, "token")
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tokenformer_bsae"], "no model 'tokenformer_bsae' to .* tokenformer_base"),
        (["--model", "vit_tiny_patch16_224"], "did you mean tokenformer"),
        (["--baseline", "vit_bse_patch16_224"], "no model 'vit_bse_patch16_224' to measure"),
        (["--baseline", "resnet18", "--modes", "decode"], "decode: choose from train, infer"),
        (["--lm", "150m", "--num-tokens", "4096"], "4096: 150m takes at most 2048"),
        (["--lm", "150m", "--modes", "infer"], "--modes infer: choose from train, prefill, dec"),
    ],
)
def test_bad_input(words, message, measured, tmp_path):
    with pytest.raises(InputError, match=message):
        benchmark.main([*TINY, "--out", str(tmp_path / "speed.json"), *words])
    assert not list(tmp_path.iterdir())


def test_compilation_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(InputError, match=r"TORCHDYNAMO_DISABLE=1 .* give --eager"):
        benchmark.main(TINY)


def test_profile(capsys):
    benchmark.main([*TINY, "--profile", "--eager", "--backends", "auto", "--batch-sizes", "1"])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) eager$", printed, re.MULTILINE) == ["baseline", "released", "auto"]
    assert len(re.findall(r"^ +aten::(?:add)?mm ", printed, re.MULTILINE)) >= 3
    assert printed.count("Self CPU time total") == 3
