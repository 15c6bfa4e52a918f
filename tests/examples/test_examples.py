"""The examples run as a reader runs them, in one short epoch or, slowly, in full."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
