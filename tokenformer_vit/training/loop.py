"""The loops and the sampler of mmengine, able to start in the middle of an epoch."""

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from mmengine.dataset import DefaultSampler
from mmengine.registry import DATA_SAMPLERS, LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from tokenformer_vit.errors import InputError

from .mmengine_internals import accumulation


@DATA_SAMPLERS.register_module()
class ResumableSampler(DefaultSampler):
    """mmengine's sampler, which can leave out what an interrupted epoch has already used.

    Args:
        dataset: The data set.
        shuffle: Draw a new order in each epoch.
        seed: Seed of the orders, the same on all processes; None for one they agree on.
        round_up: Repeat samples until each process has as many.
        num_samples: Number of samples of each process in an epoch, to shorten it; None for all.
            With ``shuffle``, all processes together take a random subset, a new one in each epoch.
            Without, they take samples at even distances, the same each time.

    Attributes:
        start: Number of this process's samples that the next pass leaves out.
    """

    start: int = 0

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, round_up)
        self._spread = False
        if num_samples is not None and num_samples * self.world_size < len(dataset):
            self.num_samples, self.total_size = num_samples, num_samples * self.world_size
            self._spread = not shuffle

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of this process for the present epoch."""
        start, self.start = self.start, 0
        indices = map(int, self._spread_out()) if self._spread else super().__iter__()
        return islice(indices, start, None)

    def _spread_out(self) -> np.ndarray:
        """Return indices at even distances, those of this process."""
        own = np.arange(self.rank, self.total_size, self.world_size)
        return own * len(self.dataset) // self.total_size


@DATA_SAMPLERS.register_module()
class EndlessSampler(ResumableSampler):
    """Epoch after epoch without an end, each in an order of its own.

    Attributes:
        start: Number of this process's samples that the next pass leaves out, over all epochs.
    """

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of this process, from ``start`` on."""
        first, skip = divmod(self.start, self.num_samples)
        self.start = 0
        for epoch in count(first):
            self.set_epoch(epoch)
            yield from map(int, self._order()[skip:])
            skip = 0

    def _order(self) -> np.ndarray:
        """Return what mmengine's sampler would iterate over, in a fifth of the memory.

        A corpus has more rows than are to be held as Python's numbers, in each process.
        """
        rows = len(self.dataset)
        if self._spread:
            return self._spread_out()
        order = torch.arange(rows)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(rows, generator=generator)
        whole = np.resize(order.numpy(), self.total_size)  # from its beginning again
        return whole[self.rank :: self.world_size]


@contextmanager
def loading_explained() -> Iterator[None]:
    """Say in one line why data loading workers died, and what helps.

    PyTorch raises the error from a signal handler, anywhere in the main process.

    Raises:
        InputError: Instead of PyTorch's RuntimeError about its workers or shared memory.
    """
    try:
        yield
    except RuntimeError as error:
        # A worker's own error begins with "Caught RuntimeError in DataLoader worker process".
        # A file called torch_... is one in shared memory.
        signs = ("DataLoader worker (pid", "</torch_", "Pin memory thread exited")
        if not any(sign in str(error) for sign in signs):
            raise
        reason = str(error).strip().splitlines()[-1]
        raise InputError(
            f"data loading failed ({reason[:200]}): the machine is short of memory, or of shared "
            "memory in /dev/shm. Set fewer workers, as in `--cfg-options "
            "train_dataloader.num_workers=2 val_dataloader.num_workers=2`, a smaller batch, or in "
            "a container --shm-size=8g; then add --resume"
        ) from error


@LOOPS.register_module()
class ResumableEpochLoop(EpochBasedTrainLoop):
    """mmengine's epoch loop; a checkpoint from within an epoch goes on where it was taken."""

    def run(self) -> Any:
        """Run what is left of the epochs, with their validations."""
        with loading_explained():
            return super().run()

    def run_epoch(self) -> None:
        """Run what is left of the present epoch."""
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        loader: Any = self.dataloader
        first = self._iter - self._epoch * len(loader)
        if first:
            loader.sampler.start = first * loader.batch_size
        for batch_idx, data_batch in enumerate(loader, start=first):
            self.run_iter(batch_idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1


@LOOPS.register_module()
class ResumableIterLoop(IterBasedTrainLoop):
    """mmengine's loop by iterations, each an optimiser step.

    Under gradient accumulation an iteration takes as many batches as a step does, so that schedules
    and intervals mean steps, however many batches these are made of. A checkpoint goes on where it
    was taken, without reading the data before. The loop needs an :class:`EndlessSampler`.
    """

    def run(self) -> None:
        """Run what is left of the iterations, with their validations."""
        with loading_explained():
            self._run()

    def _run(self) -> None:
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        loader: Any = self.dataloader
        optim: Any = self.runner.optim_wrapper
        each = accumulation(self.runner)
        # It counts batches, but was told of iterations.
        optim.initialize_count_status(self.runner.model, self._iter * each, self._max_iters * each)
        loader.sampler.start = self._iter * each * loader.batch_size
        del self.dataloader_iterator  # of the base class: its workers would live on beside ours
        batches = iter(loader)
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
            data_batch: The batches of which it consists; what is logged is their mean.
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


def validation_is_due(loop: Any) -> bool:
    """Tell whether a training loop, which stands between two iterations, validates there."""
    done, end = _progress(loop)
    if not isinstance(loop, IterBasedTrainLoop) and loop.iter != done * len(loop.dataloader):
        return False
    return done > 0 and done >= loop.val_begin and (done % loop.val_interval == 0 or done == end)


def validations_left(loop: Any) -> int:
    """Count the validations that a training loop has before it, at its present interval."""
    done, end = _progress(loop)
    first = max(done + 1, loop.val_begin)
    regular = end // loop.val_interval - (first - 1) // loop.val_interval
    return max(regular, 0) + (end >= first and end % loop.val_interval != 0)


def _progress(loop: Any) -> tuple[int, int]:
    """Return the iterations or epochs that a loop has done, and has to do."""
    if isinstance(loop, IterBasedTrainLoop):
        return loop.iter, loop.max_iters
    return loop.epoch, loop.max_epochs
