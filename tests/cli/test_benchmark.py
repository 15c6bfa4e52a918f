"""The benchmark records what it measures, and needs torch and timm alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tokenformer_vit.benchmarking import benchmark as measuring
from tokenformer_vit.cli import benchmark
from tokenformer_vit.errors import InputError

TINY = ["--model", "tokenformer_tiny", "--baseline", "vit_tiny_patch16_224"]
TINY += ["--depth", "1", "--img-size", "32", "--device", "cpu"]
# What a machine that only measures may lack.
ABSENT = ("matplotlib", "mmcv", "mmengine", "mmpretrain", "rich", "transformers")


def check_arithmetic(record):
    """Compute the figures of a record again, with NumPy, from the raw seconds."""
    unit = record["unit"]
    for group in record["groups"]:
        rows = {row["variant"]: row for row in group["variants"]}
        against = rows.get(f"baseline {'eager' if group['mode'] == 'decode' else 'compiled'}")
        for row in rows.values():
            rate = group["items"] / np.median(row["seconds"])
            assert row[f"{unit}s_per_s"] == pytest.approx(rate, rel=1e-4)
            if against:
                ratios = np.divide(against["seconds"], row["seconds"])
                found = [row[f"ratio_p{p}"] for p in (20, 50, 80)]
                assert found == pytest.approx(np.percentile(ratios, (20, 50, 80)), rel=1e-4)


@pytest.mark.slow
def test_where_only_torch_and_timm_are_installed(tmp_path):
    path = tmp_path / "deep" / "speed.json"
    code = f"""
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent())
from tokenformer_vit.cli import benchmark
benchmark.main(sys.argv[1:])
"""
    words = ["--eager", "--precisions", "autocast", "--batch-sizes", "2", "--rounds", "3", "--out"]
    words = [sys.executable, "-c", code, *TINY, *words, path]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].endswith(f"tokenformer-vit benchmark --draw {path}")
    record = json.loads(path.read_text())
    assert [group["mode"] for group in record["groups"]] == ["train", "infer"]
    check_arithmetic(record)


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement by random seconds; a batch of 13 is interrupted."""

    def measure_group(subject, device, group, variants, rounds):
        if group.batch_size == 13:
            raise KeyboardInterrupt
        rows = [{"variant": str(each), **each._asdict(), "peak_mib": 9.0} for each in variants]
        for row in rows:
            row["seconds"] = (0.1 + torch.rand(rounds)).tolist()
            row[f"saved_mb_per_{subject.unit}"] = 1.0 if group.mode == "train" else None
        common = {"dtype": group.precision, "matmul_tflops": 0.2, "items": subject.items(group)}
        return {**group._asdict(), **common, "variants": rows}

    monkeypatch.setattr(measuring, "measure_group", measure_group)


def test_record_of_every_finished_group_and_chart(measured, tmp_path, capsys):
    path = tmp_path / "speed.json"
    words = [*TINY, "--out", str(path), "--rounds", "4", "--precisions", "float32"]
    words += ["--modes", "train", "--batch-sizes", "4"]
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*words, "13"])
    record = json.loads(path.read_text())
    assert (record["n"], record["depth"], record["device"]) == (4, 1, "cpu")
    (group,) = record["groups"]
    assert (group["precision"], group["batch_size"]) == ("float32", 4)
    assert {row["implementation"] for row in group["variants"]} == {"baseline", "released", "auto"}
    check_arithmetic(record)
    benchmark.main(words)
    assert capsys.readouterr().out.endswith(f"tokenformer-vit benchmark --draw {path}\n")
    benchmark.main(["--draw", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_language_models(measured, tmp_path, capsys):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    path = tmp_path / "speed.json"
    words = "--lm tiny --depth 2 --num-tokens 96 --batch-sizes 3 --positions rotary --rounds 4"
    benchmark.main([*words.split(), "--precisions", "bfloat16", "--out", str(path)])
    record = json.loads(path.read_text())
    items = {group["mode"]: group["items"] for group in record["groups"]}
    assert items == {"train": 3 * 96, "prefill": 3 * 96, "decode": 3 * 32}
    train, _, decode = ([row["variant"] for row in g["variants"]] for g in record["groups"])
    assert decode == train[::2]  # it is never compiled
    assert (record["num_tokens"], record["depth"], record["config"]["depth"]) == (96, 2, 2)
    assert record["parameters"]["baseline"] == 6_967_296
    check_arithmetic(record)
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tokenformer_bsae"], "no model 'tokenformer_bsae' .*'tokenformer_base'"),
        (["--modes", "decode"], "decode: choose from train, infer"),
        (["--lm", "150m", "--num-tokens", "4096"], "4096: 150m takes at most 2048"),
    ],
)
def test_bad_input(words, message, measured, tmp_path):
    with pytest.raises(InputError, match=message):
        benchmark.main([*TINY, "--out", str(tmp_path / "speed.json"), *words])
    assert not list(tmp_path.iterdir())


def test_compilation_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # eager figures would count as compiled ones
    with pytest.raises(InputError, match=r"TORCHDYNAMO_DISABLE=1 .* give --eager"):
        benchmark.main(TINY)


def test_profile(capsys):
    benchmark.main([*TINY, "--profile", "--eager", "--batch-sizes", "1"])
    printed = capsys.readouterr().out
    assert printed.count("Self CPU time total") == 3
    assert printed.count("aten::addmm ") >= 1
