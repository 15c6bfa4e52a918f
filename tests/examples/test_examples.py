"""The examples run as a reader runs them, in one short epoch or, slowly, in full."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread():
    """Small models gain nothing from threads, which other tests keep busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(monkeypatch, capsys, name, *arguments):
    """Run an example and return what it prints."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def column(output, pattern):
    return [float(number.replace(",", "")) for number in re.findall(pattern, output)]


def check_growth(output):
    before, after, trained = column(output, r"([\d,]+) parameters")
    assert before < after == trained
    (change,) = column(output, r"change of an output: (\S+)")
    assert change < 1e-5
    return column(output, r"accuracy ([\d.]+)%")


def test_minimal_grows_without_a_change_of_outputs(monkeypatch, capsys):
    before, after, _ = check_growth(run(monkeypatch, capsys, "minimal.py", "--epochs", "1"))
    assert before == after


def test_appended_pairs_are_a_small_part(monkeypatch, capsys):
    output = run(monkeypatch, capsys, "append_pairs.py", "--epochs", "1")
    whole, probe, pairs = column(output, r"([\d,]+) trained")
    assert probe < pairs < whole / 20


def test_growth_step_measures_no_jump_of_zero_keys(monkeypatch):
    spec = importlib.util.spec_from_file_location("growth_step", EXAMPLES / "growth_step.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "EPOCHS", 6)
    monkeypatch.setattr(example, "WARMUP", 1)
    train, val = (tuple(tensor[:100] for tensor in data) for data in example.digits())
    run = example.run(0, train, val)
    assert run["before"]["loss"][-1] != run["before"]["loss"][0]
    assert run["zero_key"]["largest_change_of_logits"] == 0
    assert run["zero_key"]["loss"][0] == run["none"]["loss"][0]
    assert run["random"]["largest_change_of_logits"] > 0.1
    assert run["zero_key"]["loss"][-1] != run["none"]["loss"][-1]


def test_growth_step_draws_its_record(monkeypatch, capsys, tmp_path):
    record = EXAMPLES.parent / "tokenformer_vit/growth/results/growth_step.json"
    copy = tmp_path / "record.json"
    copy.write_bytes(record.read_bytes())
    run(monkeypatch, capsys, "growth_step.py", "--draw", str(copy))
    with (
        Image.open(tmp_path / "record.png") as chart,
        Image.open(record.with_suffix(".png")) as committed,
    ):
        assert chart.size == committed.size


@pytest.mark.slow
def test_minimal_learns(monkeypatch, capsys):
    before, after, trained = check_growth(run(monkeypatch, capsys, "minimal.py"))
    assert before == after > 90
    assert trained > 95


@pytest.mark.slow
def test_appended_pairs_learn_more_than_a_linear_probe(monkeypatch, capsys):
    output = run(monkeypatch, capsys, "append_pairs.py")
    whole, probe, pairs = column(output, r"accuracy ([\d.]+)%")
    assert whole > 95
    assert pairs > probe + 10
    assert pairs > 90
