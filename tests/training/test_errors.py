"""A user's mistake ends in one line with the mistake and the way out."""

import copy
import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmpretrain.registry import MODELS
from PIL import Image

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import DESCRIPTION
from tokenformer_vit.training import (
    AtomicLocalBackend,
    ExactCheckpointHook,
    GuardHook,
    LabelHead,
    LoadImage,
    load_plain_checkpoint,
)
from tokenformer_vit.training.config import (
    load_config,
)
from tokenformer_vit.training.guard import check_same_classes, check_weights
from tokenformer_vit.training.launch import TrainingRunner, run_training
from tokenformer_vit.training.processes import start_processes
from tokenformer_vit.training.schedule import (
    check_training_is_kept,
    training_settings,
)


@pytest.mark.parametrize("enable", [True, False])
def test_scaling_the_learning_rate_counts_accumulated_images(config, tmp_path, enable):
    options = {
        **{"optim_wrapper.accumulative_counts": 4, "auto_scale_lr.enable": enable},
        "auto_scale_lr.base_batch_size": 16,
    }
    cfg = load_config(config, options, work_dir=str(tmp_path))
    runner = TrainingRunner.from_cfg(cfg)
    runner.optim_wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
    before = [group["lr"] for group in runner.optim_wrapper.optimizer.param_groups]
    runner.scale_lr(runner.optim_wrapper, cfg.auto_scale_lr)
    factor = 4 * 8 / 16 if enable else 1
    after = [group["lr"] for group in runner.optim_wrapper.optimizer.param_groups]
    assert after == [factor * lr for lr in before]


@pytest.mark.parametrize("content", [[1, 2], {}, {"weight": "text"}])
def test_a_file_without_a_state_dict_is_refused(content):
    with pytest.raises(InputError, match="holds no state dict"):
        check_weights(torch.nn.Linear(2, 2), content)


@pytest.mark.parametrize("name", ["epoch_1.pth", "model.safetensors"])
def test_a_run_does_not_take_weights_of_another_theta(trained, name):
    checkpoint = load_plain_checkpoint(str(trained.work_dir / name))
    cfg = load_config(trained.config)
    cfg.model.backbone.theta = "gelu_l1"
    with pytest.raises(InputError, match=r"theta is 'gelu_l1', but .* trained with 'gelu_l2'"):
        check_weights(MODELS.build(cfg.model), checkpoint)
    cfg.model.backbone.theta = "gelu_l2"
    check_weights(MODELS.build(cfg.model), checkpoint)
    cfg.model.backbone.num_heads = 6
    with pytest.raises(InputError, match=r"num_heads is 6, but .* trained with 2"):
        check_weights(MODELS.build(cfg.model), checkpoint)
    cfg.model.backbone.num_heads = 2
    checkpoint[DESCRIPTION] = {"model_args": "not a dict"}
    check_weights(MODELS.build(cfg.model), checkpoint)


def test_a_resumed_run_does_not_train_the_average(train, trained, tmp_path):
    words = (
        "--resume",
        trained.work_dir / "epoch_1.pth",
        "--cfg-options",
        "default_hooks.ema=None",
    )
    line = train.fails(tmp_path, *words)
    assert "has no EMAHook" in line
    assert "default_hooks.ema again" in line


def test_a_resumed_run_keeps_its_precision_and_its_steps(train, trained, tmp_path):
    """The run was trained with --amp; these settings changed its numbers without a word."""
    words = (
        *("--seed", "5", "--resume", trained.work_dir / "epoch_1.pth", "--cfg-options"),
        *("train_cfg.max_epochs=2", "optim_wrapper.accumulative_counts=2"),
        "optim_wrapper.optimizer.lr=5e-3",
    )
    line = train.fails(tmp_path, *words)
    assert "optim_wrapper.type (--amp) was AutocastOptimWrapper in the checkpoint" in line
    line = train.fails(tmp_path, "--amp", *words, "optim_wrapper.paramwise_cfg.norm_decay_mult=1")
    assert "optim_wrapper.paramwise_cfg was {'norm_decay_mult': 0.0" in line
    path = tmp_path / "clipped.py"
    path.write_text(
        f"_base_ = {str(trained.config)!r}\noptim_wrapper = dict(clip_grad=dict(max_norm=0.1))\n"
    )
    line = train.of(path).fails(tmp_path, "--amp", *words)
    assert "optim_wrapper.clip_grad was {} in the checkpoint and is {'max_norm': 0.1} now" in line


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "model.backbone.drop_path_rate=0.9",
            "drop_path_rate was 0.2 in the checkpoint and is 0.9",
        ),
        ("data_preprocessor.mean=[0,0,0]", "data_preprocessor.mean was ["),
        ("default_hooks.ema.momentum=0.4", "default_hooks.ema.momentum was "),
        ("randomness.seed=6", "randomness.seed was 5 in the checkpoint and is 6 now"),
        ("train_dataloader.dataset.pipeline.0.type=LoadImageFromFile", "pipeline.0.type was "),
        ("train_dataloader.sampler.shuffle=False", "sampler.shuffle was True in the checkpoint"),
    ],
)
def test_a_resumed_run_keeps_what_it_trains(train, trained, tmp_path, option, words):
    """These settings changed its numbers without a word, or had no effect."""
    line = train.fails(
        tmp_path,
        *("--amp", "--resume", trained.work_dir / "epoch_1.pth", "--cfg-options"),
        *("randomness.seed=5", "train_cfg.max_epochs=2", "optim_wrapper.optimizer.lr=5e-3"),
        *("default_hooks.ema.momentum=0.5", "optim_wrapper.accumulative_counts=2", option),
    )
    assert words in line


def resumed(cfg, options):
    """Resume a run with other options."""
    before = training_settings(cfg)
    now = copy.deepcopy(cfg)
    now.train_dataloader.update(options)
    check_training_is_kept(now, before)


def test_a_resumed_run_keeps_the_order_of_its_data(config):
    cfg = load_config(config, {"train_dataloader.num_batch_per_epoch": 4})
    changes = [
        ({"sampler": {**cfg.train_dataloader.sampler, "repeats": 2}}, "sampler.repeats was 1"),
        ({"sampler": {"endless": True}}, "sampler.endless was"),
        ({"collate_fn": {"type": "pseudo_collate"}}, "collate_fn.type was default_collate"),
        ({"drop_last": True}, "drop_last was False in the checkpoint and is True now"),
        ({"batch_sampler": {"type": "BatchSampler"}}, "batch_sampler.type was not set"),
        (
            {"sampler": {**cfg.train_dataloader.sampler, "num_samples": 40}},
            "num_batch_per_epoch was 4 in the checkpoint and is 5 now",
        ),
    ]
    for options, words in changes:
        with pytest.raises(InputError, match=f"train_dataloader.{words}"):
            resumed(cfg, options)
    half = {**cfg.train_dataloader.sampler, "num_samples": 16}
    resumed(cfg, {"batch_size": 4, "sampler": half})  # of two processes
    resumed(cfg, {"num_workers": 7, "pin_memory": True, "prefetch_factor": 3})


ARC = {"type": "ArcFaceClsHead", "num_classes": 3, "in_channels": 24, "_delete_": True}
PACKED = [{"type": "LoadImage"}, {"type": "PackInputs"}]


def own_head(config, path, head, more=""):
    path.write_text(
        f"_base_ = {str(config)!r}\nmodel = dict(head={head!r}, train_cfg=None)\n"
        f"train_dataloader = dict(num_workers=0, dataset=dict(pipeline={PACKED!r}))\n"
        f"train_cfg = dict(max_epochs=1)\nparam_scheduler = []\n{more}\n"
    )
    return path


def test_a_model_for_several_labels_an_image_trains(train, config, data_root, tmp_path, command):
    files = sorted(data_root.glob("train/*/*.png"))
    labelled = [
        {"img_path": str(file), "gt_label": [0, 2] if index % 2 else [1]}
        for index, file in enumerate(files)
    ]
    listed = tmp_path / "labels.json"
    listed.write_text(json.dumps({"metainfo": {"classes": "abc"}, "data_list": labelled}))
    of_several = {"type": "MultiLabelDataset", "ann_file": str(listed), "_delete_": True}
    head = {**ARC, "type": "MultiLabelLinearClsHead"}
    own = own_head(
        config,
        tmp_path / "own.py",
        head,
        f"train_dataloader['dataset'] = dict({of_several!r}, pipeline={PACKED!r})\n"
        f"val_dataloader = dict(dataset=dict({of_several!r}, pipeline={PACKED!r}))\n"
        "test_dataloader = val_dataloader\n"
        "val_evaluator = dict(_delete_=True, type='AveragePrecision')\n"
        "test_evaluator = val_evaluator",
    )
    run = tmp_path / "run"
    words = [str(own), "--work-dir", str(run)]
    done = command("train", *words)
    assert done.status == 0, done.output
    assert "multi-label/mAP" in done.output
    done = command("test", str(own), str(run / "epoch_1.pth"), "--out", str(tmp_path / "tested"))
    assert done.status == 0, done.output
    measured = json.loads((tmp_path / "tested" / "metrics.json").read_text())["metrics"]
    assert measured.keys() == {"multi-label/mAP"}


@pytest.mark.parametrize("content", ["truncated", "text", "missing"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_an_unreadable_image_is_named(tmp_path, content, suffix, seed):
    path = tmp_path / f"broken.{suffix}"
    if content == "truncated":
        rng = np.random.default_rng(seed)
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:-400])
    elif content == "text":
        path.write_text("not an image")
    with pytest.raises(InputError, match=rf"cannot read image .*broken\.{suffix}.*replace or del"):
        LoadImage()({"img_path": str(path)})


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_corrupt_image_stops_training_with_its_name(train, data_root, tmp_path, workers):
    root = tmp_path / "images"
    shutil.copytree(data_root, root)
    (root / "train" / "dark" / "3.png").write_bytes(b"\x89PNG broken")
    line = train.fails(
        tmp_path / "run",
        "--data-root",
        str(root),
        "--cfg-options",
        f"train_dataloader.num_workers={workers}",
    )
    assert "cannot read image" in line
    assert "dark/3.png" in line


def test_unknown_theta_lists_the_known(train, tmp_path):
    line = train.fails(tmp_path, "--cfg-options", "model.backbone.theta=gelu_l3")
    assert "theta must be one of softmax, gelu_l1, gelu_l2, gelu_l2_post" in line


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(train, tmp_path):
    line = train.fails(
        tmp_path,
        "--cfg-options",
        "optim_wrapper.optimizer.lr=1e30",
        "param_scheduler.0.start_factor=1e-33",
        "default_hooks.checkpoint.by_epoch=False",
    )
    assert "the loss is" in line
    assert "learning rate" in line
    last = Path((tmp_path / "last_checkpoint").read_text())
    assert f"the last good checkpoint is kept: {last}" in line
    weights = torch.load(last, weights_only=True)["state_dict"]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_a_loss_is_read_before_a_checkpoint(train, tmp_path, monkeypatch):
    """One loss is not finite, and the logger's interval is longer than the run."""
    loss, steps = LabelHead.loss, iter(range(100))

    def infinite_once(*args, **kwargs):
        factor = torch.inf if next(steps) == 7 else 1
        return {name: value * factor for name, value in loss(*args, **kwargs).items()}

    monkeypatch.setattr(LabelHead, "loss", infinite_once)
    # Without a step the weights stay finite.
    monkeypatch.setattr(OptimWrapper, "should_update", lambda self: False)
    line = train.fails(
        tmp_path,
        "--cfg-options",
        *("default_hooks.logger.interval=100", "default_hooks.checkpoint.by_epoch=False"),
        "default_hooks.checkpoint.interval=3",
    )
    assert "the loss is inf at iteration 8 " in line
    assert {path.name for path in tmp_path.glob("*.pth")} == {"iter_3.pth", "iter_6.pth"}


@pytest.fixture
def runner():
    """Make what a hook sees of a run in its fourth iteration."""
    hub = MessageHub("run")
    hub.update_info("last_ckpt", "epoch_1.pth")
    return SimpleNamespace(
        model=torch.nn.Linear(2, 2),
        hooks=[GuardHook()],
        message_hub=hub,
        optim_wrapper=SimpleNamespace(get_lr=lambda: {"lr": [0.1]}),
        train_dataloader=range(9),
        train_loop=None,
        iter=3,
        epoch=1,
    )


def test_a_model_that_diverged_is_not_validated(runner):
    """It could become the best checkpoint."""
    (hook,) = runner.hooks
    hook._first = 0
    hook.after_train_iter(runner, 3, None, {"loss": torch.tensor(1.0)})
    hook.before_val(runner)
    hook.after_train_iter(runner, 3, None, {"loss": torch.tensor(torch.nan)})
    runner.iter = 5
    with pytest.raises(InputError, match=r"the loss is nan at iteration 4.*kept: epoch_1\.pth"):
        hook.before_val(runner)


def test_weights_that_are_not_finite_are_not_saved(runner):
    torch.nn.init.constant_(runner.model.weight, torch.inf)
    hook = ExactCheckpointHook(max_keep_ckpts=1)
    with pytest.raises(InputError, match=r"not finite at iteration 4.*is kept: epoch_1\.pth"):
        hook._save_checkpoint_with_step(runner, 2, {})


def test_a_metric_whose_names_are_unknown_is_checked_at_the_first_validation(runner):
    hook = ExactCheckpointHook(save_best="accuracy/top1_at_0.5")
    hook._check_best(["accuracy/top1"], "_at_")  # it may be of a nested model
    with pytest.raises(InputError, match=r"'accuracy/top1_at_0\.5', but .* multi-label/mAP: give"):
        hook.after_val_epoch(runner, {"multi-label/mAP": 1.0})
    ExactCheckpointHook(save_best="auto")._check_best(["loss"])


def test_labels_of_other_classes_are_refused():
    known = ["ant", "bee", "cat"]
    same = SimpleNamespace(metainfo={"classes": ("ant", "bee", "cat")})
    other = SimpleNamespace(metainfo={"classes": ("ant", "cat", "dog")})
    check_same_classes("checkpoint", known, same)
    check_same_classes("checkpoint", None, other)
    with pytest.raises(InputError, match="label 1 is 'bee' there and 'cat' in these data"):
        check_same_classes("checkpoint", known, other)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("say this"), 1, "error: say this"),
        (
            InputError("Caught in worker\nTraceback ...\ntokenformer_vit.errors.InputError: this"),
            1,
            "error: this",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "curves.png"),
            1,
            "error: curves.png: No space left on device",
        ),
        (KeyboardInterrupt(), 130, "interrupted; finished results are kept"),
    ],
)
def test_tools_end_in_one_line(capsys, error, status, line):
    def main():
        raise error

    with pytest.raises(SystemExit) as raised:
        run_tool(main)
    assert raised.value.code == status
    assert capsys.readouterr().err == f"{line}\n"


def test_an_epoch_without_a_whole_batch_is_refused(config, data_root, tmp_path):
    cfg = load_config(config, data_root=str(data_root), batch_size=49, work_dir=str(tmp_path))
    cfg.train_dataloader.drop_last = True
    with pytest.raises(
        InputError, match=r"batch size is 49.*48 samples.*--batch-size of at most 48"
    ):
        run_training(cfg)


def test_processes_without_torchrun(config, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    cfg = load_config(config)
    cfg.launcher = "pytorch"
    with pytest.raises(InputError, match="--launcher pytorch needs torchrun"):
        start_processes(cfg)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(train, tmp_path):
    train(tmp_path, "--cfg-options", "train_cfg.max_epochs=2")
    line = train.fails(
        tmp_path,
        "--resume",
        "--cfg-options",
        "model.backbone.embed_dim=36",
        "model.head.in_channels=36",
    )
    assert "the checkpoint is of another model" in line
    assert "is (1, 1, 24) in the file and (1, 1, 36) in the model" in line
    line = train.fails(
        tmp_path, "--resume", "--batch-size", "12", "--cfg-options", "train_cfg.max_epochs=2"
    )
    assert "6 iterations an epoch, this run has 4" in line


class Trap:
    """Leaves a mark if it is unpickled by a loader that runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (self.mark.touch, ())


def test_loading_a_checkpoint_runs_no_code(tmp_path):
    mark = tmp_path / "executed"
    torch.save({"state_dict": {}, "trap": Trap(mark)}, tmp_path / "trap.pth")
    with pytest.raises(InputError, match=r"trap\.pth is damaged, or holds more than tensors"):
        load_plain_checkpoint(str(tmp_path / "trap.pth"))
    assert not mark.exists()
    with (tmp_path / "trap.pth").open("wb") as file:
        pickle.dump(Trap(mark), file)
    with pytest.raises(InputError):
        load_plain_checkpoint(str(tmp_path / "trap.pth"))
    assert not mark.exists()


def test_damaged_checkpoints_are_named(tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(1000)}}, tmp_path / "cut.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "cut.pth").read_bytes()[:900])
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00")
    for name in ("cut.pth", "cut.safetensors", "absent.pth"):
        with pytest.raises(InputError, match=name) as raised:
            load_plain_checkpoint(str(tmp_path / name))
        assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "epoch_1.pth"
    backend = AtomicLocalBackend()
    backend.put(b"good", path)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        InputError, match=r"cannot write .*epoch_1\.pth \(No space left on device\)"
    ):
        backend.put(b"longer and never whole", path)
    assert path.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [path]
