"""Checkpoints written in the background: a copy of a run's state, and a thread that writes it."""

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .storage import write_checkpoint

# The best checkpoint and the regular one of the same iteration, which differ.
_MOST_WAITING = 2


class BackgroundWriter:
    """Writes checkpoints in a thread, one after another.

    After an error, such as a full disk, it writes nothing more.

    Attributes:
        background: Whether :meth:`write` returns before the file is complete.
    """

    background = True

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writes: deque[Future[None]] = deque()
        self._error: BaseException | None = None

    def write(
        self, checkpoint: dict[str, Any], path: str, backend_args: dict | None = None
    ) -> None:
        """Copy a checkpoint, and write the copy.

        The caller waits if two earlier checkpoints are not written yet: each takes memory.

        Args:
            checkpoint: State of a run, which may change as soon as this returns.
            path: Where to write it.
            backend_args: Settings of mmengine's storage of that path.
        """
        if len(self._writes) == _MOST_WAITING:
            self._writes.popleft().result()
        copied, ready = snapshot(checkpoint)

        def save() -> None:
            if ready is not None:
                ready.synchronize()
            write_checkpoint(copied, path, backend_args)

        self._writes.append(self.then(save))

    def then(self, job: Callable[[], None]) -> Future[None]:
        """Run a job after all writes so far, unless one of these failed."""
        future = self._thread.submit(self._run, job)
        if not self.background:
            self.wait()
        return future

    def check(self) -> None:
        """Raise the error of a write that failed.

        Raises:
            InputError: If the disk is full or cannot be written.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until everything is written, then raise as :meth:`check` does."""
        self._thread.submit(lambda: None).result()
        self._writes.clear()
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        if self._error is None:
            try:
                job()
            except BaseException as error:  # the main thread raises it
                self._error = error


@torch.no_grad()
def snapshot(state: Any) -> tuple[Any, torch.cuda.Event | None]:
    """Copy a state to main memory.

    Copies from a GPU take their turn in its current stream, so they hold what earlier operations
    wrote and later ones do not change them. The caller does not wait for them.

    Args:
        state: Dicts, lists and tuples of tensors, NumPy arrays and plain values.

    Returns:
        The copy. Tensors that are equal views of one memory share it again. Of a state with tensors
        on a GPU, also the event after which the copy is complete.
    """
    copies: dict[Any, Tensor] = {}

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if key not in copies:
                own = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                copies[key] = own.copy_(value, non_blocking=value.is_cuda)
            return copies[key]
        if isinstance(value, dict):
            new = copy.copy(value)  # with the metadata that a state dict has as an attribute
            new.update((key, taken(item)) for key, item in value.items())
            return new
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(taken, value))
        if isinstance(value, list | tuple):
            return type(value)(map(taken, value))
        return value.copy() if isinstance(value, np.ndarray) else value

    copied = taken(state)
    if not torch.cuda.is_initialized():
        return copied, None
    ready = torch.cuda.Event(blocking=True)
    ready.record()
    return copied, ready
