"""A killed run continues as if it had not been killed, and a resumed one may change."""

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
from filelock import FileLock

from tokenformer_vit.training.checkpoint import changed
from tokenformer_vit.training.loop import ResumableEpochLoop
from tokenformer_vit.training.runner import TrainingRunner

from .conftest import growing, last_checkpoint, losses, same_weights, scalars

# Two workers, mixup, drop path, EMA, a warm-up by iteration and a decay by epoch: everything that
# has a state.
OPTIONS = ("--cfg-options", "train_dataloader.num_workers=2")
SAVE_BEST = "default_hooks.checkpoint.save_best=accuracy/top1"
BY_EPOCH = (SAVE_BEST, "optim_wrapper.accumulative_counts=4")  # an epoch has 6 batches
BY_ITERATION = (
    "default_hooks.checkpoint.by_epoch=False",
    "default_hooks.checkpoint.interval=4",
    "optim_wrapper.accumulative_counts=3",
)
ENDLESS = """
train_cfg = dict(_delete_=True, type="ResumableIterLoop", max_iters={end}, val_interval=5)
train_dataloader = dict(sampler=dict(endless=True))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=4),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=False, begin=4),
]
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=3))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
TWO = ("--launcher", "pytorch", "--batch-size", "4")


def wait_for(process, work_dir, iteration):
    deadline = time.monotonic() + 200
    while max(losses(work_dir), default=0) < iteration:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def same_results(whole, killed):
    """Check that two runs logged and saved the same; return the last checkpoint."""
    assert losses(killed) == losses(whole)
    top1, expected = (
        {step: record["accuracy/top1"] for step, record in scalars(each)[1].items()}
        for each in (killed, whole)
    )
    assert top1 == expected
    one, other = last_checkpoint(whole), last_checkpoint(killed)
    same_weights(one, other)
    spent = [each["message_hub"]["runtime_info"].get("flops") for each in (one, other)]
    assert spent[0] == spent[1]
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    return one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "options", "launcher"),
    [
        pytest.param("", BY_EPOCH, (), id="by_epoch"),
        pytest.param("", BY_ITERATION, (), id="within_epochs"),
        pytest.param(ENDLESS.format(end=30), BY_ITERATION[2:], (), id="by_iteration"),
        # Gradients are pending at a growth.
        pytest.param(growing(), (*BY_ITERATION[:2], BY_EPOCH[1]), (), id="growth"),
        pytest.param(growing(new_lr_scale=3), (*BY_ITERATION[:2], BY_EPOCH[1]), (), id="new_rate"),
        pytest.param("", (), TORCHRUN, id="two_processes"),
        pytest.param("", (*BY_ITERATION, "--compile"), (), id="compiled"),
        pytest.param("", ("train_dataloader.dataset.type=ImagesInMemory",), (), id="in_memory"),
    ],
)
def test_a_run_that_is_killed_ten_times_at_random_goes_on_exactly(
    train, own, tmp_path, more, options, launcher
):
    train = train.of(own(f"train_cfg = dict(max_epochs=9)\n{more}"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = (*(TWO if launcher else ()), *OPTIONS, *options)
    train(whole, *options, launcher=launcher)
    length = max(losses(whole))
    moments, writing, kills = random.Random(torch.initial_seed()), 0, 0
    for number in range(10):
        before = max(losses(killed), default=0)
        if before >= length - 1:
            break
        process = train.start(killed, "--resume", *options, launcher=launcher)
        wait_for(process, killed, before + 1)
        while number % 2 and process.poll() is None and not any(killed.glob(".*.partial")):
            pass  # it will write a checkpoint
        time.sleep(0 if number % 2 else moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if launcher:
            time.sleep(4)  # torchrun's agent is gone; its workers see that and end
        kills, writing = kills + 1, writing + any(killed.glob(".*.partial"))
    train(killed, "--resume", *options, launcher=launcher)
    last = same_results(whole, killed)
    if not more:  # one average for each optimiser step, the last and shorter one included
        every = next((int(each[-1]) for each in options if "accumulative" in each), 1)
        assert last["ema_state_dict"]["steps"] == math.ceil(length / every)
    print(f"killed {kills} times, {writing} of them during a write")


@pytest.fixture(scope="session")
def finished(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(folder, "--cfg-options", SAVE_BEST)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run: also a run whose folder was moved."""
    return shutil.copytree(finished, tmp_path / "moved")


# A form of mmpretrain's own configs, and an optimiser that counts steps by group.
STOCK_ITERATIONS = """
train_cfg = dict(_delete_=True, by_epoch=False, max_iters=5, val_interval=5)
optim_wrapper = dict(optimizer=dict(type="timm.optim.Lamb"))
train_dataloader = dict(
    sampler=dict(_delete_=True, type="InfiniteSampler", shuffle=True),
    dataset=dict(pipeline=[dict(type="LoadImage"), dict(type="PackInputs")]),
)
param_scheduler = []
"""
SHORTENED = ("train_dataloader.num_batch_per_epoch=3", "val_dataloader.num_batch_per_epoch=2")


@pytest.mark.parametrize(
    ("more", "options", "resumed", "end"),
    [
        # A line has the mean loss since the last one, also where a checkpoint is between them.
        ("", ("default_hooks.logger.interval=6", "log_processor.window_size=6"), (4, 12), 18),
        (STOCK_ITERATIONS, (), (4,), 5),
        pytest.param("", SHORTENED, (4,), 9, marks=pytest.mark.slow),
    ],
    ids=["epochs", "stock_iterations", "shortened"],
)
def test_a_run_goes_on_within_an_epoch_and_between_two(
    train, own, tmp_path, more, options, resumed, end
):
    """In one process, and so in seconds; the slow tests kill."""
    train, whole = train.of(own(more)), tmp_path / "whole"
    options = (*OPTIONS, *BY_ITERATION[:2], "default_hooks.checkpoint.max_keep_ckpts=-1", *options)
    train(whole, *options)
    assert max(losses(whole)) == end
    for iteration in resumed:
        rest = tmp_path / str(iteration)
        train(rest, "--resume", str(whole / f"iter_{iteration}.pth"), *options)
        assert losses(rest).items() <= losses(whole).items()
        assert max(losses(rest)) == end
        same_weights(last_checkpoint(whole), last_checkpoint(rest))


def test_a_run_that_was_killed_in_its_last_validation_is_finished(train, run):
    for name in ("model.safetensors", "config.json", "curves.png"):
        (run / name).unlink()
    last = last_checkpoint(run)
    last["message_hub"]["runtime_info"]["keep_ckpt_ids"] = [7, 1, 2, 3]
    torch.save(last, run / "epoch_3.pth")
    (run / "epoch_7.pth").touch()  # what it did not delete
    _, before = scalars(run)
    record = (run / "record.json").read_text()
    output = train(run, "--resume")
    assert "18 steps in 3 epochs; finished, so nothing is trained" in output
    after = scalars(run)[1]
    assert after == {**before, 3: after[3]}
    assert all((run / name).is_file() for name in ("model.safetensors", "curves.png"))
    assert (run / "record.json").read_text() == record  # nothing was trained
    assert {path.name for path in run.glob("epoch_*.pth")} == {f"epoch_{n}.pth" for n in (1, 2, 3)}


REST = [pytest.param(name, marks=pytest.mark.slow) for name in ("SIGUSR1", "SIGHUP")]


@pytest.mark.parametrize("number", ["SIGTERM", *REST])
def test_a_run_that_is_told_to_stop_goes_on_exactly(
    train, finished, tmp_path, monkeypatch, in_another_process, number
):
    run_iter = ResumableEpochLoop.run_iter

    def run_iter_and_stop(loop, *batch):
        run_iter(loop, *batch)
        if loop.iter == 8:
            os.killpg(0, getattr(signal, number))  # as Slurm's, it reaches the workers, too

    def work():
        os.setpgrp()
        words = ("--work-dir", str(tmp_path), *OPTIONS, SAVE_BEST)
        train.command.run_file("train", *train.arguments, *words)

    with monkeypatch.context() as patched:
        patched.setattr(ResumableEpochLoop, "run_iter", run_iter_and_stop)
        done = in_another_process(work)
    assert done.status == 143, done.output
    iteration = int(re.search(r"Stopped by a signal after iteration (\d+)\.", done.output)[1])
    assert 8 <= iteration < 18
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "stopped.pth")
    assert last_checkpoint(tmp_path)["meta"]["iter"] == iteration
    train(tmp_path, "--resume", *OPTIONS, SAVE_BEST)
    same_results(finished, tmp_path)
    assert not (tmp_path / "stopped.pth").exists()  # the next regular checkpoint took its place


@pytest.mark.slow
def test_two_processes_that_are_told_to_stop_go_on_exactly(train, tmp_path):
    options = (*TWO, *OPTIONS, "train_cfg.max_epochs=60")
    train(tmp_path / "whole", *options, launcher=TORCHRUN)
    stopped = tmp_path / "stopped"
    process = train.start(stopped, *options, launcher=TORCHRUN, start_new_session=True)
    wait_for(process, stopped, 8)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert "Stopped by a signal after iteration" in output
    assert (stopped / "last_checkpoint").read_text() == str(stopped / "stopped.pth")
    train(stopped, "--resume", *options, launcher=TORCHRUN)
    assert losses(stopped) == losses(tmp_path / "whole")


def rates(work_dir):
    return {step: record["lr"] for step, record in scalars(work_dir)[0].items()}


def lines_of(output):
    """List the differences of which the log warns."""
    return re.findall(r"^  (\S+(?: \S+)*?): (.*) -> (.*)$", output, re.MULTILINE)


DECAY = """
param_scheduler = [
    *_base_.param_scheduler,
    dict(
        type="CosineAnnealingParamScheduler", param_name="weight_decay", eta_min=0.3, by_epoch=True
    ),
]
"""


def decays(work_dir):
    groups = last_checkpoint(work_dir)["optimizer"]["param_groups"]
    return [group["weight_decay"] for group in groups]


def test_a_run_is_extended_at_another_rate_and_says_so(train, own, tmp_path):
    """Within an epoch and after its end; with a scaled floor of the rate, and a growing decay."""
    train = train.of(own(DECAY))
    options = ("--auto-scale-lr", "--cfg-options", *BY_ITERATION[:2])
    options += ("default_hooks.checkpoint.max_keep_ckpts=-1", SHORTENED[0])
    longer = (*options, "train_cfg.max_epochs=5", "optim_wrapper.optimizer.lr=5e-4")
    train(tmp_path / "short", *options)
    train(tmp_path / "whole", *longer)
    rest, run = tmp_path / "rest", tmp_path / "short"
    train(rest, "--resume", str(run / "iter_4.pth"), *longer)
    output = train(run, "--resume", *longer)
    assert lines_of(output) == [
        ("optim_wrapper.optimizer.lr", "0.000125", "6.25e-05"),  # as scaled
        ("train_cfg.max_epochs", "3", "5"),
    ]
    # The rates of a run that had this config from its start.
    expected = rates(tmp_path / "whole")
    for folder, start in ((rest, 4), (run, 9)):
        found = {n: rate for n, rate in rates(folder).items() if n > start}
        assert found == pytest.approx({n: expected[n] for n in range(start + 1, 16)}, rel=1e-6)
        assert decays(folder) == pytest.approx(decays(tmp_path / "whole"), rel=1e-6)
    (change,) = json.loads((run / "record.json").read_text())["config_changes"]
    assert change["iteration"] == 9
    assert change["changes"]["train_cfg.max_epochs"] == [3, 5]
    assert not lines_of(train(run, "--resume", *longer))


def test_a_run_goes_on_with_twice_the_images_in_half_the_batches(train, tmp_path):
    options = ("--cfg-options", *BY_ITERATION[:2], "train_cfg.max_epochs=2")
    options += ("default_hooks.checkpoint.max_keep_ckpts=9",)
    four, two = (f"optim_wrapper.accumulative_counts={number}" for number in (4, 2))
    train(tmp_path / "one", "--batch-size", "4", *options, four)  # 24 iterations, 6 steps
    start = str(tmp_path / "one" / "iter_16.pth")
    decay = "optim_wrapper.optimizer.weight_decay=0.3"
    output = train(tmp_path / "two", "--resume", start, "--batch-size", "8", *options, two, decay)
    assert ("iterations an epoch", "12", "6") in lines_of(output)
    last = last_checkpoint(tmp_path / "two")
    assert last["meta"]["iter"] == 12
    assert last["ema_state_dict"]["steps"] == 6
    assert {each["weight_decay"] for each in last["optimizer"]["param_groups"]} == {0, 0.3}


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(train, tmp_path):
    plain = (*OPTIONS, "model.train_cfg=None", "model.backbone.drop_path_rate=0.0")
    plain += (*BY_ITERATION[:2], "default_hooks.checkpoint.max_keep_ckpts=9")
    train(tmp_path / "two", *TWO, *plain, launcher=TORCHRUN)
    expected = losses(tmp_path / "two")
    resume = ("--resume", str(tmp_path / "two" / "iter_8.pth"))
    output = train(tmp_path / "one", *resume, "--batch-size", "8", *plain)
    assert ("processes", "2", "1") in lines_of(output)
    continued = losses(tmp_path / "one")
    assert list(continued) == list(range(9, 19))
    assert continued == pytest.approx({n: expected[n] for n in continued}, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", growing()], ids=["plain", "growth"])
def test_two_processes_follow_the_curve_of_one(train, own, tmp_path, more):
    train = train.of(own(more))
    plain = ("--cfg-options", "model.train_cfg=None", "model.backbone.drop_path_rate=0.0")
    plain += ("optim_wrapper.accumulative_counts=2", "env_cfg.dist_cfg.timeout=600")
    train(tmp_path / "one", "--batch-size", "8", *plain)
    train(tmp_path / "two", *TWO, *plain, launcher=TORCHRUN)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 18
    assert two == pytest.approx(one, rel=2e-5)


def test_other_data_and_no_state_are_refused(train, run, data_root, tmp_path):
    root = shutil.copytree(data_root, tmp_path / "images")
    train(run, "--resume", "--data-root", str(root))  # moved
    written = (run / "small.py").read_bytes()
    for index in range(3):
        (root / "train" / "dark" / f"{index}.png").unlink()  # as many iterations as before
    line = train.fails(run, "--resume", "--data-root", str(root))
    assert "48 training samples, and there are 45 now" in line
    (root / "train" / "dark").rename(root / "train" / "dusky")
    (root / "val" / "dark").rename(root / "val" / "dusky")
    line = train.fails(run, "--resume", "--data-root", str(root))
    assert "label 1 is 'dark' there and 'dusky' here" in line
    (best,) = run.glob("best_*.pth")
    line = train.fails(run, "--resume", str(best))
    assert "has only weights, not the state of a run" in line
    line = train.fails(run, "--resume", "--cfg-options", "default_hooks.ema=None")
    assert "has no EMAHook" in line
    assert (run / "small.py").read_bytes() == written  # the config of the run


DAMAGES = {
    "module.head.fc.bias is absent": lambda c: c["ema_state_dict"].pop("module.head.fc.bias"),
    "average in the checkpoint has other types": lambda c: c["ema_state_dict"].update(
        {name: tensor.long() for name, tensor in c["ema_state_dict"].items()}
    ),
    "checkpoint has other types": lambda c: c["state_dict"].update(
        {name: tensor.half() for name, tensor in c["state_dict"].items()}
    ),
    "does not fit this run": lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.ones(1)),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_state_is_refused(train, run, message):
    content = last_checkpoint(run)
    DAMAGES[message](content)
    torch.save(content, run / "epoch_3.pth")
    assert message.removeprefix("module.") in train.fails(run, "--resume")


def test_what_waits_for_a_step_is_saved_when_a_run_stops_early(train, own, tmp_path):
    """Of the five batches of a step, two belong to the first epoch, and two follow its end."""
    hook = {"type": "EarlyStoppingHook", "monitor": "accuracy/top1", "min_delta": 200}
    more = f"custom_hooks = [{ {**hook, 'rule': 'greater', 'patience': 1}!r}]"
    options = ("--cfg-options", "optim_wrapper.accumulative_counts=5", "train_cfg.max_epochs=9")
    train.of(own(more))(tmp_path / "run", *options)
    assert last_checkpoint(tmp_path / "run")["meta"]["epoch"] == 2
    assert (tmp_path / "run" / "epoch_2.pth").is_file()


TIMM = """
pipeline = [dict(type="LoadImage"), dict(type="PackInputs")]
model = dict(
    _delete_=True,
    type="TimmClassifier",
    **dict(model_name="vit_tiny_patch16_224", img_size=8, patch_size=4, num_classes=3),
    **dict(embed_dim=24, depth=1, num_heads=2, loss=dict(type="CrossEntropyLoss")),
)
train_dataloader = dict(dataset=dict(pipeline=pipeline))
"""


def test_a_model_that_renames_its_tensors_is_averaged_saved_and_resumed(train, own, tmp_path):
    train = train.of(own(TIMM))
    options = (*OPTIONS[:1], "default_hooks.checkpoint.max_keep_ckpts=9", "train_cfg.max_epochs=2")
    train(tmp_path / "whole", *options)
    train(tmp_path / "rest", "--resume", str(tmp_path / "whole" / "epoch_1.pth"), *options)
    assert losses(tmp_path / "rest").items() <= losses(tmp_path / "whole").items()
    same_weights(*(last_checkpoint(tmp_path / name) for name in ("whole", "rest")))


def test_a_full_disk_leaves_the_previous_checkpoint(train, tmp_path, monkeypatch):
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = TrainingRunner.save_checkpoint

    def then_fill_the_disk(runner, out_dir, name, **how):
        save(runner, out_dir, name, **how)
        # No file may grow beyond half a checkpoint, as if the disk were full.
        size = Path(out_dir, name).stat().st_size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))

    monkeypatch.setattr(TrainingRunner, "save_checkpoint", then_fill_the_disk)
    monkeypatch.setattr(signal, "SIGXFSZ", signal.SIG_IGN, raising=False)
    try:
        done = train.command("train", *train.arguments, "--work-dir", str(tmp_path))
    except (OSError, RuntimeError):
        done = None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert done is None or done.status != 0
    assert last_checkpoint(tmp_path)["meta"]["epoch"] == 1
    assert not list(tmp_path.glob(".*.partial"))
    assert not (tmp_path / "record.json").exists()


def test_two_runs_do_not_share_a_work_directory(train, tmp_path):
    with FileLock(tmp_path / ".lock"):  # as of another process
        assert f"{tmp_path} is in use" in train.fails(tmp_path)


def test_changes_of_places_and_of_how_the_same_is_computed_are_silent():
    old = {"model.drop": 0.1, "work_dir": "a", "train_dataloader.dataset.data_root": "a"}
    new = {"model.drop": 0.2, "work_dir": "b", "val_cfg.fp16": True, "model.other": 1}
    assert changed(old, new) == {"model.drop": (0.1, 0.2), "model.other": (None, 1)}
