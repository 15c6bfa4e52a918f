"""The epoch loop and sampler of mmengine, able to start in the middle of an epoch."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from mmengine.dataset import DefaultSampler
from mmengine.registry import DATA_SAMPLERS, LOOPS
from mmengine.runner import EpochBasedTrainLoop


@DATA_SAMPLERS.register_module()
class ResumableSampler(DefaultSampler):
    """mmengine's sampler, which can leave out what an interrupted epoch has already used.

    Attributes:
        start: Number of this process's samples that the next pass leaves out.
    """

    start: int = 0

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of this process for the present epoch."""
        start, self.start = self.start, 0
        return islice(super().__iter__(), start, None)


@LOOPS.register_module()
class ResumableEpochLoop(EpochBasedTrainLoop):
    """mmengine's epoch loop; a checkpoint from within an epoch goes on where it was taken."""

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
