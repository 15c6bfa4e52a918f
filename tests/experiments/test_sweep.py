"""A sweep trains missing runs, resumes interrupted ones, and records failed ones."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from growth import QUESTION as GROWTH
from layernorm import QUESTION as LAYERNORM
from lm_transformer import QUESTION as LM_TRANSFORMER
from mmengine.config import Config
from PIL import Image
from softmax import QUESTION as SOFTMAX

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import IMAGES, launch, tables
from tokenformer_vit.experiments.plan import LARGEST_GAP, plan
from tokenformer_vit.experiments.record import adopt, find_record, read_layers, with_flops
from tokenformer_vit.experiments.results import read_sweep
from tokenformer_vit.experiments.run import difference
from tokenformer_vit.experiments.sweep import parse, sweep
from tokenformer_vit.files import locked_folder
from tokenformer_vit.records import write_record
from tokenformer_vit.training.config import load_config

ROOT = Path(__file__).resolve().parents[2]
WRITE_OWN = tables.write_own
ENVIRONMENT = "tokenformer_vit.experiments.record.environment"
# A model that is to grow starts with fewer weights than any ViT of its width.
CONFIGS = sorted(
    path.stem
    for path in (ROOT / "configs").glob("*.py")
    if ("tokenformer.py" in path.read_text() or "imagenet_" in path.read_text(encoding="utf-8"))
    and not path.stem.startswith("growth_")
)

# Stands in for tools/train.py: what it would leave behind, or how it would end.
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path

config, folder = Path(sys.argv[1]), Path(sys.argv[3])
assert sys.argv[2] == "--work-dir" and sys.argv[4] == "--resume"
with open(config.parent / "starts.txt", "a") as file:
    file.write(f"{config.stem} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
time.sleep(float(os.environ.get("SLEEP", 0)))
deadline = time.monotonic() + 60  # by which as many as are wanted are under way at once
while len(Path(file.name).read_text().splitlines()) < int(os.environ.get("TOGETHER", 0)):
    assert time.monotonic() < deadline
    time.sleep(0.01)
if os.environ.get("KILL", "nothing") in config.stem:
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("REFUSAL"):
    print(f"error: {os.environ['REFUSAL']}")
    sys.exit(1)
if os.environ.get("FAIL", "nothing") in config.stem:
    print("Traceback (most recent call last):\\n  ...")
    print(f"error: the loss is nan at iteration 7; kept: {folder.resolve()}/epoch_1.pth")
    sys.exit(1)
lr = float(config.stem.partition("_lr")[2] or 1e-3)
top1 = 75.5 - 1000 * abs(lr - float(os.environ.get("BEST", lr)))
logs = folder / "20260101_000000" / "vis_data"
logs.mkdir(parents=True)
lines = [{"loss": 2 - step / 1000, "lr": 0.1, "epoch": 1, "step": step} for step in range(1, 500)]
lines += [{"accuracy/top1": 80.0, "accuracy/top5": 99.0, "step": 1}]
lines += [{"accuracy/top1": top1, "accuracy/top5": 98.0, "step": 2}]
(logs / "scalars.json").write_text("\\n".join(map(json.dumps, lines)))
record = {"command": "python train.py", "commit": "abc", "epochs": 2, "seconds": 60.0, "seed": 0}
record |= {"accuracy/top1": top1, "resumed_at_iteration": 0, "processes": 1}
record |= {"train_images": 50, "images_per_step": 8, "iterations": 14}
(folder / "record.json").write_text(json.dumps(record))
"""


@pytest.fixture
def words(tmp_path, config, digits) -> list[str]:
    """The options that every sweep of these tests has."""
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work"}
    options["out"] = tmp_path / "results" / "softmax_small"
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def trainer(replace_training):
    """Replace the training; returns the list of what was started."""
    return replace_training(TRAINER)


def records(tmp_path, folder="softmax_small"):
    paths = sorted((tmp_path / "results" / folder).glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.is_file():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_from_one_end_to_the_other(tmp_path, words, capfd):
    words += ["--variants", "gelu_l2", "vit"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ablations" / "softmax.py"), *words],
        env=environment,
        cwd=tmp_path,  # not the root of the repository
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where the tests run in the background, Ctrl-C is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    ours, vit = (tmp_path / "work" / name for name in ("gelu_l2_seed0", "vit_seed0"))
    # In the middle of the second training somebody presses Ctrl-C.
    wait_for(vit / "last_checkpoint", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert re.search(r"^gelu_l2_seed0: top-1 \d+\.\d+ %$", output, re.MULTILINE)
    assert "1 of 2 runs are left; run the same command again" in output
    (leader,) = re.findall(r"process (\d+)", (vit / ".lock").read_text(encoding="utf-8"))
    with pytest.raises(ProcessLookupError):
        os.killpg(int(leader), 0)  # the training is gone, with its workers
    first = records(tmp_path)
    assert list(first) == ["gelu_l2_seed0"]

    sweep(SOFTMAX, words)
    found = records(tmp_path)
    assert list(found) == ["gelu_l2_seed0", "vit_seed0"]
    assert found["gelu_l2_seed0"] == first["gelu_l2_seed0"]
    iterations = found["vit_seed0"]["iterations"]
    assert found["gelu_l2_seed0"]["resumed_at_iteration"] == 0
    assert found["vit_seed0"]["resumed_at_iteration"] == iterations // 2  # after the first epoch
    for name, record in found.items():
        assert (record["epochs"], record["iterations"]) == (2, iterations)
        assert record["loss"]["iteration"] == list(range(5, iterations + 1, 5))  # the whole run's
        assert record["validation"]["epoch"] == [1, 2]
        assert record["final"]["top1"] == record["validation"]["top1"][-1] > 20
        assert record["best"]["top1"] == max(record["validation"]["top1"])
        assert (record["lr"], record["seed"]) == (1e-3, 0)
        assert Path(record["config"]).name == "small.py"
        path = tmp_path / "results" / "softmax_small" / f"{name}.json"
        assert path.stat().st_size < 60_000
    assert "diagnostics" not in found["vit_seed0"]
    diagnostics = found["gelu_l2_seed0"]["diagnostics"]
    assert diagnostics["epoch"] == [0, 1, 2]
    assert diagnostics["layers"] == [
        *(f"blocks.0.attn.{name}" for name in ("query", "key", "value", "proj")),
        "blocks.0.mlp",
    ]
    for name in ("key_grad_norm", "value_grad_norm", "entropy", "kurtosis"):
        assert [len(row) for row in diagnostics[name]] == [5, 5, 5]
        assert all(isinstance(value, float) for row in diagnostics[name] for value in row)
    assert "tau" not in diagnostics
    parameters = [record["parameters"] for record in found.values()]
    assert parameters[0] == pytest.approx(parameters[1], rel=0.01)

    # What is finished is not trained again, with its record or, if that is lost, without.
    before = {path: path.stat().st_mtime_ns for path in (ours, vit)}
    (tmp_path / "results" / "softmax_small" / "vit_seed0.json").unlink()
    capfd.readouterr()
    sweep(SOFTMAX, words)
    again = records(tmp_path)
    found["vit_seed0"]["command"] = again["vit_seed0"]["command"]
    assert again == found
    assert {path: path.stat().st_mtime_ns for path in (ours, vit)} == before
    assert "2 of 2 runs are recorded" in capfd.readouterr().err


def test_a_failed_run_is_recorded_and_left_alone(tmp_path, words, trainer, monkeypatch, capfd):
    monkeypatch.setenv("FAIL", "gelu_l1_seed0")
    monkeypatch.setenv("KILL", "gelu_l1_seed1")
    words += ["--variants", "gelu_l1", "gelu_l2", "--seeds", "2"]
    with pytest.raises(SystemExit, match="1"):
        sweep(SOFTMAX, words)
    assert [line.split()[0] for line in trainer()] == [
        *("gelu_l1_seed0", "gelu_l1_seed1", "gelu_l2_seed0", "gelu_l2_seed1")
    ]
    out, err = capfd.readouterr()
    line = "the loss is nan at iteration 7; kept: work/gelu_l1_seed0/epoch_1.pth"
    assert f"gelu_l1_seed0 failed: {line} (see work/gelu_l1_seed0/output.log)" in out
    assert "gelu_l2_seed1: top-1 75.50 %" in out
    assert "2 of 4 runs are recorded" in err
    assert "failed: gelu_l1_seed0, gelu_l1_seed1 (--retry-failed tries again)" in err
    found = records(tmp_path)
    assert found["gelu_l1_seed0"]["failed"] == line
    assert found["gelu_l1_seed0"]["options"] == {"model": {"backbone": {"theta": "gelu_l1"}}}

    assert found["gelu_l1_seed1"]["failed"] == "killed by SIGKILL"

    monkeypatch.delenv("FAIL")
    monkeypatch.delenv("KILL")
    with pytest.raises(SystemExit, match="1"):
        sweep(SOFTMAX, words)
    assert len(trainer()) == 4
    sweep(SOFTMAX, [*words, "--retry-failed"])
    assert len(trainer()) == 6
    assert not any("failed" in record for record in records(tmp_path).values())


def test_what_a_record_says(tmp_path, words, trainer):
    sweep(
        SOFTMAX, [*words, "--variants", "softmax", "--cfg-options", "param_scheduler.1.eta_min=0"]
    )
    (record,) = records(tmp_path).values()
    expected = {"question": "softmax", "variant": "softmax", "label": "exp + L1", "paper": 79.6}
    expected |= {"final": {"top1": 75.5, "top5": 98.0}, "commit": "abc", "seconds": 60.0}
    expected |= {"best": {"epoch": 1, "top1": 80.0, "top5": 99.0}, "lr": 1e-3}
    expected |= {"training_command": "python train.py", "config": "small.py"}
    expected |= {"validation": {"epoch": [1, 2], "top1": [80.0, 75.5]}}
    assert expected.items() <= record.items()
    backbone = record["settings"]["model"]["backbone"]
    assert backbone == {"theta": "softmax", "stem_seed": 0}
    hook = {"type": "DiagnosticsHook", "interval": 1}
    assert record["settings"]["custom_hooks"] == [hook]
    assert record["settings"]["param_scheduler"][1]["eta_min"] == 0
    iterations = record["loss"]["iteration"]
    assert len(iterations) == 100
    assert (iterations[0], iterations[-1]) == (1, 499)
    assert record["loss"]["loss"][-1] == pytest.approx(2 - 0.499, rel=1e-3)


def test_the_record_of_a_run_without_costs_gets_its_flops(tmp_path, words, trainer):
    words += ["--variants", "softmax"]
    sweep(SOFTMAX, words)
    (record,) = records(tmp_path).values()
    (run,) = plan(SOFTMAX, parse(SOFTMAX, words))
    assert record["flops"] == 2 * 50 * IMAGES.flops(run.whole)  # the last batches are smaller


def test_flops_are_counted_as_a_training_counts_them(monkeypatch):
    monkeypatch.setattr(type(IMAGES), "check_data", lambda field, cfg: None)
    config = str(ROOT / "configs" / "cifar10_micro.py")
    args = parse(GROWTH, ["--config", config, "--same-training", "--variants", "large", "vit"])
    for run in plan(GROWTH, args):
        record = find_record(run)
        own = record.pop("flops")  # from CostHook
        assert with_flops(run, record)["flops"] == own


def test_commands_are_printed_and_their_runs_collected(tmp_path, words, trainer, capfd):
    words += ["--variants", "gelu_l2", "--seeds", "2", "--lr", "1e-3", "3e-4", "--print-commands"]
    sweep(SOFTMAX, words)
    assert trainer() == []
    commands = capfd.readouterr().out.splitlines()
    names = ["gelu_l2_seed0", "gelu_l2_seed1", "gelu_l2_seed0_lr0.0003", "gelu_l2_seed1_lr0.0003"]
    assert commands == [
        f"python trainer.py work/{name}.py --work-dir work/{name} --resume" for name in names
    ]
    for command in commands[1:3]:
        subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    sweep(SOFTMAX, words)
    assert capfd.readouterr().out.splitlines() == [commands[0], commands[3]]
    found = records(tmp_path)
    assert {name: record["lr"] for name, record in found.items()} == {
        names[1]: 1e-3,
        names[2]: 3e-4,
    }
    assert found[names[1]]["settings"]["randomness"] == {"seed": 1}

    sweep(SOFTMAX, [*words, "--nproc-per-node", "8"])
    command = capfd.readouterr().out.splitlines()[0]
    assert command.startswith("python -m torch.distributed.run --standalone --nproc_per_node=8 ")
    assert command.endswith(" --resume --launcher pytorch")


@pytest.mark.parametrize("lost", ["nothing", "record", "config"])
def test_another_setting_is_not_taken_for_the_same_run(words, tmp_path, trainer, capsys, lost):
    words += ["--variants", "gelu_l2"]
    sweep(SOFTMAX, [*words, "--batch-size", "16"])
    if lost == "record":
        (tmp_path / "results" / "softmax_small" / "gelu_l2_seed0.json").unlink()
    if lost == "config":
        (tmp_path / "work" / "gelu_l2_seed0.py").unlink()
    with pytest.raises(InputError, match=r"train_dataloader\.batch_size: 16 there and 8 here"):
        sweep(SOFTMAX, [*words, "--batch-size", "8"])
    assert len(trainer()) == 1


def test_the_configs_own_model_is_trained_once_for_all_questions(
    tmp_path, words, trainer, monkeypatch, capfd
):
    # The first sweep's records have made the tree dirty.
    monkeypatch.setattr(
        "tokenformer_vit.experiments.record.environment", lambda: {"commit": "abc-dirty"}
    )
    sweep(SOFTMAX, [*words, "--variants", "gelu_l2"])
    words[words.index("--out") + 1] = str(tmp_path / "results" / "layernorm_small")
    sweep(LAYERNORM, [*words, "--variants", "none", "bias"])
    assert [line.split()[0] for line in trainer()] == ["gelu_l2_seed0", "bias_seed0"]
    assert "none_seed0: the same as softmax_small/gelu_l2_seed0.json" in capfd.readouterr().err
    record = records(tmp_path, "layernorm_small")["none_seed0"]
    assert (record["question"], record["variant"], record["paper"]) == ("layernorm", "none", 82.5)
    assert record["taken_from"] == "softmax_small/gelu_l2_seed0.json"


@pytest.mark.parametrize(
    ("commit", "more"), [("def", []), ("abc", ["--nproc-per-node", "2"])], ids=["code", "processes"]
)
def test_what_other_code_or_more_processes_trained_is_not_taken_over(
    tmp_path, words, trainer, monkeypatch, commit, more
):
    sweep(SOFTMAX, [*words, "--variants", "gelu_l2"])
    monkeypatch.setattr(
        "tokenformer_vit.experiments.record.environment", lambda: {"commit": commit}
    )
    words[words.index("--out") + 1] = str(tmp_path / "results" / "layernorm_small")
    args = parse(LAYERNORM, [*words, "--variants", "none", *more])
    (run,) = plan(LAYERNORM, args)
    assert adopt(run, args.nproc_per_node or 1) is None


def test_later_seeds_train_at_the_best_rate_of_the_first(tmp_path, words, trainer, monkeypatch):
    monkeypatch.setenv("BEST", "2.1e-3")
    variants = ["--variants", "softmax", "vit", "--lr", "1e-3", "2e-3", "4e-3", "--lr-seeds", "1"]
    sweep(SOFTMAX, [*words, *variants])
    assert len(trainer()) == 6
    sweep(SOFTMAX, [*words, *variants, "--seeds", "3"])
    later = {line.split()[0] for line in trainer()[6:]}
    assert later == {
        f"{variant}_seed{seed}_lr0.002" for variant in ("softmax", "vit") for seed in (1, 2)
    }
    assert len(records(tmp_path)) == 10


def test_later_seeds_wait_for_all_rates_of_the_first(words, trainer, monkeypatch, capfd):
    monkeypatch.setenv("BEST", "2.1e-3")
    words += ["--variants", "softmax", "--seeds", "2", "--lr", "1e-3", "2e-3", "--lr-seeds", "1"]
    words += ["--print-commands"]

    def printed():
        sweep(SOFTMAX, words)
        commands = capfd.readouterr().out.splitlines()
        return {command.split()[2].removeprefix("work/"): command for command in commands}

    first = printed()
    assert list(first) == ["softmax_seed0.py", "softmax_seed0_lr0.002.py"]
    for name, command in first.items():
        subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
        first = {each: first[each] for each in first if each != name}
        # The one rate that is finished is not the best of both yet.
        assert list(printed()) == (list(first) or ["softmax_seed1_lr0.002.py"])


def test_the_batch_size_is_that_of_training(words):
    (run, *_) = plan(SOFTMAX, parse(SOFTMAX, [*words, "--batch-size", "5"]))
    assert run.settings["train_dataloader"]["batch_size"] == 5
    assert "batch_size" not in run.settings.get("val_dataloader", {})


def test_an_edited_base_config_is_noticed(tmp_path, config, words, trainer):
    words += ["--variants", "gelu_l2"]
    own = tmp_path / "own.py"
    own.write_text(config.read_text(encoding="utf-8"))
    words[words.index("--config") + 1] = str(own)
    sweep(SOFTMAX, words)
    own.write_text(f"{own.read_text()}\nauto_scale_lr = dict(base_batch_size=7)\n")
    with pytest.raises(InputError, match=r"own\.py.* there and .* here.*give --same-training"):
        sweep(SOFTMAX, words)


def test_a_sweep_gets_more_seeds_after_an_edit_of_its_config(tmp_path, config, words, trainer):
    words += ["--variants", "gelu_l2", "vit"]
    sweep(SOFTMAX, words)
    first = records(tmp_path)
    # The ViT replaces the backbone, and repeats the new key.
    config.write_text(config.read_text().replace("depth=1", "depth=1, pos_drop_rate=0.0"))
    words += ["--same-training"]
    with pytest.raises(InputError, match=r"batch_size: the config's there and 16 here"):
        sweep(SOFTMAX, [*words, "--batch-size", "16"])
    sweep(SOFTMAX, [*words, "--seeds", "2"])
    assert [line.split()[0] for line in trainer()[2:]] == ["gelu_l2_seed1", "vit_seed1"]
    found = records(tmp_path)
    assert first.items() <= found.items()
    assert "pos_drop_rate" in found["vit_seed1"]["settings"]["model"]["backbone"]

    # The table allows keys that are younger than a record, but no other value.
    path = tmp_path / "results" / "softmax_small" / "vit_seed1.json"
    backbone = found["vit_seed1"]["options"]["model"]["backbone"]
    backbone["pos_drop_rate"] = 0.0
    write_record(path, found["vit_seed1"])
    assert len(read_sweep(SOFTMAX, path.parent)) == 4
    backbone["mlp_ratio"] = 3.0
    write_record(path, found["vit_seed1"])
    with pytest.raises(InputError, match=r"mlp_ratio is 6\.0 in .* and 3\.0 in vit_seed1"):
        read_sweep(SOFTMAX, path.parent)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("optim_wrapper = dict(optimizer=dict(lr=2e-3))", r"lr: 0\.001 there and 0\.002 here"),
        ("train_cfg = dict(max_epochs=4)", "epochs: 2 there and 4 here"),
    ],
)
def test_a_record_of_another_rate_or_length_is_never_the_same_training(
    config, words, trainer, edit, message
):
    words += ["--variants", "gelu_l2", "--same-training"]
    sweep(SOFTMAX, words)
    # Without this check the record would count as that of the new rate.
    config.write_text(f"{config.read_text()}{edit}\n")
    with pytest.raises(InputError, match=message):
        sweep(SOFTMAX, words)


@pytest.mark.parametrize(
    ("question", "name", "variants"),
    [
        (GROWTH, "cifar10_micro", ("large", "net2net")),
        (LM_TRANSFORMER, "lm_micro", ("transformer",)),
    ],
)
def test_a_committed_sweep_can_be_extended(question, name, variants, monkeypatch):
    monkeypatch.setattr(type(question.field), "check_data", lambda field, cfg: None)
    words = ["--config", str(ROOT / "configs" / f"{name}.py"), "--variants", *variants]
    for run in plan(question, parse(question, [*words, "--same-training", "--seeds", "4"])):
        assert (find_record(run) is None) == (run.about["seed"] == 3)


# Trains the run that it is given, as far as others can tell.
OTHER = """
import sys
from pathlib import Path
from tokenformer_vit.files import locked_folder

with locked_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_of_another_process_is_left_to_it(tmp_path, words, trainer, monkeypatch, capfd):
    folder = tmp_path / "work" / "gelu_l2_seed0"
    folder.mkdir(parents=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OTHER, str(folder)], **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(InputError) as refusal, locked_folder(folder):
            pass
        other.stdin.close()
    # The other process may have ended by now: its record must not become that of a failure.
    monkeypatch.setenv("REFUSAL", str(refusal.value))
    with pytest.raises(SystemExit, match="1"):
        sweep(SOFTMAX, [*words, "--variants", "gelu_l2"])
    assert records(tmp_path) == {}
    out, err = capfd.readouterr()
    assert "gelu_l2_seed0 is skipped: another process is training it" in out
    assert "0 of 1 runs are recorded" in err


def test_a_sweep_never_locks_a_run(tmp_path, words, trainer, monkeypatch):
    """A training that starts at that moment would find its folder locked, and fail."""
    monkeypatch.setenv("FAIL", "gelu_l2")
    with pytest.raises(SystemExit, match="1"):
        sweep(SOFTMAX, [*words, "--variants", "gelu_l2"])
    assert "failed" in records(tmp_path)["gelu_l2_seed0"]
    assert not list(tmp_path.rglob(".lock"))


def test_the_table_of_own_records_is_beside_them(tmp_path, words, trainer, monkeypatch, capfd):
    """A config that is not the project's has its records and table in the work directory."""
    monkeypatch.setattr(tables, "write_own", WRITE_OWN)
    out = words.index("--out")
    words = words[:out] + words[out + 2 :]
    sweep(SOFTMAX, [*words, "--variants", "softmax"])
    folder = tmp_path / "work" / "results"
    assert [path.name for path in folder.glob("softmax_small/*")] == ["softmax_seed0.json"]
    assert "their table is work/results/softmax_small.md" in capfd.readouterr().err
    text = (folder / "softmax_small.md").read_text()
    assert "| exp + L1 | 0.001 |" in text
    assert "75.50 (n = 1)" in text
    assert "A ± is the standard deviation" in text
    assert "(softmax_small.png)" in text
    with Image.open(folder / "softmax_small.png") as picture:
        assert picture.width > 600


def test_records_of_a_shipped_config_are_the_project_s(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config", "digits_demo", "--data-root", str(digits), "--variants", "gelu_l2"]
    (run,) = plan(SOFTMAX, parse(SOFTMAX, words))
    assert run.out == ROOT / "ablations" / "results" / "softmax_digits_demo"
    assert run.about["config"] == "configs/digits_demo.py"
    assert run.work_dir == Path("work_dirs", "ablations", "softmax", "digits_demo")


def test_jobs_run_side_by_side_and_share_the_gpus_out(words, trainer, monkeypatch):
    monkeypatch.setenv("TOGETHER", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    sweep(SOFTMAX, [*words, "--variants", "gelu_l1", "gelu_l2", "vit", "--jobs", "3"])
    assert {tuple(line.split()) for line in trainer()} == {
        ("gelu_l1_seed0", "4"),
        ("gelu_l2_seed0", "5"),
        ("vit_seed0", "4"),
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data-root", "absent"], "there is no folder absent/train"),
        (["--cfg-options", "model.backbone.thetta=softmax"], "no 'thetta'; there is theta"),
        (["--cfg-options", "train_cfg.max_epochs=1"], "also set param_scheduler"),
        (["--cfg-options", "model.backbone.checkpoint_path=x.pth"], "trains from scratch"),
        (
            ["--cfg-options", "model.backbone.embed_dim=24", "model.head.in_channels=24"],
            r"vit has .* parameters .* leave vit out of --variants",
        ),
    ],
)
def test_mistakes_end_before_any_training(words, trainer, extra, message):
    with pytest.raises(InputError, match=message):
        sweep(SOFTMAX, [*words, *extra])
    assert trainer() == []


def test_how_a_training_ended():
    assert launch.error_line("", -9) == "killed by SIGKILL"
    assert launch.error_line("a\nerror: no good\nb", 1) == "no good"
    torchrun = """
    [rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError: x
    Root Cause (first observed failure):
    """
    assert launch.error_line(torchrun, 1).startswith("[rank1]: torch.OutOfMemoryError: CUDA out of")
    assert launch.error_line("Segmentation fault\n", 139) == "Segmentation fault"
    assert launch.error_line("", 3) == "exit status 3, and no output"


def test_a_derived_config_says_just_what_differs(tmp_path):
    base = {"a": {"b": 1, "c": [1, 2], "d": None}, "e": 1, "g": {"x": 1, "y": {"z": 1}}}
    new = {"a": {"b": 2, "c": [1, 2], "d": {"k": (1, None)}}, "e": {"f": 0.5}, "g": {"y": {"z": 1}}}
    said = difference(base, {**new, "h": "x"})
    assert said["a"] == {"b": 2, "d": {"_delete_": True, "k": (1, None)}}
    assert difference(base, base) == {}
    (tmp_path / "base.py").write_text("\n".join(f"{k} = {v!r}" for k, v in base.items()))
    lines = ["_base_ = 'base.py'", *(f"{k} = {v!r}" for k, v in said.items())]
    (tmp_path / "new.py").write_text("\n".join(lines))
    assert Config.fromfile(tmp_path / "new.py").to_dict() == {**new, "h": "x"}


def test_diagnostics_are_thinned(tmp_path):
    names = ("key_grad_norm", "value_grad_norm", "key_norm", "value_norm", "entropy", "kurtosis")
    layers = [f"blocks.{i}.attn.{name}" for i in range(24) for name in "qkvof"]
    path = tmp_path / "diagnostics.jsonl"

    def write(learned):
        with path.open("w") as file:
            for epoch in range(0, 301, 15):
                figures = dict.fromkeys(names, 1.2345678e-05 * (epoch + 1))
                figures["tau"] = 27.7 + learned * epoch
                measured = dict.fromkeys(layers, figures)
                measured[layers[3]] = {**figures, "entropy": None}
                line = {"epoch": epoch, "iteration": 9 * epoch, "layers": measured}
                file.write(json.dumps(line) + "\n")
        return read_layers(path)["diagnostics"]

    diagnostics = write(learned=False)
    assert list(diagnostics) == ["epoch", "layers", *names]
    assert (diagnostics["epoch"][0], diagnostics["epoch"][-1]) == (0, 300)
    assert diagnostics["layers"] == layers
    assert diagnostics["kurtosis"][0][7] == 1.235e-5
    assert diagnostics["kurtosis"][-1][7] == pytest.approx(1.235e-5 * 301, rel=1e-3)
    assert {row[3] for row in diagnostics["entropy"]} == {None}
    write_record(tmp_path / "record.json", diagnostics)
    assert (tmp_path / "record.json").stat().st_size < 50_000
    assert write(learned=True)["tau"][0][0] == 27.7


# A ViT has no smaller sizes to train, and the last two start from weights.
OF_TOKENFORMER = ("imagenet_base_nested", "mae_base_finetune", "mae_base_linear")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OF_TOKENFORMER])
def test_the_vit_has_as_many_weights(name, monkeypatch):
    cfg = load_config(ROOT / "configs" / f"{name}.py").to_dict()
    shape, parameters = IMAGES.shape_of(cfg)
    ours = IMAGES.build(cfg)
    vit = SOFTMAX.named("vit")
    cfg["model"]["backbone"] = vit.change(cfg["model"]["backbone"], shape)
    matched = IMAGES.build(cfg)

    def weights(model):
        blocks = model.backbone.model.blocks
        return [sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in blocks]

    def outside(model):
        return {
            name: tensor.shape
            for name, tensor in model.state_dict().items()
            if ".blocks." not in name
        }

    assert weights(ours) == weights(matched)
    assert outside(ours) == outside(matched)
    count = sum(parameter.numel() for parameter in matched.parameters())
    assert count == pytest.approx(parameters, rel=LARGEST_GAP)
    if name == "imagenet_base_matched":
        assert count == 86_567_656  # ViT-B/16
