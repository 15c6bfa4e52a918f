"""Loops of mmengine that can start in the middle of an epoch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import Tensor

from tokenformer_vit.errors import InputError

from .mmengine_internals import accumulation


@contextmanager
def loading_explained() -> Iterator[None]:
    """Explain in one line why data loading workers died, and what to do.

    PyTorch raises this error from a signal handler, anywhere in the main process.

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
            "memory in /dev/shm. Use fewer workers, as in `--cfg-options "
            "train_dataloader.num_workers=2 val_dataloader.num_workers=2`, a smaller batch, or in "
            "a container --shm-size=8g; then add --resume"
        ) from error


def copied_ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy batches to a GPU on a stream of their own.

    The processor is ahead of the GPU, which copies a batch while it still computes the step before.
    A batch is taken only when the loop asks for it: a resume loses none and repeats none, and the
    order of random draws stays. On a CPU the batches stay as they are.

    Args:
        batches: Dicts with tensors in pinned memory; what is not a tensor stays as it is.
        device: Device of the model.
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

    @loading_explained()
    def run(self) -> Any:
        """Run the remaining epochs, with their validations."""
        return super().run()

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Its workers began without PatientWorker, and at the start of the data. A loader with
        # persistent workers holds it, too.
        loader: Any = self.dataloader
        del self.dataloader_iterator
        loader._iterator = None
        sampler = getattr(loader, "sampler", None)
        if not getattr(sampler, "endless", False):
            raise InputError(
                f"train_dataloader.sampler is {type(sampler).__name__}, but ResumableIterLoop "
                "needs an endless one: set train_dataloader.sampler=dict(type='ResumableSampler', "
                "endless=True)"
            )

    @loading_explained()
    def run(self) -> None:
        """Run the remaining iterations, with their validations."""
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        loader: Any = self.dataloader
        optim: Any = self.runner.optim_wrapper
        each = accumulation(self.runner)
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


def validation_is_due(loop: Any) -> bool:
    """Tell whether a validation is due at the present place of a training loop."""
    done, end = _progress(loop)
    if not isinstance(loop, IterBasedTrainLoop) and loop.iter != done * len(loop.dataloader):
        return False
    return done > 0 and done >= loop.val_begin and (done % loop.val_interval == 0 or done == end)


def validations_left(loop: Any) -> int:
    """Count the validations to come in a training loop, at its present interval."""
    done, end = _progress(loop)
    first = max(done + 1, loop.val_begin)
    regular = end // loop.val_interval - (first - 1) // loop.val_interval
    return max(regular, 0) + (end >= first and end % loop.val_interval != 0)


def _progress(loop: Any) -> tuple[int, int]:
    """Return the number of finished iterations or epochs, and their total."""
    if isinstance(loop, IterBasedTrainLoop):
        return loop.iter, loop.max_iters
    return loop.epoch, loop.max_epochs
