"""Measure the parts of a training step, in the training that a config describes.

Like every record, the record has the command, commit, date, hardware and versions. Its own keys
are::

    device, threads            cpu or cuda; threads of a CPU operation in each process
    processes                  number of processes; the times are those of the first
    config, small_tensors      name of the config; whether its model was shrunk
    dtype                      float32 or bfloat16 autocast
    parameters, tensors        of the model
    unit, items                image or token; number of them in a step, over all processes
    batch_size, accumulation   of one process; number of batches in a step
    warm_up, n                 number of steps that are not measured, and of those that are
    runs                       a list of
      data                     synthetic or real
      UNITs_per_s              over all measured steps
      peak_mib                 peak memory without workers, or null if unknown; on a GPU of tensors,
                               on a CPU the rise of the resident memory since the run began
      seconds                  time of every step
      seconds_p20, _p50, _p80
      overhead_p20, ...        processor seconds of OVERHEAD
      parts                    for each of PARTS, a part with
        seconds, ...           as above; the parts of a step add up to it
        cpu_seconds_p20, ...   processor time of this process; on a GPU: what the host does
"""

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from itertools import pairwise
from logging import FileHandler
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import MMLogger
from mmengine.runner import IterBasedTrainLoop

from tokenformer_vit.benchmarking.measures import peak_bytes
from tokenformer_vit.benchmarking.reports import named_percentiles
from tokenformer_vit.benchmarking.variants import short
from tokenformer_vit.errors import InputError

from .distributed import unwrap
from .launch import run_training
from .mmengine_internals import accumulation
from .progress import ProgressHook, dtype_of
from .steps import units_per_step

# The parts of a step, in their order.
PARTS = ("data", "copy", "preprocess", "forward_backward", "optimizer", "ema", "hooks")
# What a step does on the host besides the forward and the backward pass.
OVERHEAD = ("preprocess", "optimizer", "ema", "hooks")


class _Measured(Exception):
    """Ends a training after the last measured step."""


class StepTimer(Hook):
    """Split the time of each optimiser step into parts, then end the training.

    The parts follow each other without a gap, so their times add up to the time of the step. On a
    GPU they are measured by events on its stream, without a synchronisation; a part then also has
    the time for which the GPU waits before it. On a CPU they are measured by the clock.

    ``data`` is the time between two iterations, in which the loop fetches a batch and may copy it
    ahead. ``copy`` is a copy to the device in the data preprocessor. ``preprocess`` normalises and
    mixes images. ``forward_backward`` ends when the graph of autograd is freed. ``hooks`` is the
    rest: the hooks but for weight averaging, and the loop itself.

    Args:
        warm_up: Number of steps that are not measured, at least 1.
        steps: Number of measured steps.

    Raises:
        InputError: Before the training, if it has fewer steps.

    Attributes:
        runner: The runner of the training.
        seconds: Seconds of each measured step, by part; complete at the end.
        cpu_seconds: The same in processor time of this process.
        peak: Most bytes of tensors on the GPU in the warm-up.
    """

    priority = "HIGHEST"  # reads the peak before mmengine's logger resets it

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.runner: Any = None
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.cpu_seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.peak = 0
        self._part = "data"  # that runs now
        # A part that ended, when, and the processor time until then.
        self._marks: list[tuple[str, Any, float]] = []
        self._ends: list[int] = []  # number of marks at the end of each step
        self._stream: torch.cuda.Stream | None = None

    def before_train(self, runner) -> None:
        """Put marks around the parts of a step."""
        self.runner = runner
        runner.terminal.built = False  # the folder of this run, which it names, is temporary
        if next(runner.model.parameters()).is_cuda:
            self._stream = torch.cuda.current_stream()
        preprocessor, optim = unwrap(runner.model).data_preprocessor, runner.optim_wrapper
        self._time(preprocessor, "cast_data", "copy")
        self._time(preprocessor, "forward", "preprocess")
        self._time(runner.model, "forward", "forward_backward")
        self._free_graphs(runner.model)
        self._time(optim, "backward", "forward_backward")
        self._time(optim, "step", "optimizer")
        self._time(optim, "zero_grad", "optimizer")
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                self._time(hook, "after_train_iter", "ema")
        self._time(runner.train_loop, "run_iter", "hooks")
        self._count(runner.train_loop)

    def after_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Read the peak of the memory, in the warm-up."""
        if self._stream is not None and len(self._ends) < self.warm_up:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def _time(self, owner: Any, name: str, part: str) -> None:
        """Let a method of an object be timed as a part of the step."""
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._part
            if outer == part:  # a method that calls itself
                return method(*args, **kwargs)
            self._switch(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._switch(outer)

        setattr(owner, name, timed)

    def _free_graphs(self, model: Any) -> None:
        """Free the graph of a batch, which its losses hold, as the end of the backward pass.

        Otherwise it would be freed with the losses, after the hooks.
        """
        train_step = model.train_step

        def freed(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            losses = train_step(*args, **kwargs)
            outer = self._part
            self._switch("forward_backward")
            losses = {name: loss.detach() for name, loss in losses.items()}
            self._switch(outer)
            return losses

        model.train_step = freed

    def _switch(self, part: str) -> None:
        """End the present part, and begin another."""
        now: Any = time.perf_counter()
        if self._stream is not None:
            now = torch.cuda.Event(enable_timing=True)
            now.record(self._stream)
        self._marks.append((self._part, now, time.process_time()))
        self._part = part

    def _count(self, loop: Any) -> None:
        """Let a loop end the training after the iteration that completes the last step."""
        # An iteration of the other loop is one batch.
        each = 1 if isinstance(loop, IterBasedTrainLoop) else accumulation(self.runner)
        needed, steps = self.warm_up + self.steps, loop.max_iters // each
        if needed > steps:
            raise InputError(
                f"{self.runner.cfg.filename} trains for {steps} steps, but --warm-up "
                f"{self.warm_up} and --steps {self.steps} need {needed}: give fewer, or train "
                "longer by --cfg-options train_cfg.max_epochs=..., or max_iters"
            )
        run_iter: Callable[..., None] = loop.run_iter
        done = 0

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal done
            run_iter(*args, **kwargs)
            done += 1
            if done % each == 0:
                self._ends.append(len(self._marks))
            if len(self._ends) == needed:
                self._finish()
                raise _Measured

        loop.run_iter = counted

    def _finish(self) -> None:
        """Work out the seconds of the parts, and close the bar."""
        if self._stream is not None:
            torch.cuda.synchronize()
        for first, last in pairwise(self._ends[self.warm_up - 1 :]):
            for each in (*self.seconds.values(), *self.cpu_seconds.values()):
                each.append(0.0)
            marks = self._marks[first - 1 : last]
            for (_, before, cpu_before), (part, now, cpu) in pairwise(marks):
                took = now - before if self._stream is None else before.elapsed_time(now) / 1e3
                self.seconds[part][-1] += took
                self.cpu_seconds[part][-1] += cpu - cpu_before
        for hook in self.runner.hooks:
            if isinstance(hook, ProgressHook):
                hook.after_train(self.runner)


def has_data(cfg: Config) -> bool:
    """Tell whether the folder of a config's training data is there."""
    root = cfg.train_dataloader.dataset.get("data_root") or ()
    roots = [root] if isinstance(root, str) else root
    return bool(roots) and all(Path(each).exists() for each in roots)


def measure_loop(cfg: Config, warm_up: int, steps: int) -> dict[str, Any]:
    """Train for some steps, without validation and checkpoints, and measure them.

    The results of the training are written to a temporary folder, which is deleted.

    Args:
        cfg: Config of the training.
        warm_up: Number of optimiser steps before the measured ones.
        steps: Number of measured steps.

    Returns:
        The record without the machine and the command; ``runs`` has one entry, whose ``data`` is
        missing.

    Raises:
        InputError: As :func:`run_training`.
    """
    cfg = copy.deepcopy(cfg)
    for key in ("dataloader", "cfg", "evaluator"):
        cfg[f"val_{key}"] = None
    if checkpoint := cfg.get("default_hooks", {}).get("checkpoint"):
        checkpoint.update(interval=-1, save_last=False, save_best=None)
    timer = StepTimer(warm_up, steps)

    def run() -> None:
        try:
            with suppress(_Measured):
                run_training(cfg, timer)
        finally:
            _close_log()

    with tempfile.TemporaryDirectory(prefix="tokenformer-vit-loop-") as work_dir:
        cfg.work_dir, cfg.experiment_name = work_dir, Path(work_dir).name
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rise = peak_bytes(run, device)
    record = _record(timer, device, timer.peak or rise)
    timer.runner.train_loop.dataloader = None  # ends its workers
    timer.runner = None
    gc.collect()
    return record


def _close_log() -> None:
    """Close the log file of a run, because Windows cannot delete an open file."""
    logger = MMLogger.get_current_instance()
    for handler in [each for each in logger.handlers if isinstance(each, FileHandler)]:
        logger.removeHandler(handler)
        handler.close()


def _record(timer: StepTimer, device: torch.device, peak: int | None) -> dict[str, Any]:
    runner = timer.runner
    items, unit = units_per_step(runner)
    seconds = [sum(parts) for parts in zip(*timer.seconds.values(), strict=True)]
    overhead = [sum(x) for x in zip(*(timer.cpu_seconds[part] for part in OVERHEAD), strict=True)]
    parameters = list(runner.model.parameters())
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "processes": runner.world_size,
        "config": Path(runner.cfg.filename).stem,
        "dtype": dtype_of(runner),
        "parameters": sum(each.numel() for each in parameters),
        "tensors": len(parameters),
        "unit": unit,
        "items": items,
        "batch_size": runner.train_dataloader.batch_size,
        "accumulation": accumulation(runner),
        "warm_up": timer.warm_up,
        "n": timer.steps,
        "runs": [
            {
                f"{unit}s_per_s": short(items * len(seconds) / sum(seconds)),
                "peak_mib": None if peak is None else round(peak / 2**20),
                "seconds": [short(each) for each in seconds],
                **named_percentiles("seconds", seconds),
                **named_percentiles("overhead", overhead),
                "parts": [
                    {
                        "part": part,
                        "seconds": [short(each) for each in timer.seconds[part]],
                        **named_percentiles("seconds", timer.seconds[part]),
                        **named_percentiles("cpu_seconds", timer.cpu_seconds[part]),
                    }
                    for part in PARTS
                ],
            }
        ],
    }


def table(run: Mapping[str, Any], unit: str) -> str:
    """Lay out a run of a record as text; ``unit`` is the unit of speed."""
    step = {"part": "step", **run}
    lines = [
        f"{run['data']} data: {run[f'{unit}s_per_s']:,.1f} {unit}s/s",
        f"{'part':18}{'ms, median':>12}{'p20':>10}{'p80':>10}",
    ]
    for row in (*run["parts"], step):
        times = (1e3 * row[f"seconds_{point}"] for point in ("p50", "p20", "p80"))
        lines.append(f"{row['part']:18}" + "{:12.3f}{:10.3f}{:10.3f}".format(*times))
    overhead = 1e3 * run["overhead_p50"]
    lines.append(f"processor time of {', '.join(OVERHEAD)}: {overhead:.3f} ms a step")
    return "\n".join(lines)
