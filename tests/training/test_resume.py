"""A killed run continues as if it had not been killed."""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tokenformer_vit.files import temporary_name
from tokenformer_vit.training import ExactCheckpointHook
from tokenformer_vit.training.reports import read_scalars

# Two workers, mixup, drop path, EMA, a warm-up by iteration and a decay by epoch: everything that
# has a state. Accumulation leaves gradients pending where checkpoints are taken.
OPTIONS = ("--cfg-options", "train_dataloader.num_workers=2")
BY_EPOCH = (
    "optim_wrapper.accumulative_counts=4",
    "default_hooks.checkpoint.save_best=accuracy/top1",
)
BY_ITERATION = (
    "default_hooks.checkpoint.by_epoch=False",
    "default_hooks.checkpoint.interval=4",
    "optim_wrapper.accumulative_counts=3",
)
# A checkpoint at every second iteration, besides those of each epoch: one is always being written.
BY_TIME = (*BY_EPOCH, "default_hooks.checkpoint.minutes=1e-6")
CONNECTED = (
    "model_wrapper_cfg.gradient_as_bucket_view=True",
    "val_evaluator.collect_device=gpu",
    "env_cfg.dist_cfg.timeout=600",
)
ROUNDED = ("model_wrapper_cfg.compression=bf16",)
IN_MEMORY = "train_dataloader.dataset.type=ImagesInMemory"


def losses(work_dir):
    train, val = read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))
    return {step: record["loss"] for step, record in train.items()}, val


def wait_for(process, work_dir, iteration):
    """Return as soon as the log shows ``iteration``."""
    deadline = time.monotonic() + 200
    while max(losses(work_dir)[0], default=0) < iteration:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_after(process, work_dir, iteration):
    """Send SIGKILL as soon as the log shows ``iteration``."""
    wait_for(process, work_dir, iteration)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    ("checkpoints", "kill_at"),
    [
        pytest.param(BY_EPOCH, 8, id="by_epoch", marks=pytest.mark.slow),
        pytest.param(BY_ITERATION, 10, id="by_iter", marks=pytest.mark.slow),
        pytest.param((*BY_ITERATION, "--compile"), 10, id="compiled", marks=pytest.mark.slow),
        pytest.param((*BY_ITERATION, IN_MEMORY), 10, id="in_memory", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_exactly(train, tmp_path, checkpoints, kill_at):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, *OPTIONS, *checkpoints)
    kill_after(train.start(killed, *OPTIONS, *checkpoints), killed, kill_at)
    assert max(losses(killed)[0]) < 18  # it was in fact cut off
    train(killed, "--resume", "auto", *OPTIONS, *checkpoints)

    assert list(losses(whole)[0]) == list(range(1, 19))
    # One average for each optimiser step, the last and shorter one included.
    averages = math.ceil(18 / (4 if checkpoints is BY_EPOCH else 3))
    assert same_results(whole, killed)["ema_state_dict"]["steps"] == averages


def same_results(whole, killed):
    """Check that two runs logged and saved the same; return the last checkpoint."""
    expected, expected_val = losses(whole)
    resumed, resumed_val = losses(killed)
    assert resumed == expected
    assert {step: record["accuracy/top1"] for step, record in resumed_val.items()} == {
        step: record["accuracy/top1"] for step, record in expected_val.items()
    }
    one, other = (
        torch.load(folder / (folder / "last_checkpoint").read_text(), weights_only=True)
        for folder in (whole, killed)
    )
    for part in ("state_dict", "ema_state_dict"):
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    return one


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [BY_ITERATION, BY_TIME])
def test_a_run_that_is_killed_ten_times_at_random_goes_on_exactly(train, tmp_path, checkpoints):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = (*OPTIONS, *checkpoints, "train_cfg.max_epochs=60")
    train(whole, *options)
    moments, writing, before = random.Random(torch.initial_seed()), 0, 0
    for number in range(10):
        before = max(losses(killed)[0], default=0)
        process = train.start(killed, "--resume", *options)
        wait_for(process, killed, before + 1)
        time.sleep(moments.uniform(0, 0.5))
        while number % 2 and not any(killed.glob(".*.partial")):
            assert process.poll() is None  # it will write a checkpoint
        process.send_signal(signal.SIGKILL)
        process.communicate()
        writing += any(killed.glob(".*.partial"))
    assert before < 360  # the last one was in fact cut off
    train(killed, "--resume", *options)
    same_results(whole, killed)
    print(f"killed during a write: {writing} of 10 times")


@pytest.fixture(scope="session")
def finished(train, tmp_path_factory):
    """A finished run, to copy."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(folder, *OPTIONS, "default_hooks.checkpoint.save_best=accuracy/top1")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run: also a run whose folder was moved."""
    return shutil.copytree(finished, tmp_path / "moved")


@pytest.mark.slow
def test_a_run_that_was_killed_in_its_last_validation_is_finished(train, run):
    for name in ("model.safetensors", "config.json", "curves.png"):
        (run / name).unlink()
    _, before = losses(run)
    record = (run / "record.json").read_text()
    output = train(run, "--resume", *OPTIONS)
    assert "resumed epoch: 3, iter: 18" in output
    assert "18 steps in 3 epochs; finished, so nothing is trained" in output
    assert losses(run)[1] == {**before, 3: losses(run)[1][3]}
    assert all((run / name).is_file() for name in ("model.safetensors", "curves.png"))
    assert (run / "record.json").read_text() == record  # nothing was trained
    (run / "record.json").unlink()  # it was killed before it could write this
    train(run, "--resume", *OPTIONS)
    again = json.loads((run / "record.json").read_text())
    assert again["resumed_at_iteration"] == again["iterations"] == 18
    for key in ("loss_first", "loss_last_20_mean", "accuracy/top1"):
        assert again[key] == json.loads(record)[key]


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_leaves_the_previous_checkpoint(train, tmp_path, monkeypatch):
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    pointer, point_to = tmp_path / "last_checkpoint", ExactCheckpointHook._point_to

    def then_fill_the_disk(hook, runner, path):
        point_to(hook, runner, path)
        # No file may grow beyond half a checkpoint, as if the disk were full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (Path(path).stat().st_size // 2, most))

    monkeypatch.setattr(ExactCheckpointHook, "_point_to", then_fill_the_disk)
    try:
        line = train.fails(tmp_path, *OPTIONS, "default_hooks.checkpoint.max_keep_ckpts=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert re.search(r"cannot write .*epoch_2\.pth \(File too large\)", line)
    assert torch.load(pointer.read_text(), weights_only=True)["meta"]["epoch"] == 1
    assert not list(tmp_path.glob(".*.partial"))
    assert not (tmp_path / "record.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [BY_EPOCH, BY_ITERATION])
def test_a_run_that_is_told_to_stop_goes_on_exactly(train, tmp_path, checkpoints):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, *OPTIONS, *checkpoints)
    process = train.start(stopped, *OPTIONS, *checkpoints, start_new_session=True)
    wait_for(process, stopped, 8)
    os.killpg(process.pid, signal.SIGTERM)  # Slurm's reaches data loading workers, too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    iteration = int(re.search(r"Stopped by SIGTERM after iteration (\d+)\.", output)[1])
    assert 8 <= iteration < 18
    assert (stopped / "last_checkpoint").read_text() == str(stopped / "stopped.pth")
    assert torch.load(stopped / "stopped.pth", weights_only=True)["meta"]["iter"] == iteration
    train(stopped, "--resume", *OPTIONS, *checkpoints)
    assert losses(stopped)[0] == losses(whole)[0]
    for name in ("model.safetensors", "config.json"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
    assert not (stopped / "stopped.pth").exists()  # the next regular checkpoint took its place


@pytest.mark.slow
def test_another_batch_size_or_other_data_are_refused(train, run, data_root, tmp_path):
    root = shutil.copytree(data_root, tmp_path / "images")
    train(run, "--resume", *OPTIONS, "train_cfg.max_epochs=3", "--data-root", str(root))  # moved
    for index in range(3):
        (root / "train" / "dark" / f"{index}.png").unlink()  # as many iterations as before
    line = train.fails(run, "--resume", *OPTIONS, "--data-root", str(root))
    assert "the number of training samples was 48 in the checkpoint and is 45 now" in line
    shutil.copytree(data_root, root, dirs_exist_ok=True)
    (root / "train" / "dark" / "0.png").rename(root / "train" / "dark" / "x.png")
    line = train.fails(run, "--resume", *OPTIONS, "--data-root", str(root))
    assert "the hash of training images (names or sizes) and labels was" in line
    line = train.fails(run, "--resume", "--batch-size", "9", *OPTIONS)
    assert (
        "the batch size times the number of processes was 8 in the checkpoint and is 9 now" in line
    )


@pytest.mark.slow
def test_checkpoints_without_a_pointer_are_not_overwritten(train, run):
    (run / "last_checkpoint").unlink()
    line = train.fails(run, *OPTIONS)
    assert "already holds a run: add --resume" in line
    line = train.fails(run, "--resume", *OPTIONS)
    assert "last_checkpoint is missing; there are " in line
    assert f"--resume {run}/epoch_3.pth" in line


@pytest.mark.slow
def test_a_checkpoint_from_elsewhere_does_not_overwrite_a_run(train, run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    line = train.fails(run, "--resume", str(other / "epoch_2.pth"), *OPTIONS)
    assert "already holds a run" in line
    (run / "last_checkpoint").write_bytes(b"\xff\xfe")
    assert "; there are epoch_" in train.fails(run, "--resume", *OPTIONS)


@pytest.mark.slow
def test_two_processes_that_are_told_to_stop_go_on_exactly(train, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    options = ("--launcher", "pytorch", "--batch-size", "4", *OPTIONS)
    train(tmp_path / "whole", *options, launcher=launcher)
    stopped = tmp_path / "stopped"
    process = train.start(stopped, *options, launcher=launcher, start_new_session=True)
    wait_for(process, stopped, 8)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert "Stopped by SIGTERM after iteration" in output
    assert (stopped / "last_checkpoint").read_text() == str(stopped / "stopped.pth")
    train(stopped, "--resume", *options, launcher=launcher)
    assert losses(stopped)[0] == losses(tmp_path / "whole")[0]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named(train, run):
    data = bytearray((run / "epoch_3.pth").read_bytes())
    data[len(data) // 2] ^= 1
    (run / "epoch_3.pth").write_bytes(data)
    line = train.fails(run, "--resume", *OPTIONS)
    assert "epoch_3.pth is damaged" in line


@pytest.mark.slow
def test_two_runs_do_not_share_a_work_directory(train, tmp_path):
    process = train.start(tmp_path, *OPTIONS, "train_cfg.max_epochs=200")
    wait_for(process, tmp_path, 1)
    left = tmp_path / temporary_name(tmp_path / "epoch_1.pth").name.replace(
        f"-{os.getpid()}-", "-4194300-"
    )
    left.write_text("of a killed run")
    first = train.environment
    train.environment = {**first, "ALONE": "1"}  # in a process of its own, as a user starts it
    try:
        line = train.fails(tmp_path, "--resume", *OPTIONS)
    finally:
        train.environment = first
    assert f"{tmp_path} is in use by process {process.pid}" in line
    assert left.exists()  # only the one that holds the lock tidies up
    process.kill()
    process.communicate()
    line = train.fails(tmp_path, *OPTIONS)
    assert "already holds a run" in line
    assert not left.exists()


@pytest.mark.slow
def test_the_best_checkpoint_is_no_state_to_resume_from(train, run):
    (best,) = run.glob("best_*.pth")
    line = train.fails(run, "--resume", str(best), *OPTIONS)
    assert "has only weights, not the state of a run" in line


@pytest.mark.slow
def test_a_resumed_run_keeps_its_schedule(train, run):
    line = train.fails(run, "--resume", *OPTIONS, "train_cfg.max_epochs=5")
    assert "train_cfg.max_epochs was 3 in the checkpoint and is 5 now" in line


@pytest.mark.slow
def test_two_killed_processes_go_on_exactly(train, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    options = ("--launcher", "pytorch", "--batch-size", "4", *OPTIONS)
    train(tmp_path / "whole", *options, launcher=launcher)
    process = train.start(tmp_path / "killed", *options, launcher=launcher)
    kill_after(process, tmp_path / "killed", 8)
    # The agent of torchrun is gone; its workers see that and end by themselves.
    time.sleep(5)
    train(tmp_path / "killed", "--resume", *options, launcher=launcher)
    assert losses(tmp_path / "killed")[0] == losses(tmp_path / "whole")[0]


@pytest.mark.slow
def test_another_number_of_processes_takes_the_same_images(train, tmp_path):
    plain = (
        *OPTIONS,
        *("model.train_cfg=None", "model.backbone.drop_path_rate=0.0"),
        *BY_ITERATION,
        "default_hooks.checkpoint.max_keep_ckpts=9",
    )
    train(
        tmp_path,
        *("--launcher", "pytorch", "--batch-size", "4", *plain),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    )
    expected, _ = losses(tmp_path)
    resume = ("--resume", str(tmp_path / "iter_8.pth"))  # within an epoch, gradients pending
    line = train.fails(tmp_path, *resume, *plain)
    assert "a run with 2 processes, and this run has 1" in line
    assert "add --elastic" in line
    output = train(tmp_path, *resume, "--elastic", "--batch-size", "5", *plain)
    assert "written by 2 processes, this run has 1: each step takes the same samples" in output
    *_, log = sorted(tmp_path.glob("*/vis_data/scalars.json"))
    continued, _ = read_scalars([log])
    assert list(continued) == list(range(9, 19))
    torch.testing.assert_close(
        [record["loss"] for record in continued.values()],
        [expected[step] for step in continued],
        rtol=2e-5,
        atol=2e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "rtol"),
    [((), 2e-5), (("--compile",), 2e-5), ((IN_MEMORY,), 2e-5), (CONNECTED, 2e-5), (ROUNDED, 2e-3)],
)
def test_two_processes_follow_the_curve_of_one(train, tmp_path, extra, rtol):
    plain = (
        "--cfg-options",
        "model.train_cfg=None",
        "model.backbone.drop_path_rate=0.0",
        "optim_wrapper.accumulative_counts=2",
        *extra,
    )
    train(tmp_path / "one", "--batch-size", "8", *plain)
    train(
        tmp_path / "two",
        "--batch-size",
        "4",
        "--launcher",
        "pytorch",
        *plain,
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    )
    one, two = losses(tmp_path / "one")[0], losses(tmp_path / "two")[0]
    assert len(one) == len(two) == 18
    torch.testing.assert_close(
        torch.tensor(list(two.values())), torch.tensor(list(one.values())), rtol=rtol, atol=2e-6
    )
