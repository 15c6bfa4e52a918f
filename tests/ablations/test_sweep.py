"""A sweep trains what is left, goes on after Ctrl-C, and chooses rates on held-out images."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import results
import sweep
import timm
import torch
from nested import QUESTIONS as NESTED
from nested import WHOLE
from theta import QUESTIONS as THETA

from tokenformer_vit import cli
from tokenformer_vit.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
# Stands in for a training: what it leaves behind, or how it ends. Its best rate is 2e-3.
TRAINER = """
import json, os, runpy, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[3])
assert sys.argv[2:5:2] == ["--work-dir", "--resume"]
with open(folder.parent / "starts.txt", "a") as file:
    file.write(folder.name + "\\n")
if os.environ.get("INTERRUPT") == folder.name:
    stopped = folder.with_suffix(".stopped")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(stopped.write_text("")))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
if os.environ.get("FAIL") == folder.name:
    sys.exit("error: the loss is nan")
lr = runpy.run_path(sys.argv[1])["optim_wrapper"]["optimizer"]["lr"]
figures = {"accuracy/top1": 80 - 1e3 * abs(lr - 2e-3), "flops": 7}
logs = folder / "20260101_000000" / "vis_data"
logs.mkdir(parents=True)
lines = [{"loss": 2.0, "step": 7}, {**figures, "step": 2}]
(logs / "scalars.json").write_text("\\n".join(map(json.dumps, lines)))
record = {"date": "2026-01-01", "hardware": "a CPU", "dtype": "float32", "epochs": 2}
record |= {"iterations": 14, "images_per_step": 8, "train_images": 50, "commit": "abc"}
record |= {"versions": {"torch": "TORCH"}, "resumed_at_iteration": 0, "seconds": 60.0}
record |= {"cpu": "x86", **figures}
(folder / "record.json").write_text(json.dumps(record))
"""
CONFIG = f"""
_base_ = "{ROOT}/configs/digits_demo.py"
model = dict(backbone=dict(depth=1))
param_scheduler = [dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True)]
train_cfg = dict(max_epochs=2)
"""
TRAIN = sweep.TRAIN
PAIR = ("--variants", "gelu_l2", "vit")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a sweep of trainings that take no time; return what was started, and all rows."""
    (tmp_path / "small.py").write_text(CONFIG)
    (tmp_path / "trainer.py").write_text(TRAINER.replace("TORCH", torch.__version__))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "TRAIN", ("trainer.py",))
    monkeypatch.setattr(sweep, "commit_of", lambda allow_dirty: "1234567")

    def run(*words, questions=THETA[:1]):
        starts, rows = Path("work", "starts.txt"), Path("work", "results.csv")
        starts.unlink(missing_ok=True)
        sweep.main(questions, ["--config", "small.py", "--work-dir", "work", *words])
        started = starts.read_text().split() if starts.exists() else []
        return started, results.read(rows) if rows.exists() else None

    return run


def test_seed_0_finds_the_best_rate_on_held_out_images(run):
    words = (*PAIR, "--lr", "1e-3", "2e-3", "4e-3", "--seeds", "2", "--jobs", "2")
    started, rows = run(*words)
    first = [f"{name}_seed0{lr}" for name in PAIR[1:] for lr in ("", "_lr0.002", "_lr0.004")]
    assert {*started[:6]} == {*first}
    assert {*started[6:]} == {f"{name}_seed{n}_lr0.002" for name in PAIR[1:] for n in (1, 2)}
    assert {*rows["selected_on"]} == {"held-out"}
    assert {*rows["commit"]} == {"1234567"}
    assert rows["top1"].max() == 80
    assert rows["parameters"].max() < 1.01 * rows["parameters"].min()
    for name, held in (("gelu_l2_seed0", True), ("gelu_l2_seed1_lr0.002", False)):
        text = Path("work", name, "config.py").read_text()
        assert ("'HeldOutImages'" in text) == held
    again, same = run(*words)
    assert not again
    assert same.equals(rows)
    Path("work", "results.csv").unlink()
    assert len(run(*words)[1]) == 10


def test_a_row_stands_for_a_lost_folder_of_the_same_config(run, capsys):
    words = ("--variants", "gelu_l2")
    run(*words)
    shutil.rmtree("work/gelu_l2_seed0")
    assert not run(*words)[0]
    shutil.rmtree("work/gelu_l2_seed0")
    with pytest.raises(SystemExit, match="2"):
        run(*words, "--batch-size", "9")
    assert "has gelu_l2_seed0 of another config: remove" in capsys.readouterr().err


def test_a_run_serves_other_lengths_and_questions(run):
    words = ("--variants", "gelu_l2", "--lr", "1e-3", "2e-3", "--lr-length", "2", "--seeds", "0")
    assert len(run(*words, "--cfg-options", "train_cfg.max_epochs=4")[0]) == 2
    for folder in ("work/gelu_l2_seed0", "work/gelu_l2_seed0_lr0.002"):
        shutil.rmtree(folder)
    started, rows = run(*words, "--cfg-options", "train_cfg.max_epochs=8")
    assert not started
    assert list(zip(rows["options"].str[-1], rows["top1"], strict=True)) == [
        *(("4", 79), ("4", 80), ("8", 79), ("8", 80)),
    ]
    words = ("--variants", "none", *words[2:], "--cfg-options", "train_cfg.max_epochs=8")
    started, rows = run(*words, questions=THETA[1:])
    assert not started
    assert list(rows["question"]) == ["softmax"] * 4 + ["layernorm"] * 2


@pytest.mark.slow
def test_trainings_find_the_probes(run, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", TRAIN)
    cli.main(["prepare-data", "--digits", "data/digits"])
    _, rows = run("--variants", WHOLE, "--lr", "1e-3", "2e-3", "4e-3", questions=NESTED)
    assert list(rows["examples"]) == [1294, 1294, 1294, 1437]
    assert rows.filter(regex="^(top1|flops|pruned_at_0.25)$").notna().all(axis=None)
    assert rows["flops"].max() == pytest.approx(rows["flops"].min() * 1437 / 1294, rel=0.1)
    (best,) = Path("work").glob(f"{WHOLE}_seed1*")
    model = timm.create_model(f"local-dir:{best / 'nested'}", pretrained=True)
    assert model.sizes == (0.25, 0.5, 0.75, 1.0)


def test_a_recorded_run_is_repeated_and_compared(run, capsys):
    words = ("--variants", "grown_50", "--seeds", "2")
    run(*words, questions=NESTED)
    run(*words, "--check", "grown_50", "1", questions=NESTED)
    assert "grown_50, seed 1: 79, and 79 on the same processor" in capsys.readouterr().out
    rows = Path("work", "results.csv")
    assert len(results.read(rows)) == 4
    rows.write_text(rows.read_text().replace("79.0,", "78.0,"))
    (again,) = Path("work").glob("check-1234567-*")
    shutil.rmtree(again)
    with pytest.raises(SystemExit, match=r"78, and 79 on the same processor .* more than 0 apart"):
        run(*words, "--check", "grown_50", "1", questions=NESTED)
    with pytest.raises(SystemExit, match="2"):
        run(*words, "--check", "grown_50", "9", questions=NESTED)
    assert "no run of grown_50 with seed 9" in capsys.readouterr().err


def test_a_failed_run_is_named_and_tried_again(run, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", "gelu_l2_seed0")
    with pytest.raises(SystemExit, match="failed: gelu_l2_seed0"):
        run(*PAIR)
    out = capsys.readouterr().out
    assert "gelu_l2_seed0: failed, see work/gelu_l2_seed0/output.log" in out
    assert "vit_seed0: top1 79" in out
    monkeypatch.delenv("FAIL")
    started, rows = run(*PAIR)
    assert started == ["gelu_l2_seed0"]
    assert list(rows["variant"]) == ["vit", "gelu_l2"]


def test_ctrl_c_stops_the_training_and_the_same_command_goes_on(run, monkeypatch, capsys):
    monkeypatch.setenv("INTERRUPT", "gelu_l2_seed0")
    with pytest.raises(SystemExit, match="130"):
        run(*PAIR)
    assert "the same command goes on" in capsys.readouterr().err
    assert Path("work", "gelu_l2_seed0.stopped").exists()
    monkeypatch.delenv("INTERRUPT")
    assert run(*PAIR)[0] == ["gelu_l2_seed0", "vit_seed0"]


def test_a_variant_starts_from_the_best_of_another(run):
    words = ("--variants", "grown_50", "--lr", "1e-3", "2e-3", "4e-3")
    started, rows = run(*words, questions=NESTED)
    assert started[:3] == ["alone_25_seed0", "alone_25_seed0_lr0.002", "alone_25_seed0_lr0.004"]
    assert started[6:] == ["alone_25_seed1_lr0.002", "grown_50_seed1_lr0.002"]
    text = Path("work", "grown_50_seed0", "config.py").read_text()
    assert "load_from = 'work/alone_25_seed0_lr0.002/model.safetensors'" in text
    assert list(rows["start"].iloc[-2:]) == ["", "alone_25"]


def test_printed_commands_can_be_run_elsewhere(run, capsys):
    words = ("--variants", "gelu_l2", "--print-commands")
    assert run(*words) == ([], None)
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.split()[:2] == ["env", f"PYTHONPATH={ROOT}/ablations"]
    subprocess.run([sys.executable, *shlex.split(printed)[3:]], check=True)
    assert list(run(*words)[1]["commit"]) == ["abc"]  # of the training


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "9"), "another training .now .*'batch_size': 9.*delete its folder"),
        (("--config", "lm_micro"), "softmax compares image classifiers: choose another --config"),
        (("--variants", "relu"), "no variant relu"),
        (("--cfg-options", "load_from=x.pth"), r"trains from scratch, but .* loads x\.pth"),
    ],
)
def test_mistakes_end_before_any_training(run, capsys, words, message):
    run("--variants", "gelu_l2")
    with pytest.raises(SystemExit, match="2"):
        run("--variants", "gelu_l2", *words)
    assert re.search(message, capsys.readouterr().err)


def test_changes_of_the_repository_are_refused_or_mark_the_rows(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=me", "-c", "user.email=me", "-C", str(tmp_path)]
    for name in ("results.csv", "sweep.py"):
        (tmp_path / "ablations").mkdir(exist_ok=True)
        (tmp_path / "ablations" / name).write_text("old")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "old"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    (tmp_path / "ablations" / "results.csv").write_text("a new row")
    assert len(sweep.commit_of(False)) == 7
    (tmp_path / "ablations" / "sweep.py").write_text("new")
    with pytest.raises(InputError, match=r"ablations/sweep\.py: commit"):
        sweep.commit_of(False)
    assert sweep.commit_of(True).endswith("-dirty")
