"""Notice SIGTERM, with which Slurm and others end a job, to write a checkpoint first."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.dist import all_reduce, get_world_size

# Exit status of a process that SIGTERM ended, as shells report it.
STATUS = 128 + 15
# Seconds between two checks of a data loading worker, after a SIGTERM, whether its run continues.
_LOOK_SECONDS = 5


class Termination:
    """Note a SIGTERM instead of ending the process.

    ::

        termination = Termination()
        termination.begin()
        ...
        if termination.requested():
            save_and_leave()
        termination.end()

    Attributes:
        running: Shared memory: 1 while a run needs its workers.
    """

    def __init__(self) -> None:
        self.running = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._noted = False
        self._answer: Callable[[], bool] = lambda: False
        self._before: Any = None

    def begin(self) -> None:
        """Begin to note SIGTERMs. Outside the main thread this does nothing."""
        if threading.current_thread() is threading.main_thread():
            self.running[0] = 1
            self._before = signal.signal(signal.SIGTERM, self._note)
            # Python ends its workers by the same signal, so this must come first, even on errors.
            atexit.register(self.end)

    def end(self) -> None:
        """Restore the former handler of SIGTERM."""
        if self._before is not None:
            self.running[0] = 0
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
            atexit.unregister(self.end)

    def requested(self) -> bool:
        """Tell whether any process of the run got a SIGTERM.

        All processes must call this at the same iteration; all get the same answer. With several
        processes it is the answer to the previous call: to wait for this one would let the GPU run
        idle.
        """
        if get_world_size() == 1:
            return self._noted
        # torch.tensor would copy from the CPU, which waits, too.
        flag = torch.full((), int(self._noted), device=get_device())
        all_reduce(flag, op="max")
        previous, self._answer = self._answer, _read_later(flag)
        return previous()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


def _read_later(flag: torch.Tensor) -> Callable[[], bool]:
    """Return a function that waits until the GPU has computed a flag, and reads it."""
    if not flag.is_cuda:
        return lambda: bool(flag)
    copy = torch.empty_like(flag, device="cpu", pin_memory=True)
    copy.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> bool:
        copied.synchronize()
        return bool(copy)

    return read


class PatientWorker:
    """Start a data loading worker that survives a SIGTERM while its run continues.

    A job's SIGTERM also reaches the workers. PyTorch stops the run as soon as a worker ends, which
    is before the checkpoint.

    Args:
        start: The loader's own ``worker_init_fn``; called first, with the worker's number.
        running: Attribute of :class:`Termination`.
    """

    def __init__(self, start: Callable[[int], None] | None, running: torch.Tensor) -> None:
        self._start = start
        self._running = running

    def __call__(self, worker_id: int) -> None:
        """Set the worker up."""
        if self._start is not None:
            self._start(worker_id)
        if sys.platform != "win32":
            for each in (signal.SIGTERM, signal.SIGALRM):
                signal.signal(each, self._wait)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if not self._running[0]:
            os._exit(0)
        signal.alarm(_LOOK_SECONDS)
