"""A training step reads nothing from the GPU; the log reads the losses at its interval."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.loop import ResumableEpochLoop
from tokenformer_vit.training.runner import run_training

INTERVAL = 3  # of the logger; an epoch has six iterations
RECIPE = """
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
model = dict(
    train_cfg=dict(
        _delete_=True, augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]
    )
)
default_hooks = dict(logger=dict(interval=3))
"""
ACCUMULATE = "optim_wrapper.accumulative_counts"
# bfloat16, images on the device that are augmented there, accumulated gradients.
MORE = {
    "optim_wrapper.type": "AutocastOptimWrapper",
    "train_dataloader.dataset.type": "ImagesInMemory",
    ACCUMULATE: 2,
}


class Reads(TorchFunctionMode):
    """Lists the methods by which a step would read losses or weights from a GPU.

    On a CPU, counters of optimisers and averages are read in other ways, as on any machine: the
    test on a GPU sees what those would wait for, and what mixing would.
    """

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        methods = (Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__)
        if func in (*methods, Tensor.__float__, Tensor.__int__):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def train_two_epochs(own, data_root, tmp_path):
    def train(options):
        options = {"train_cfg.max_epochs": 2, **options}
        cfg = load_config(own(RECIPE), options, str(data_root), work_dir=str(tmp_path / "run"))
        cfg.launcher = "none"
        run_training(cfg)

    return train


def between(found, options):
    """Keep the iterations between two lines of the log, behind the first step.

    The first loss is read, too, and the first step makes the optimiser's counters.
    """
    first = options.get(ACCUMULATE, 1)
    return [each for number, each in found.items() if number % INTERVAL and number > first]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(MORE, marks=pytest.mark.slow)],
    ids=["plain", "more"],
)
def test_a_step_reads_no_tensor_between_two_lines_of_the_log(
    train_two_epochs, monkeypatch, options
):
    run_iter, reads, rates, hubs = ResumableEpochLoop.run_iter, {}, {}, []

    def watched(loop, *batch):
        hubs.append(loop.runner.message_hub)
        rates[loop.iter + 1] = loop.runner.optim_wrapper.get_lr()["lr"][0]
        with Reads(reads.setdefault(loop.iter + 1, [])):
            run_iter(loop, *batch)

    monkeypatch.setattr(ResumableEpochLoop, "run_iter", watched)
    train_two_epochs({**options, "model.train_cfg": None})
    assert len(reads) == 12
    assert not any(between(reads, options))
    assert all(reads[number] == ["tolist"] for number in (3, 6, 9, 12))
    losses, counts = hubs[0].get_scalar("train/loss").data
    assert np.isfinite(losses).all()
    assert counts.tolist() == [1] * 12
    logged, _ = hubs[0].get_scalar("train/lr").data
    assert logged.tolist() == [rates[number] for number in (1, 3, 6, 9, 12)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, MORE, {**MORE, "compile_blocks": True}],
    ids=["mixing", "more", "compiled"],
)
def test_a_step_on_a_gpu_does_not_wait(train_two_epochs, monkeypatch, options):
    run_iter, starts = ResumableEpochLoop.run_iter, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def watched(loop, batch_idx, data_batch):
            torch.cuda.set_sync_debug_mode("warn")
            starts.append(len(caught))
            run_iter(loop, batch_idx, data_batch)

        monkeypatch.setattr(ResumableEpochLoop, "run_iter", watched)
        try:
            train_two_epochs(options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Up to the start of the next step: the copy of its batch counts, too.
    waits = {
        number: [str(w.message) for w in caught[start:end] if "synchronizing" in str(w.message)]
        for number, (start, end) in enumerate(pairwise([*starts, len(caught)]), start=1)
    }
    assert not any(between(waits, options))
    assert waits[INTERVAL]
