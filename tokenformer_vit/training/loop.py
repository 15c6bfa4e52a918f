"""Loops of mmengine that can start in the middle of an epoch."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

from tokenformer_vit.errors import InputError

from .engine import LOOPS, BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop


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
        for batch_idx, data_batch in enumerate(loader, start=first):
            self.run_iter(batch_idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1


@LOOPS.register_module()
class ResumableIterLoop(IterBasedTrainLoop):
    """mmengine's loop by iterations; each iteration is one optimiser step.

    With gradient accumulation an iteration takes all batches of the step, so schedules and
    intervals always count steps. A resumed run does not read the data before its start.
    """

    max_iters, max_epochs = cast(Any, (0, 1))  # type: ignore  # in place of properties

    def __init__(self, runner, dataloader: Any, max_iters: int, val_interval: int = 1000) -> None:
        # mmengine's would start the workers here, at the beginning of the data.
        BaseLoop.__init__(self, runner, dataloader)
        self.max_iters, self._epoch, self._iter = max_iters, 0, 0  # type: ignore
        self.val_begin, self.val_interval, self.stop_training = 1, val_interval, False
        loader: Any = self.dataloader
        runner.visualizer.dataset_meta = loader.dataset.metainfo
        if not getattr(loader.sampler, "endless", False):
            raise InputError(
                "ResumableIterLoop needs train_dataloader.sampler=dict(type='ResumableSampler', "
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
        optim.initialize_count_status(self.runner.model, self._iter * each, self.max_iters * each)
        loader.sampler.start = self._iter * each * loader.batch_size
        batches = iter(loader)
        while self._iter < self.max_iters and not self.stop_training:
            self.runner.model.train()
            self.run_iter(list(islice(batches, each)))
            if self.runner.val_loop is not None and validation_is_due(self):
                self.runner.val_loop.run()
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")

    def run_iter(self, data_batch: Sequence[dict[str, Any]]) -> None:
        """Make one optimiser step of several batches; the mean of their losses is logged."""
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
