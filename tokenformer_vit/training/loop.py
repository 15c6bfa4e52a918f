"""Loops of mmengine that can start in the middle of an epoch, and signals that end a run."""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_comm_device, get_world_size
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.runner.base_loop import BaseLoop
from mmengine.runner.utils import calc_dynamic_intervals
from torch import Tensor

from tokenformer_vit.errors import InputError

__all__ = ["ResumableEpochLoop", "ResumableIterLoop", "Termination"]

# SIGTERM ends a job of Slurm and others, USR1 is for `sbatch --signal=USR1@60`, and HUP ends a
# terminal. Windows has only the first.
SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
]
STATUS = 128 + 15  # of a process that SIGTERM ended, as shells report it
_LOOK_SECONDS = 5  # between two agreements of processes, and two looks of a worker


def copied_ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy batches to a GPU on a stream of their own.

    The processor is ahead of the GPU, which copies a batch while it still computes the step before.
    A batch is taken only when the loop asks for it: a resume loses none and repeats none, and the
    order of random draws stays. On a CPU the batches stay as they are.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)
    for batch in batches:
        if isinstance(batch, Mapping):
            main = torch.cuda.current_stream(device)
            with torch.cuda.stream(side):
                copies = {
                    name: value.to(device, non_blocking=True)
                    for name, value in batch.items()
                    if isinstance(value, Tensor)
                }
            main.wait_stream(side)
            for copy in copies.values():
                copy.record_stream(main)  # or the side stream could reuse its memory too early
            batch = {**batch, **copies}
        yield batch


@LOOPS.register_module()
class ResumableEpochLoop(EpochBasedTrainLoop):
    """mmengine's epoch loop; it can resume in the middle of an epoch."""

    def run_epoch(self) -> None:
        """Run the rest of the present epoch."""
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        loader: Any = self.dataloader
        first = self._iter - self._epoch * len(loader)
        if first:
            loader.sampler.start = first * loader.batch_size
        batches = copied_ahead(loader, torch.device(get_device()))
        for batch_idx, data_batch in enumerate(batches, start=first):
            self.run_iter(batch_idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1


@LOOPS.register_module()
class ResumableIterLoop(IterBasedTrainLoop):
    """mmengine's loop by iterations; each iteration is one optimiser step.

    With gradient accumulation an iteration takes all batches of the step, so schedules and
    intervals always count steps. A resumed run does not read the data before its start.

    Raises:
        InputError: If the sampler is not endless.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: Any,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: Any = None,
    ) -> None:
        # mmengine's would start the workers here, at the beginning of the data.
        BaseLoop.__init__(self, runner, dataloader)
        self._max_iters, self._max_epochs, self._epoch, self._iter = max_iters, 1, 0, 0
        self.val_begin, self.val_interval, self.stop_training = val_begin, val_interval, False
        self.dynamic_milestones, self.dynamic_intervals = calc_dynamic_intervals(
            val_interval, dynamic_intervals
        )
        dataset: Any = self.dataloader.dataset
        runner.visualizer.dataset_meta = getattr(dataset, "metainfo", None)
        sampler = getattr(self.dataloader, "sampler", None)
        if not getattr(sampler, "endless", False):
            raise InputError(
                f"train_dataloader.sampler is {type(sampler).__name__}, but ResumableIterLoop "
                "needs an endless one: set train_dataloader.sampler=dict(type='ResumableSampler', "
                "endless=True)"
            )

    def run(self) -> None:
        """Run the remaining iterations, with their validations."""
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        loader: Any = self.dataloader
        optim: Any = self.runner.optim_wrapper
        each = optim._accumulative_counts
        # The wrapper counts batches, but the runner gave it iterations.
        optim.initialize_count_status(self.runner.model, self._iter * each, self._max_iters * each)
        loader.sampler.start = self._iter * each * loader.batch_size
        batches = copied_ahead(loader, torch.device(get_device()))
        while self._iter < self._max_iters and not self.stop_training:
            self.runner.model.train()
            self.run_iter(list(islice(batches, each)))
            self._decide_current_val_interval()
            if self.runner.val_loop is not None and validation_is_due(self):
                self.runner.val_loop.run()
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")

    def run_iter(self, data_batch: Sequence[dict[str, Any]]) -> None:
        """Make one optimiser step.

        Args:
            data_batch: Batches of the step; their mean is logged.
        """
        self.runner.call_hook("before_train_iter", batch_idx=self._iter, data_batch=data_batch)
        parts = [
            self.runner.model.train_step(batch, optim_wrapper=self.runner.optim_wrapper)
            for batch in data_batch
        ]
        outputs = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        self.runner.call_hook(
            "after_train_iter", batch_idx=self._iter, data_batch=data_batch, outputs=outputs
        )
        self._iter += 1


def by_iteration(runner: Any) -> bool:
    """Tell whether a run counts iterations, not epochs."""
    return isinstance(runner.train_loop, IterBasedTrainLoop)


def validation_is_due(loop: Any) -> bool:
    """Tell whether a validation is due at the present place of a training loop."""
    if isinstance(loop, IterBasedTrainLoop):
        done, end = loop.iter, loop.max_iters
    elif loop.iter != loop.epoch * len(loop.dataloader):
        return False
    else:
        done, end = loop.epoch, loop.max_epochs
    return done > 0 and done >= loop.val_begin and (done % loop.val_interval == 0 or done == end)


class Termination:
    """Notes the signals that end a job, so that a checkpoint can be written first.

    ::

        with Termination() as termination:
            ...
            if termination.agreed():
                save_and_leave()
    """

    def __init__(self) -> None:
        self._noted = False
        self._running = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._before: dict[int, Any] = {}
        self._every, self._left, self._asked = 1, 1, time.monotonic()

    def __enter__(self) -> "Termination":
        """Begin to note signals. Outside the main thread this does nothing."""
        if threading.current_thread() is threading.main_thread():
            self._running[0] = 1
            self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
            # Python ends its workers by SIGTERM, so this must come first, even on errors.
            atexit.register(self.__exit__)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the former handlers."""
        self._running[0] = 0
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
        atexit.unregister(self.__exit__)

    def _note(self, number: int, frame: Any) -> None:
        self._noted = True

    def agreed(self) -> bool:
        """Tell whether any process noted a signal; all must call this after each iteration.

        Several processes ask each other about every 5 seconds, and wait for that. How many
        iterations take so long is also agreed on.
        """
        if get_world_size() == 1:
            return self._noted
        self._left -= 1
        if self._left > 0:
            return False
        seconds = time.monotonic() - self._asked
        told = torch.tensor([float(self._noted), seconds], device=get_comm_device())
        all_reduce(told, op="max")
        noted, seconds = told.tolist()
        # Three of the five seconds, and at most twice as many as before: iterations vary.
        fitting = int(self._every * 0.6 * _LOOK_SECONDS / max(seconds, 1e-3))
        self._every = max(1, min(2 * self._every, fitting))
        self._left, self._asked = self._every, time.monotonic()
        return bool(noted)

    def patient(self, start: Callable[[int], None] | None) -> Callable[[int], None]:
        """Return the ``worker_init_fn`` of a data loader whose workers survive these signals.

        The signals of a job also reach the workers, and PyTorch stops a run as soon as one ends.

        Args:
            start: The loader's own function.
        """
        return partial(_start_worker, start, self._running)


def _start_worker(start: Callable[[int], None] | None, running: Tensor, worker_id: int) -> None:
    """Start a worker that ends by a signal only when its run does not need it."""
    if start is not None:
        start(worker_id)

    def wait(number: int, frame: Any) -> None:
        if not running[0]:
            os._exit(0)
        signal.alarm(_LOOK_SECONDS)

    if hasattr(signal, "SIGALRM"):  # not on Windows
        for each in (*SIGNALS, signal.SIGALRM):
            signal.signal(each, wait)
