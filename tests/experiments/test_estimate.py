"""A dry run says what a sweep costs, and trains nothing."""

import json
import re

import pytest
import torch
from growth import QUESTION as GROWTH
from softmax import QUESTION as SOFTMAX

from tokenformer_vit.experiments import estimate
from tokenformer_vit.experiments.plan import plan
from tokenformer_vit.experiments.sweep import parse, sweep
from tokenformer_vit.records import environment

IMAGES = 1437  # digits to train on
RECORD = {
    "hardware": environment()["hardware"],
    "dtype": "float32",
    "resumed_at_iteration": 0,
    "seconds": 10.0,
}


@pytest.fixture
def words(tmp_path, config, digits, monkeypatch) -> list[str]:
    """The options that every sweep of these tests has."""
    monkeypatch.chdir(tmp_path)
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work"}
    options["out"] = tmp_path / "results" / "own_small"
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def dry(question, words, capsys, *more):
    sweep(question, [*words, "--dry-run", *more])
    return capsys.readouterr().out


def number(text, pattern):
    return float(re.search(pattern, text)[1].replace(",", ""))


def write(tmp_path, sweep_name, name, **record):
    path = tmp_path / "results" / f"{sweep_name}_small" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**RECORD, **record}))


def test_later_seeds_count_at_one_rate(words, tmp_path, capsys):
    rates = ["--variants", "gelu_l1", "vit", "--lr", "1e-3", "2e-3", "4e-3", "--lr-seeds", "1"]
    text = dry(SOFTMAX, words, capsys, *rates, "--seeds", "3")
    runs = 2 * (3 + 2)
    assert text.startswith(f"{runs} of {runs} runs are left: {runs * 2 * IMAGES:,} images, ")
    assert "measured in 3 steps" in text
    assert number(text, r"about ([\d.e-]+) hours with --jobs 1") > 0
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "results").exists()


def test_seconds_come_from_records_of_the_config(words, tmp_path, capsys):
    (run,) = plan(SOFTMAX, parse(SOFTMAX, [*words, "--variants", "gelu_l1"]))
    size, flops = run.about["parameters"], run.field.flops(run.whole) * 2 * IMAGES
    epochs = {"epochs": 2, "train_images": IMAGES}
    write(tmp_path, "a", "same_size", parameters=size, **epochs)
    write(tmp_path, "a", "other_size", parameters=2 * size, **epochs)
    write(tmp_path, "b", "resumed", parameters=size, **epochs, resumed_at_iteration=5)
    write(tmp_path, "b", "elsewhere", parameters=size, **epochs, hardware="a faster one")
    write(tmp_path, "b", "other_cpu", parameters=size, **epochs, cpu="a faster one")
    write(tmp_path, "b", "bfloat16", parameters=size, **epochs, dtype="bfloat16 autocast")
    write(tmp_path, "b", "failed", parameters=size, resumed_at_iteration=None)
    text = dry(SOFTMAX, words, capsys, "--variants", "gelu_l1", "--jobs", "2")
    assert "as 1 records of this config on this hardware" in text
    assert number(text, r"at ([\d,]+) images/s") == pytest.approx(2 * IMAGES / 10, abs=1)
    hours = number(text, r"about ([\d.e-]+) hours with --jobs 2")
    assert hours == pytest.approx(10 / 3600 / 2, rel=0.05)
    for index in range(2):  # of any size, where FLOPs were counted
        write(tmp_path, "b", f"counted{index}", parameters=7, flops=4 * flops)
    text = dry(SOFTMAX, words, capsys, "--variants", "gelu_l1")
    assert "as 3 records" in text
    assert number(text, r"at ([\d,]+) images/s") == pytest.approx(8 * IMAGES / 10, abs=1)


def test_growth_is_counted(words):
    options = ["--cfg-options", "train_cfg.max_epochs=12"]
    names = ("small", "medium", "large", "zero_key", "net2net")
    planned = plan(GROWTH, parse(GROWTH, [*words, *options, "--variants", *names]))
    cost = {run.about["variant"]: estimate._cost(run, IMAGES, 1) for run in planned}
    assert {seen for seen, _ in cost.values()} == {12 * IMAGES}
    thirds = sum(cost[name][1] for name in ("small", "medium", "large")) / 3
    assert cost["zero_key"][1] == pytest.approx(thirds, rel=1e-9)
    large = planned[names.index("large")]
    assert cost["large"][1] == large.field.flops(large.whole) * 12 * IMAGES
    assert cost["zero_key"][1] < cost["net2net"][1] < cost["large"][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is fast in bfloat16")
@pytest.mark.parametrize("speed", [0.3, 3.0])
def test_records_do_not_count_where_bfloat16_is_slow(speed, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "bfloat16_speed", lambda: speed)
    chosen = [*words, "--variants", "gelu_l1", "--amp"]
    (run,) = plan(SOFTMAX, parse(SOFTMAX, chosen))
    record = {"parameters": run.about["parameters"], "epochs": 2, "train_images": IMAGES}
    write(tmp_path, "a", "same_size", **record, dtype="bfloat16 autocast")
    text = dry(SOFTMAX, chosen, capsys)
    assert ("as 1 records of this config" in text) == (speed > 1)
    assert ("this CPU is slow in bfloat16" in text) == (speed < 1)
