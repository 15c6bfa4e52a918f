"""Stages run as processes, within limits of time, and keep what they gave."""

import json
import os
import runpy
import shlex
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tokenformer_vit.benchmarking import run_stages
from tokenformer_vit.benchmarking.run_stages import Stages
from tokenformer_vit.benchmarking.stages import STAGES, Stage
from tokenformer_vit.cli import benchmark, prepare_data
from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments.sweep import parse

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"hardware": "a device", "commit": "abc", "versions": {"python": "3"}}
ADDS = "import sys, pathlib; path = pathlib.Path(sys.argv[1]); path.open('a').write('x')\n"
SLEEPS = """
import signal, sys, time, pathlib
path = pathlib.Path(sys.argv[1])
try:
    path.write_text("half")
    time.sleep(60)
except KeyboardInterrupt:
    path.write_text("half, and tidy")
    sys.exit(130)
"""


@pytest.fixture
def script(tmp_path):
    """Write a script and return the command that runs it with a file of its own, and this file."""

    def write(name, text, *more):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        words = [str(path), str(tmp_path / name), *more]
        return shlex.join(words), tmp_path / name

    return write


@pytest.fixture
def run(tmp_path):
    """Run stages for a device; return whether none has failed, and how they ended."""

    def start(*stages, minutes=None, retry_failed=False, about=ABOUT):
        folder = tmp_path / "out" / "device"
        words = {"records": str(folder / "records"), "work": str(tmp_path)}
        fine = Stages(stages, folder, words, about).run(minutes, retry_failed)
        ended = json.loads((folder / "stages.json").read_text())["stages"]
        return fine, {name: entry["status"] for name, entry in ended.items()}

    return start


def test_what_is_recorded_is_not_run_again(run, script, tmp_path, capsys):
    command, file = script("adds", f"{ADDS}print('first'); print('Done.')")
    made = tmp_path / "out/device/records/configs/results/made.json"
    stage = Stage("one", 1, command, takes=str(file), makes=str(made))
    for _ in range(2):
        assert run(stage) == (True, {"one": "done"})
    assert made.read_text() == file.read_text() == "x"
    assert "one: recorded already" in capsys.readouterr().out
    made.unlink()
    run(stage)
    assert made.read_text() == "xx"
    log = (tmp_path / "out/device/logs/one.log").read_text()
    assert log.split() == ["first", "Done."]
    with zipfile.ZipFile(tmp_path / "out/device.zip") as archive:
        assert archive.read("records/configs/results/made.json") == b"xx"
        assert "| one | done | 0.0 | Done. |" in archive.read("summary.md").decode()
    with pytest.raises(InputError, match=r"has results of a device.*another --out"):
        run(stage, about={**ABOUT, "hardware": "another device"})


def test_a_failed_stage_does_not_stop_the_others(run, script, capsys):
    failing, counted = script("fails", f"{ADDS}print('error: no | good'); sys.exit(1)")
    adding, file = script("adds", ADDS)
    stages = Stage("bad", 1, failing), Stage("good", 1, adding)
    assert run(*stages) == (False, {"bad": "failed", "good": "done"})
    assert file.exists()
    assert "| bad | failed | 0.0 | no / good |" in capsys.readouterr().out
    run(*stages)
    assert counted.read_text() == "x"
    run(*stages, retry_failed=True)
    assert counted.read_text() == "xx"
    assert file.read_text() == "x"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot interrupt a process")
def test_a_stage_that_runs_out_of_time_is_interrupted(run, script, capsys):
    sleeping, file = script("sleeps", SLEEPS)
    adding, _ = script("adds", ADDS)
    stages = Stage("long", 0.02, sleeping, least=0.01), Stage("next", 1, adding)
    assert run(*stages) == (True, {"long": "out of time", "next": "done"})
    assert file.read_text() == "half, and tidy"
    assert "stopped after 0.0 minutes; what it measured is kept" in capsys.readouterr().out
    file.unlink()
    run(*stages)  # it is not recorded, and starts again
    assert file.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot interrupt a process")
def test_the_archive_has_what_an_interrupted_stage_measured(tmp_path):
    out = tmp_path / "out/device"
    measuring = tmp_path / "measures.py"
    measuring.write_text(
        "import os, pathlib, signal, sys, time\n"
        "pathlib.Path(sys.argv[1], 'part.json').write_text('{}')\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    stage = Stage("half", 1, shlex.join([str(measuring), str(out / "records")]), least=0.1)
    with pytest.raises(KeyboardInterrupt):
        Stages([stage], out, {"records": str(out / "records")}, ABOUT).run(None, False)
    assert json.loads((out / "stages.json").read_text())["stages"] == {}
    with zipfile.ZipFile(tmp_path / "out/device.zip") as archive:
        assert {*archive.namelist()} == {
            *("stages.json", "summary.md", "logs/half.log", "records/part.json")
        }


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups")
def test_a_failed_stage_leaves_no_processes(run, script):
    leaving, file = script(
        "leaves",
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "sys.exit('error: no good')\n",
    )
    assert run(Stage("bad", 1, leaving)) == (False, {"bad": "failed"})
    for _ in range(100):
        try:
            os.kill(int(file.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the process of a failed stage still runs")


def test_a_stage_without_its_result_has_failed(run, script, tmp_path):
    adding, _ = script("adds", ADDS)
    absent = str(tmp_path / "absent.json")
    without = Stage("without", 1, adding, takes=absent, makes=str(tmp_path / "made.json"))
    assert run(without, Stage("next", 1, adding)) == (False, {"without": "failed", "next": "done"})
    state = json.loads((tmp_path / "out/device/stages.json").read_text())
    assert state["stages"]["without"]["line"] == f"it ended without {absent}"


def test_a_stage_starts_only_if_it_can_finish(run, script, capsys):
    adding, file = script("adds", ADDS)
    short, other = script("short", ADDS)
    # Two thirds of a minute of the two are left for a stage that does not end by itself.
    stages = (
        Stage("long", 1.4, adding),
        Stage("parts", 9, adding, least=1.4),
        Stage("short", 1, short),
    )
    assert run(*stages, minutes=2) == (True, {"short": "done"})
    assert (file.exists(), other.exists()) == (False, True)
    assert "| long | not run | | skipped: it needs 1.4 minutes, 1.3 are left" in (
        capsys.readouterr().out
    )
    run(Stage("parts", 9, adding, least=1.2), minutes=2)
    assert file.exists()


def test_stages_without_what_they_need_and_with_what_they_make(run, script, tmp_path, capsys):
    adding, file = script("adds", ADDS)
    needing = Stage("needing", 1, adding, needs="{work}/nowhere")
    making = Stage("making", 1, adding, makes="{work}")
    of_a_clone = Stage("of_a_clone", 1, "ablations/nowhere.py")
    assert run(needing, making, of_a_clone) == (True, {})
    out = capsys.readouterr().out
    assert "of_a_clone: skipped: there is no ablations" in out
    assert f"needing: skipped: there is no {tmp_path / 'nowhere'}" in out
    assert f"making: {tmp_path} is there" in out
    assert not file.exists()


@pytest.mark.parametrize("kind", STAGES)
def test_commands_of_stages_are_commands_of_ours(kind, monkeypatch):
    if kind == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1 8GB")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.syspath_prepend(ROOT / "ablations")
    names = ("device", "records", "work", "data", "images")
    words = {**{name: f"some/{name}" for name in names}, "device": "x1"}
    stages = STAGES[kind]
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        program, *arguments = stage.arguments(words)
        assert (stage.least or 0) <= stage.minutes
        if program == "benchmark" and "--loop" not in arguments:
            args = benchmark.parse(arguments)
            assert args.out.parent == Path("some/records/tokenformer_vit/benchmarking/results")
        elif program == "prepare-data":
            assert prepare_data._parse(arguments).target.parts[:2] == ("some", "work")
        elif program.endswith(".py"):
            question = runpy.run_path(str(ROOT / program))["QUESTION"]
            assert parse(question, arguments).out.startswith("some/records/ablations/results/")
        else:
            assert program in ("benchmark", "train", "pytest")
        if program == "train":  # a stage that was stopped goes on
            assert "--resume" in arguments


@pytest.mark.parametrize("there", [True, False])
def test_tests_run_in_parallel_where_pytest_can(there, monkeypatch):
    monkeypatch.setattr(run_stages, "find_spec", lambda name: object() if there else None)
    assert run_stages._program("pytest") == ["-m", "pytest", *(["-n", "4"] if there else [])]


def test_the_page_lists_the_stages_of_a_gpu():
    page = (ROOT / "tokenformer_vit/benchmarking/README.md").read_text(encoding="utf-8")
    table = page.partition("| Stage |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    listed = {
        name.strip("`"): float(minutes.split()[0])
        for names, _, minutes in rows
        for name in names.split(", ")
    }
    assert listed == {stage.name: stage.minutes for stage in STAGES["cuda"]}
