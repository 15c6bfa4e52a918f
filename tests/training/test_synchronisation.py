"""A training step reads nothing from the GPU; the log reads the losses at its interval."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from mmengine.hooks import EMAHook
from torch import Tensor
from torch.distributions import Beta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.data import mixing
from tokenformer_vit.training.loop import ResumableEpochLoop
from tokenformer_vit.training.runner import run_training

# Operators whose result decides what the processor does next: numbers and variable sizes.
OPERATORS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2")
# Methods that copy from a GPU, and that are no operator on a CPU.
METHODS = (Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__)
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
# A checkpoint is due after the first epoch, within an accumulated step; it would read the weights.
NO_MIXING = (
    "model = dict(train_cfg=None)\n"
    "default_hooks = dict(logger=dict(interval=3), checkpoint=dict(interval=2))\n"
)


class Operators(TorchDispatchMode):
    """List the operators that would make the processor wait, if the tensors were on a GPU.

    Tensors that are on the CPU on any machine, and what is computed of them, do not count.
    """

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_cpu = tensors and all(getattr(x, "on_cpu", False) for x in tensors)
        result = func(*args, **(kwargs or {}))
        if on_cpu:
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    x.on_cpu = True
        elif func.overloadpacket.__name__ in OPERATORS or _by_mask(func, args):
            self.found.append(str(func))
        return result


class Methods(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def on_cpu(draw):
    """Mark what is drawn as a tensor that is on the CPU on any machine."""

    def drawn(*args, **kwargs):
        tensor = draw(*args, **kwargs)
        tensor.on_cpu = True
        return tensor

    return drawn


def _by_mask(func, args):
    """Tell whether an operator takes the elements where a mask is true."""
    is_index = func.overloadpacket.__name__ in ("index", "index_put", "index_put_")
    return is_index and any(x is not None and x.dtype == torch.bool for x in args[1])


@pytest.fixture
def train_two_epochs(own, data_root, tmp_path):
    def train(text, options):
        options = {"train_cfg.max_epochs": 2, **options}
        cfg = load_config(own(text), options, str(data_root), work_dir=str(tmp_path / "run"))
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
    ("recipe", "options"),
    [
        pytest.param(RECIPE, {}, id="mixing"),
        pytest.param(NO_MIXING, {ACCUMULATE: 4}, id="labels", marks=pytest.mark.slow),
        pytest.param(RECIPE, MORE, id="more", marks=pytest.mark.slow),
    ],
)
def test_a_step_reads_no_tensor_between_two_lines_of_the_log(
    train_two_epochs, monkeypatch, recipe, options
):
    run_iter, reads, rates, hubs = ResumableEpochLoop.run_iter, {}, {}, []

    def watched(loop, batch_idx, data_batch):
        hubs.append(loop.runner.message_hub)
        rates[loop.iter + 1] = loop.runner.optim_wrapper.get_lr()["lr"][0]
        for state in loop.runner.optim_wrapper.optimizer.state.values():
            state["step"].on_cpu = True
        for hook in loop.runner.hooks:
            if isinstance(hook, EMAHook):
                hook.ema_model.steps.on_cpu = True
        found = reads.setdefault(loop.iter + 1, [])
        with Operators(found), Methods(found):
            run_iter(loop, batch_idx, data_batch)

    monkeypatch.setattr(ResumableEpochLoop, "run_iter", watched)
    # PyTorch's reads the labels on a CPU alone, to check them.
    for owner, name in ((torch, "multinomial"), (torch, "randint"), (Beta, "sample")):
        monkeypatch.setattr(owner, name, on_cpu(getattr(owner, name)))  # what mixing draws
    monkeypatch.setattr(mixing, "one_hot", lambda y, k: (y[:, None] == torch.arange(k)).long())
    train_two_epochs(recipe, options)
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
    [{}, MORE, {**MORE, "compile": True}],
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
            train_two_epochs(RECIPE, options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Up to the start of the next step: the copy of its batch counts, too.
    waits = {
        number: [str(w.message) for w in caught[start:end] if "synchronizing" in str(w.message)]
        for number, (start, end) in enumerate(pairwise([*starts, len(caught)]), start=1)
    }
    assert not any(between(waits, options))
    assert waits[INTERVAL]
