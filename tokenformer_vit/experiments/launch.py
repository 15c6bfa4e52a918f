"""Start trainings as processes, a few at a time; record each at its end; stop them together."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from .record import collect, find_record
from .run import ROOT, Run, shown

TRAIN = ("-m", "tokenformer_vit", "train")
LOOK = 0.5  # seconds between two looks at the processes
_PATIENCE = 30  # seconds that an interrupted training has to end


def command_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the command of a run without the interpreter."""
    launcher = []
    if args.nproc_per_node:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher.append(f"--nproc_per_node={args.nproc_per_node}")
    command = [*launcher, *TRAIN, shown(run.config), "--work-dir", shown(run.folder), "--resume"]
    return command if args.launcher == "none" else [*command, "--launcher", args.launcher]


class _Started(NamedTuple):
    """A training that was started."""

    run: Run
    process: subprocess.Popen
    log: Path
    begin: int  # where its part of the log begins
    slot: int  # number of its job, which selects its GPUs


def start(run: Run, slot: int, args: argparse.Namespace) -> _Started:
    """Start a training."""
    log = run.folder / "output.log"
    with log.open("ab") as file:
        begin = file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, *command_of(run, args)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(slot, args),
            start_new_session=True,  # Ctrl-C reaches it only once, through this process
        )
    return _Started(run, process, log, begin, slot)


def _environment(slot: int, args: argparse.Namespace) -> dict[str, str]:
    """Give each job as many GPUs as it has processes."""
    environment = dict(os.environ)
    paths = (str(ROOT / "ablations"), environment.get("PYTHONPATH"))  # with the probes
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if args.jobs > 1 and (count := torch.cuda.device_count()) > 1:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if len(visible) == count else [str(device) for device in range(count)]
        each = min(args.nproc_per_node or 1, count)
        first = slot % (count // each) * each
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + each])
    return environment


def train(waiting: Sequence[Run], args: argparse.Namespace) -> None:
    """Train runs, ``args.jobs`` at a time, and record each as it ends.

    Raises:
        KeyboardInterrupt: After Ctrl-C, SIGTERM or SIGHUP; the trainings have ended by then.
    """
    queue, active = list(waiting), []
    total = sum(run.length for run in waiting)
    unit = waiting[0].field.unit if waiting else "epoch"
    bar = tqdm(total=total, initial=sum(map(_done, waiting)), disable=None, unit=unit)
    with signals_interrupt(), bar:
        try:
            while queue or active:
                while len(active) < args.jobs and (run := _next(queue, active)):
                    queue.remove(run)
                    if reason := _cannot_start(run):
                        bar.write(f"{run.name} {reason}")
                        continue
                    slot = min(set(range(args.jobs)) - {started.slot for started in active})
                    active.append(start(run, slot, args))
                time.sleep(LOOK)
                for started in [each for each in active if each.process.poll() is not None]:
                    active.remove(started)
                    bar.write(_end(started))
                if not bar.disable:
                    under_way = [started.run for started in active]
                    bar.n = total - sum(run.length - _done(run) for run in [*queue, *under_way])
                    bar.set_description(", ".join(run.name for run in under_way))
        except KeyboardInterrupt:
            names = ", ".join(started.run.name for started in active)
            bar.write(f"stopping {names}", file=sys.stderr)
            _stop(active)
            bar.write(
                f"{len(queue) + len(active)} of {len(waiting)} runs are left; run the same command "
                "again to resume them",
                file=sys.stderr,
            )
            raise
        finally:
            _stop(active)


def _next(queue: Sequence[Run], active: Sequence[_Started]) -> Run | None:
    """Return the first run that does not wait for another run."""
    unfinished = [*queue, *(started.run for started in active)]
    return next((run for run in queue if run.start not in unfinished), None)


def _cannot_start(run: Run) -> str | None:
    """Make the folder of a run, and return why the run cannot start, or None if it can.

    If the run before it failed, it is recorded as failed.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    before = run.start
    if before is None or before.is_finished:
        return None
    record = find_record(before)
    if record is None:
        return f"is skipped: it starts from the end of {before.name}, which is not finished"
    if "failed" in record:
        reason = f"it starts from the end of {before.name}, which failed"
    else:
        reason = (
            f"it starts from the end of {before.name}, but {shown(before.folder)} has no finished "
            "training: delete the record of that run to train it again"
        )
    collect(run, failed=reason)
    return f"failed: {reason}"


def _end(started: _Started) -> str:
    """Record a training that ended, and return its result in words."""
    run, status = started.run, started.process.returncode
    if status == 0 and run.is_finished:
        record = collect(run)
        if "failed" in record:
            return f"{run.name} failed: {record['failed']}"
        if not run.has_result:
            return f"{run.name}: finished"
        measure = run.field.measure
        result = f"{measure.label} {record['final'][measure.name]:.2f} {measure.unit}"
        return f"{run.name}: {result}".rstrip()
    with started.log.open("rb") as file:
        file.seek(started.begin)
        line = error_line(file.read().decode(errors="replace"), status)
    # Only a training locks a folder. If a sweep tried the lock, a training could find it taken.
    if " is in use: " in line:
        return f"{run.name} is skipped: another process is training it"
    if status == 0:
        line = f"it ended without a record of {run.length} {run.field.length}"
    collect(run, failed=line)
    return f"{run.name} failed: {line} (see {shown(started.log)})"


def _stop(active: Sequence[_Started]) -> None:
    """Interrupt trainings and their workers, and wait until they are gone."""
    deadline = time.monotonic() + _PATIENCE
    for started in active:
        _signal(started, signal.SIGINT)
    try:
        for started in active:
            with suppress(subprocess.TimeoutExpired):
                started.process.wait(max(0, deadline - time.monotonic()))
    finally:
        for started in active:
            _signal(started, signal.SIGKILL)
            started.process.wait()


def _signal(started: _Started, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.process.pid, number)


def _done(run: Run) -> int:
    """Read from its newest log how many epochs or iterations of a training are done."""
    for log in sorted(run.folder.glob("*/vis_data/scalars.json"), reverse=True):
        with log.open("rb") as file:
            file.seek(-min(2048, file.seek(0, os.SEEK_END)), os.SEEK_END)
            begun = re.findall(run.field.begun, file.read())
        if begun:
            return int(begun[-1]) - 1
    return 0


def error_line(output: str, status: int) -> str:
    """Return the output line that says why a process failed; a signal gives a negative status."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # torchrun ends with its own error, which does not give the cause.
    raised = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
        and "ChildFailedError" not in line
    ]
    line = (ours or raised or lines or [f"exit status {status}, and no output"])[-1]
    return line.replace(f"{Path.cwd()}{os.sep}", "")


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat a scheduler's SIGTERM, and a terminal that is closed, like Ctrl-C.

    A shell starts background commands with SIGINT ignored, and their child processes would ignore
    it, too. Inside this context they do not.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
