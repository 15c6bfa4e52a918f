"""Shortened epochs have all classes; resumed ones continue; failed data loading is explained."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from mmengine.runner import IterBasedTrainLoop

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import LoadImage
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.loop import (
    copied_ahead,
    loading_explained,
    validations_left,
)
from tokenformer_vit.training.reports import read_scalars

PER_CLASS, CLASSES = 16, 10
# The forms of mmpretrain's own configs.
STOCK_LOOP = "train_cfg = dict(_delete_=True, by_epoch=True, max_epochs=3, val_interval=1)\n"
SAMPLER = "train_dataloader = dict(sampler=dict(_delete_=True, type={!r}, shuffle=True{}))\n"


def test_a_run_by_iterations_needs_an_endless_sampler(train, tmp_path, config):
    path = tmp_path / "by_iterations.py"
    loop = "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=3)"
    path.write_text(f"_base_ = {str(config)!r}\n{loop}\nparam_scheduler = []\n")
    line = train.of(path).fails(tmp_path / "run")
    assert "dict(type='ResumableSampler', endless=True)" in line


def test_a_config_tells_the_sampler_how_short_an_epoch_is(config):
    options = {"train_dataloader.num_batch_per_epoch": 2, "val_dataloader.num_batch_per_epoch": 1}
    cfg = load_config(config, options, batch_size=5)
    assert cfg.train_dataloader.sampler.num_samples == 2 * 5
    assert cfg.val_dataloader.sampler.type == "ResumableSampler"
    assert cfg.val_dataloader.sampler.num_samples == 8
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        assert "num_batch_per_epoch" not in cfg[name]  # mmengine would take the first images
    assert "num_samples" not in cfg.test_dataloader.sampler


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_are_copied_in_order_and_none_is_taken_early(device):
    pinned = device == "cuda"
    images = torch.rand(20, 2, 3, 64, 64, pin_memory=pinned)
    taken = []

    def load():
        for index, image in enumerate(images):
            taken.append(index)
            yield {"inputs": image, "data_samples": [index]}

    for index, batch in enumerate(copied_ahead(load(), torch.device(device))):
        assert taken == list(range(index + 1))
        assert batch["data_samples"] == [index]
        assert batch["inputs"].device.type == device
        assert torch.equal(batch["inputs"].cpu(), images[index])


def scalars(work_dir):
    return read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", ["", STOCK_LOOP + SAMPLER.format("DefaultSampler", "")], ids=["ours", "stock"]
)
def test_a_shortened_run_resumes_in_the_middle_of_an_epoch(train, tmp_path, config, own):
    path = tmp_path / "own.py"
    path.write_text(f"_base_ = {str(config)!r}\n{own}")
    short = ("train", 3), ("val", 2)
    options = (
        *("--cfg-options", *(f"{name}_dataloader.num_batch_per_epoch={n}" for name, n in short)),
        "default_hooks.checkpoint.by_epoch=False",
        "default_hooks.checkpoint.interval=4",
    )
    train = train.of(path)
    train(tmp_path / "whole", *options)
    losses, validations = scalars(tmp_path / "whole")
    assert list(losses) == list(range(1, 10))
    assert list(validations) == [1, 2, 3]
    train(tmp_path / "rest", "--resume", str(tmp_path / "whole" / "iter_4.pth"), *options)
    rest, _ = scalars(tmp_path / "rest")
    assert {step: record["loss"] for step, record in rest.items()} == {
        step: losses[step]["loss"] for step in range(5, 10)
    }


def test_mmengines_loop_and_sampler_are_taken_for_ours(config, tmp_path):
    path = tmp_path / "stock.py"
    for own in (STOCK_LOOP, STOCK_LOOP.replace("by_epoch=True", "type='EpochBasedTrainLoop'")):
        path.write_text(f"_base_ = {str(config)!r}\n{own}{SAMPLER.format('DefaultSampler', '')}")
        cfg = load_config(path)
        assert cfg.train_cfg.type == "ResumableEpochLoop"
        assert cfg.train_dataloader.sampler == {"type": "ResumableSampler", "shuffle": True}


def test_another_sampler_resumes_only_between_epochs(train, tmp_path, config):
    path = tmp_path / "own.py"
    sampler = SAMPLER.format("RepeatAugSampler", ", num_repeats=1")
    path.write_text(f"_base_ = {str(config)!r}\n{sampler}")
    train = train.of(path)
    often = ("by_epoch=False", "interval=2", "max_keep_ckpts=-1")
    hook = (f"default_hooks.checkpoint.{option}" for option in often)
    options = ("--cfg-options", "train_cfg.max_epochs=2", *hook)
    train(tmp_path / "whole", *options)
    line = train.fails(tmp_path / "a", "--resume", tmp_path / "whole" / "iter_4.pth", *options)
    assert "iteration 4, within an epoch of 6" in line
    assert "RepeatAugSampler resumes only between epochs: resume from" in line
    train(tmp_path / "b", "--resume", str(tmp_path / "whole" / "iter_6.pth"), *options)


def test_mmengines_loop_by_iterations_resumes_where_it_was(train, tmp_path, config):
    path = tmp_path / "own.py"
    loop = "train_cfg = dict(_delete_=True, by_epoch=False, max_iters=5, val_interval=5)"
    sampler = "dict(_delete_=True, type='InfiniteSampler', shuffle=True)"
    images = "dict(pipeline=[dict(type='LoadImage'), dict(type='PackInputs')])"
    data = f"train_dataloader = dict(sampler={sampler}, dataset={images})"
    path.write_text(f"_base_ = {str(config)!r}\n{loop}\n{data}\n")
    by = ("by_epoch=False", "interval=4", "max_keep_ckpts=-1")
    hooks = [*(f"default_hooks.checkpoint.{option}" for option in by), "param_scheduler=[]"]
    train = train.of(path)
    train(tmp_path / "whole", "--cfg-options", *hooks)
    train(tmp_path / "rest", "--resume", tmp_path / "whole" / "iter_4.pth", "--cfg-options", *hooks)
    whole, rest = (scalars(tmp_path / name)[0] for name in ("whole", "rest"))
    assert list(rest) == [5]
    assert rest[5]["loss"] == whole[5]["loss"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_workers_of_a_run_by_iterations_survive_the_sigterm_of_a_job(
    train, tmp_path, config, monkeypatch
):
    path = tmp_path / "by_iterations.py"
    loop = "dict(_delete_=True, type='ResumableIterLoop', max_iters=3, val_interval=3)"
    data = "dict(num_workers=1, sampler=dict(endless=True))"
    path.write_text(
        f"_base_ = {str(config)!r}\ntrain_cfg = {loop}\ntrain_dataloader = {data}\n"
        "param_scheduler = []\ndefault_hooks = dict(checkpoint=dict(by_epoch=False))\n"
    )
    transform, main = LoadImage.transform, os.getpid()

    def terminated(self, results):
        if os.getpid() != main and "/train/" in results["img_path"]:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "survived").touch()
        return transform(self, results)

    monkeypatch.setattr(LoadImage, "transform", terminated)
    train.of(path)(tmp_path / "run")
    assert (tmp_path / "survived").exists()


@pytest.mark.parametrize("loader", ["train", pytest.param("val", marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_run_in_one_line(train, tmp_path, monkeypatch, loader):
    transform, main = LoadImage.transform, os.getpid()

    def killed(self, results):
        if os.getpid() != main and f"/{loader}/" in results["img_path"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return transform(self, results)

    monkeypatch.setattr(LoadImage, "transform", killed)
    line = train.fails(tmp_path, "--cfg-options", "train_cfg.max_epochs=2")
    assert "data loading failed (DataLoader worker (pid" in line
    assert "train_dataloader.num_workers=2" in line
    assert "/dev/shm" in line


@pytest.mark.parametrize(
    ("message", "explained"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. Out of shared memory", True),
        (
            "Caught RuntimeError in DataLoader worker process 0.\nunable to write to file "
            "</torch_1_2>: No space left on device (28)",
            True,
        ),
        ("unable to open shared memory object </torch_1> in read-write mode", True),
        ("Caught RuntimeError in DataLoader worker process 0.\nstack expects each tensor", False),
        ("out of resource: shared memory, Required: 300000, Hardware limit: 232448", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("", False),
    ],
)
def test_what_is_explained(message, explained):
    with pytest.raises(InputError if explained else RuntimeError) as raised, loading_explained():
        raise RuntimeError(message)
    assert isinstance(raised.value, InputError) == explained
    if explained:
        assert "\n" not in str(raised.value)
        assert message.splitlines()[-1] in str(raised.value)


@pytest.mark.parametrize("by_iteration", [True, False])
@pytest.mark.parametrize(
    ("begin", "interval", "end", "done", "left"),
    [
        (1, 1, 10, 0, 10),
        (1, 1, 10, 10, 0),
        (1, 3, 10, 0, 4),  # after 3, 6, 9 and 10
        (1, 3, 10, 3, 3),
        (1, 3, 9, 3, 2),
        (7, 3, 10, 0, 2),
        (7, 3, 10, 9, 1),
        (10, 3, 10, 0, 1),
        (11, 1, 10, 0, 0),
        (1, 100, 10, 0, 1),
    ],
)
def test_validations_to_come_are_counted(by_iteration, begin, interval, end, done, left):
    if by_iteration:
        loop = object.__new__(IterBasedTrainLoop)
        loop._iter, loop._max_iters = done, end
    else:
        loop = SimpleNamespace(epoch=done, max_epochs=end)
    loop.val_begin, loop.val_interval = begin, interval
    assert validations_left(loop) == left
