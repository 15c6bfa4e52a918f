"""A sweep trains what is left, goes on after Ctrl-C, and chooses rates on held-out images."""

import runpy
import shutil
from pathlib import Path

import numpy as np
import parts
import pytest
import results
import sweep
import torch
from PIL import Image

from tokenformer_vit import cli

from ..samples import CLASSES, write_images

ROOT = Path(__file__).resolve().parents[2]
# Stands in for a training: what it leaves behind, or how it ends. Its best rate is 2e-3.
TRAINER = """
import json, os, runpy, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[3])
assert sys.argv[2:5:2] == ["--work-dir", "--resume"]
variant, seed, digest = folder.name.rsplit("_", 2)
config = runpy.run_path(sys.argv[1])
lr = config["optim_wrapper"]["optimizer"]["lr"]
with open(folder.parent / "starts.txt", "a") as file:
    file.write(f"{variant} {seed[4:]} {lr:g}\\n")
if os.environ.get("INTERRUPT") == variant:
    stopped = folder.parent / "stopped"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(stopped.write_text("")))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
if os.environ.get("FAIL", "").startswith(variant):
    sys.exit(os.environ["FAIL"])
record = {"date": "2026-01-01", "hardware": "a CPU", "dtype": "float32", "epochs": 2}
record |= {"iterations": 14, "images_per_step": 8, "train_images": 50, "commit": "abc"}
record |= {"versions": {"torch": "TORCH"}, "resumed_at_iteration": 0, "seconds": 60.0}
record |= {"cpu": "x86", "accuracy/top1": 80 - 1e3 * abs(lr - 2e-3), "flops": 7, "parameters": 9}
if config["model"]["type"] == "NestedClassifier":
    record["accuracy/top1_at_0.25"] = 70
(folder / "record.json").write_text(json.dumps(record))
"""
CONFIG = f"""
_base_ = "{ROOT}/configs/digits_demo.py"
model = dict(backbone=dict(depth=1))
param_scheduler = [dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True)]
train_cfg = dict(max_epochs=2)
"""
PAIR = ("softmax", "--variants", "gelu_l2", "vit")
TRAIN = sweep.TRAIN


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a sweep of trainings that take no time; return what was started, and all rows."""
    (tmp_path / "small.py").write_text(CONFIG)
    (tmp_path / "trainer.py").write_text(TRAINER.replace("TORCH", torch.__version__))
    for part in ("train", "val"):
        (tmp_path / "data/digits" / part / "0").mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "data/digits" / part / "0/0.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "TRAIN", ("trainer.py",))

    def run(*words):
        starts, rows = Path("work", "starts.txt"), Path("work", "results.csv")
        starts.unlink(missing_ok=True)
        cli.run(sweep.main, ["--config", "small.py", "--work-dir", "work", "--name", "one", *words])
        started = starts.read_text().splitlines() if starts.exists() else []
        return started, results.read(rows)

    return run


def test_seed_0_finds_the_best_rate_on_held_out_images(run, capsys):
    words = (*PAIR, "--lr", "1e-3", "2e-3", "4e-3", "--seeds", "2")
    started, rows = run(*words)
    tried = {f"{name} 0 {lr}" for name in PAIR[2:] for lr in (0.001, 0.002, 0.004)}
    assert {*started[:6]} == tried
    assert {*started[6:]} == {f"{name} {seed} 0.002" for name in PAIR[2:] for seed in (1, 2)}
    assert {*rows["selected_on"]} == {"held-out"}
    assert "| GELU + L2 |" in capsys.readouterr().out
    for folder in Path("work").glob("*_seed*"):
        text = (folder / "config.py").read_text()
        assert ("'HeldOutImages'" in text) == ("_seed0_" in folder.name)
    again, same = run(*words)
    assert not again
    assert same.equals(rows)
    Path("work", "results.csv").unlink()
    assert len(run(*words)[1]) == 10


def test_rates_are_tried_on_a_shorter_form_of_the_question(run):
    words = ("--cfg-options", "train_cfg.max_epochs=4", "--lr", "1e-3", "2e-3", "--lr-length", "2")
    run("one_step", "--variants", "zero_key_50", *words)
    for path in Path("work").glob("*_seed*/config.py"):
        config, epochs = runpy.run_path(str(path)), 2 if "_seed0_" in str(path) else 4
        growth = next(each for each in config["custom_hooks"] if each["type"] == "GrowthHook")
        assert config["train_cfg"]["max_epochs"] == epochs
        assert growth["schedule"][0]["epoch"] == epochs // 2
        assert config["param_scheduler"][1]["begin"] == 0.85 * epochs


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_share_is_one_of_the_images_that_are_not_held_out(tmp_path, share):
    write_images(tmp_path, (8, 8), dict.fromkeys(CLASSES, 20), np.random.default_rng(0))
    load = [{"type": "LoadImage"}, {"type": "PackLabels"}]
    images = {"type": "ImagesInMemory", "data_root": str(tmp_path), "pipeline": load}
    data = [parts.HeldOutImages({**images, "share": share}, held_out) for held_out in (True, False)]
    assert [len(each) for each in data] == [6, round(54 * share)]
    paths = [{each.get_data_info(i)["img_path"] for i in range(len(each))} for each in data]
    assert not paths[0] & paths[1]


def test_a_row_stands_for_a_lost_folder_and_other_configs_do_not_mix(run, capsys):
    run(*PAIR[:3])
    shutil.rmtree(next(Path("work").glob("gelu_l2_seed0_*")))
    assert not run(*PAIR[:3])[0]
    with pytest.raises(SystemExit, match="2"):
        run(*PAIR[:3], "--batch-size", "9")
    assert "has gelu_l2, seed 0, of another config: give" in capsys.readouterr().err
    assert len(run(*PAIR[:3], "--batch-size", "9", "--name", "two")[1]) == 2


def test_sizes_of_a_nested_model_are_rows(run):
    _, rows = run("nested", "--variants", "sandwich", "alone_25")
    row = rows.set_index("variant").loc["sandwich_25"]
    assert (row["top1"], row["family"], row["compare"]) == (70, "sandwich", "alone_25")


def test_the_parameters_of_a_row_are_also_those_with_appended_pairs(run):
    _, rows = run("adapters", "--variants", "head", "linear")
    assert rows["grown_to"].fillna(0).to_list() == [0, 9]


@pytest.mark.slow
def test_trainings_find_what_their_configs_import(run, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", TRAIN)
    shutil.rmtree("data/digits")
    cli.main(["prepare-data", "--digits", "data/digits"])
    _, rows = run("nested", "--variants", "sandwich", "vit_nested", "--lr", "1e-3", "4e-3")
    assert list(rows["examples"].unique()) == [1294, 1437]
    flops = rows[rows["variant"] == "sandwich"]["flops"]
    assert flops.max() == pytest.approx(flops.min() * 1437 / 1294, rel=0.1)
    own = rows[rows["seed"] == 1].set_index("variant")["forward_flops"]
    # Of all pairs a quarter stays, but of the ViT only of the hidden neurons.
    assert own["sandwich_25"] < own["vit_nested_25"] < own["sandwich_75"] < own["sandwich"]
    assert own["sandwich"] == own["vit_nested"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "79 before, 79 now (the same config, processor and torch: equal digits): they agree"),
        ({"top1": 78.0}, "equal digits): they differ"),
        ({"top1": [78, 78, 78.5, 78.5], "torch": "2.0"}, "at most 2√2 σ = 1 apart): they agree"),
    ],
)
def test_a_recorded_run_is_repeated_and_compared(run, monkeypatch, capsys, change, told):
    _, rows = run(*PAIR, "--seeds", "2")
    read, kept = results.read, Path("kept.csv")
    rows.assign(**change).to_csv(kept, index=False)
    monkeypatch.setattr(results, "read", lambda path=kept: read(path))
    status = ""
    try:
        assert run(*PAIR, "--check", "vit", "1")[0] == []  # in a folder of its own
    except SystemExit as error:
        status = str(error.code)
    assert told in status + capsys.readouterr().out
    (again,) = Path("work").glob("check_*/starts.txt")
    assert again.read_text() == "vit 1 0.001\n"
    with pytest.raises(SystemExit, match="2"):
        run(*PAIR, "--check", "vit", "9")
    assert "no run of vit with seed 9" in capsys.readouterr().err


def test_a_failed_run_is_told_and_tried_again_and_one_that_diverged_keeps_a_row(
    run, monkeypatch, capsys
):
    monkeypatch.setenv("FAIL", "gelu_l2: no space left")
    with pytest.raises(SystemExit, match="failed: gelu_l2_seed0_"):
        run(*PAIR)
    assert "gelu_l2: no space left (work/gelu_l2_seed0_" in capsys.readouterr().out
    monkeypatch.setenv("FAIL", "gelu_l2 is not finite. Resume with a lower rate")
    started, rows = run(*PAIR)
    assert started == ["gelu_l2 0 0.001"]
    assert list(rows["top1"].fillna(0)) == [79, 0]
    assert not run(*PAIR)[0]


def test_ctrl_c_stops_the_training_and_the_same_command_goes_on(run, monkeypatch, capsys):
    monkeypatch.setenv("INTERRUPT", "gelu_l2")
    with pytest.raises(SystemExit, match="130"):
        run(*PAIR)
    assert "the same command goes on" in capsys.readouterr().err
    assert Path("work", "stopped").exists()
    monkeypatch.delenv("INTERRUPT")
    assert run(*PAIR)[0] == ["gelu_l2 0 0.001", "vit 0 0.001"]


def test_a_variant_starts_from_another(run, monkeypatch):
    question = sweep.QUESTIONS["softmax"]

    def stages(base):
        found = question(base)
        options = {"load_from": "{start}/model.safetensors"}
        return {"vit": found["vit"], "after": sweep.Variant("after", options, start="vit")}

    monkeypatch.setitem(sweep.QUESTIONS, "softmax", stages)
    stages.__doc__ = "Two stages."
    started, rows = run("softmax", "--lr", "1e-3", "2e-3", "--variants", "after")
    assert started[-2:] == ["vit 1 0.002", "after 1 0.002"]
    assert list(rows["start"].iloc[-2:]) == ["", "vit"]
    (after,), (vit,) = (Path("work").glob(f"{name}_seed1_*") for name in ("after", "vit"))
    assert f"load_from = '{vit}/model.safetensors'" in (after / "config.py").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("softmax", "--variants", "relu"), "no variant relu; there are softmax"),
        (("softmax", "--data-root", "nowhere"), "no data in nowhere: prepare them"),
        (("softmax", "--seeds", "0"), "need several rates"),
    ],
)
def test_mistakes_end_before_any_training(run, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        run(*words)
    assert message in capsys.readouterr().err
    assert not Path("work").exists()
