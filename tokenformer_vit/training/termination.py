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
from mmengine.dist import all_reduce, get_comm_device, get_world_size

from .background import snapshot

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
        if termination.noted:
            save_and_leave()
        termination.end()

    Attributes:
        noted: Whether a SIGTERM came.
        running: 1 while a run needs its workers, in memory shared with them.
    """

    def __init__(self) -> None:
        self.running = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self.noted = False
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True


class Agreement:
    """Tells all processes of a run at the same iteration what one of them noticed.

    With several processes, a call returns the answer to the call before. A GPU has it by then, so
    no process waits for the present iteration.
    """

    _last: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def any(self, *noticed: bool) -> list[bool]:
        """Tell which of these any process noticed.

        All processes must call this at the same iteration; all get the same answer.

        Args:
            *noticed: What this process noticed.
        """
        if get_world_size() == 1:
            return list(noticed)
        flags = torch.tensor(noticed, dtype=torch.uint8)
        device = get_comm_device()
        if device.type == "cuda":
            flags = flags.pin_memory().to(device, non_blocking=True)
        all_reduce(flags, op="max")
        before, self._last = self._last, snapshot(flags)
        if before is None:
            return [False] * len(noticed)
        answer, ready = before
        if ready is not None:
            ready.synchronize()
        return answer.bool().tolist()


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
