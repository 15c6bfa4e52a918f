"""Run stages one after the other within a number of minutes, and keep what each of them gives.

The folder of a device has::

    records/      the records; its folders are those of the repository
    logs/         what each stage printed
    stages.json   how each stage ended, its command and its seconds
    summary.md    the same as a table, and the end of each log

It is packed into an archive beside it, ``DEVICE.zip``, after each stage.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenformer_vit.command_line import error_line, printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import locked_folder, whole_file, write_whole
from tokenformer_vit.interrupts import signals_interrupt
from tokenformer_vit.records import write_record

from .stages import Stage

ROOT = Path(__file__).resolve().parents[2]  # of a clone
DONE, FAILED, OUT_OF_TIME = "done", "failed", "out of time"
# Seconds that an interrupted stage has to end. A sweep gives its trainings 30 of them.
_PATIENCE = 40
_LOOK = 0.2  # seconds between two looks at a stage
_LAST_LINES = 12  # of each log, in the summary
_SIGN_OF_LIFE = 60  # seconds between two lines about a stage

Entry = dict[str, Any]


class Stages:
    """The stages of a device, and how they ended.

    Args:
        stages: Stages, in their order.
        folder: Folder of the device.
        words: Values of the words in the commands.
        environment: How :func:`tokenformer_vit.records.environment` describes the machine.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        folder: Path,
        words: Mapping[str, str],
        environment: Mapping[str, Any],
    ) -> None:
        self.stages, self.folder, self.words = stages, folder, words
        self.about = dict(environment)
        self.ended: dict[str, Entry] = {}

    def run(self, minutes: float | None, retry_failed: bool) -> bool:
        """Run the stages that are left.

        Args:
            minutes: Most minutes for all stages; None for no limit.
            retry_failed: Also run the stages that failed before.

        Returns:
            False if one of these stages has failed, now or before.

        Raises:
            InputError: If another process runs stages in the folder, or the folder has results of
                other hardware.
            KeyboardInterrupt: After Ctrl-C or SIGTERM; the stage has ended by then.
        """
        end = time.monotonic() + 60 * minutes if minutes is not None else math.inf
        for part in ("records", "logs"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        left_out = {}
        with locked_folder(self.folder, "choose another --out"), signals_interrupt():
            self._read_earlier()
            for number, stage in enumerate(self.stages, 1):
                # The time in which a stage ends after its limit counts, too.
                seconds = min(60 * stage.minutes, end - time.monotonic() - _PATIENCE)
                if reason := self._skip(stage, seconds, retry_failed):
                    left_out[stage.name] = reason
                    print(f"{stage.name}: {reason}", flush=True)
                    continue
                later = sum(
                    each.minutes
                    for each in self.stages[number:]
                    if not self._skip(each, math.inf, retry_failed)
                )
                print(
                    f"{stage.name}: stage {number} of {len(self.stages)}, at most "
                    f"{seconds / 60:.1f} minutes; at most {later:g} for those after it",
                    flush=True,
                )
                try:
                    self.ended[stage.name] = entry = self._run(stage, seconds)
                finally:  # the archive also has what an interrupted stage measured
                    self._write(left_out)
                print(f"{stage.name}: {entry['status']}: {entry['line']}", flush=True)
            print(self._write(left_out), end="")
        return not any(
            self.ended.get(stage.name, {}).get("status") == FAILED for stage in self.stages
        )

    def _read_earlier(self) -> None:
        """Read how stages ended before.

        Raises:
            InputError: If they ran on other hardware.
        """
        path = self.folder / "stages.json"
        if not path.is_file():
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["hardware"] != self.about["hardware"]:
            raise InputError(
                f"{self.folder} has results of {earlier['hardware']}, and this machine has "
                f"{self.about['hardware']}: choose another --out"
            )
        self.ended = earlier["stages"]

    def _skip(self, stage: Stage, seconds: float, retry_failed: bool) -> str:
        """Say why a stage does not run, if it does not."""
        status = self.ended.get(stage.name, {}).get("status")
        makes, needs = (self._path(text) for text in (stage.makes, stage.needs))
        if status == DONE and (makes is None or makes.exists()):
            return "recorded already"
        if status == FAILED and not retry_failed:
            return "failed before; --retry-failed tries again"
        if stage.makes and not stage.takes and makes and makes.exists():
            return f"{makes} is there"
        program = Path(stage.arguments(self.words)[0])
        for path in (needs, program if program.suffix else None):
            if path is not None and not path.exists():
                return f"skipped: there is no {path}"
        least = 60 * (stage.minutes if stage.least is None else stage.least)
        if seconds < least:
            return f"skipped: it needs {least / 60:g} minutes, {max(0, seconds) / 60:.1f} are left"
        return ""

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _path(self, text: str) -> Path | None:
        return Path(text.format_map(self.words)) if text else None

    def _run(self, stage: Stage, seconds: float) -> Entry:
        """Run a stage for at most some seconds."""
        log = self._log(stage.name)
        command, start = stage.arguments(self.words), time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *_program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment_of_child(),
                start_new_session=True,  # Ctrl-C reaches it only through this process
            )
            try:
                in_time = _wait(process, seconds, log, stage.name)
            finally:
                _end(process)
        output = log.read_text(encoding="utf-8", errors="replace")
        takes, makes = (self._path(text) for text in (stage.takes, stage.makes))
        if process.returncode == 0 and takes is not None and not takes.is_file():
            status, line = FAILED, f"it ended without {takes}"
        elif process.returncode == 0:
            if takes is not None and makes is not None:
                makes.parent.mkdir(parents=True, exist_ok=True)
                write_whole(makes, takes.read_bytes())
            status, line = DONE, (output.strip().splitlines() or [""])[-1]
        elif not in_time:
            status, line = OUT_OF_TIME, f"stopped after {seconds / 60:.1f} minutes"
            line += "; what it measured is kept" if stage.least is not None else ""
        else:
            status, line = FAILED, error_line(output, process.returncode)
        return {
            "status": status,
            "line": printable(line)[:300],
            "seconds": round(time.monotonic() - start, 1),
            "command": command,
        }

    def _write(self, left_out: Mapping[str, str]) -> str:
        """Write the state, the summary and the archive; return the summary."""
        write_record(self.folder / "stages.json", {**self.about, "stages": self.ended})
        summary = "\n".join([*self._summary(left_out), ""])
        pages = "\n".join([summary.rstrip(), *self._ends_of_logs(), ""])
        write_whole(self.folder / "summary.md", pages.encode())
        self._pack()
        return summary

    def _pack(self) -> None:
        """Write the archive; without the lock and partial files, whose names begin with a dot."""
        with (
            whole_file(self.folder.with_name(f"{self.folder.name}.zip")) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for path in sorted(self.folder.rglob("[!.]*")):
                if path.is_file():
                    archive.write(path, path.relative_to(self.folder))

    def _summary(self, left_out: Mapping[str, str]) -> Iterator[str]:
        versions = ", ".join(f"{name} {value}" for name, value in self.about["versions"].items())
        yield f"{self.about['hardware']}, commit {self.about['commit']}, {versions}\n"
        yield "| stage | result | minutes | last line |"
        yield "|---|---|---|---|"
        for stage in self.stages:
            entry = self.ended.get(stage.name)
            if entry is None:
                yield f"| {stage.name} | not run | | {left_out.get(stage.name, '')} |"
                continue
            line = entry["line"].replace("|", "/")
            yield f"| {stage.name} | {entry['status']} | {entry['seconds'] / 60:.1f} | {line} |"

    def _ends_of_logs(self) -> Iterator[str]:
        for name in self.ended:
            text = self._log(name).read_text(encoding="utf-8", errors="replace")
            last = "\n".join(map(printable, text.splitlines()[-_LAST_LINES:]))
            yield f"\n## {name}\n\n```\n{last}\n```"


def environment_of_child() -> dict[str, str]:
    """Return the environment of a process that must import this package, and no other clone's."""
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if (ROOT / "ablations").is_dir():
        path = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    return variables


def _program(word: str) -> list[str]:
    """Return how Python starts the program of a command."""
    if word.endswith(".py"):
        return [word]
    if word != "pytest":
        return ["-m", "tokenformer_vit", word]
    # Most of the time of GPU tests is compilation, on one core. The largest ones take 17 GB each.
    return ["-m", word, *(["-n", "4"] if find_spec("xdist") else [])]


def _wait(process: subprocess.Popen, seconds: float, log: Path, name: str) -> bool:
    """Wait for a stage, and tell whether it ended in time."""
    start = said = time.monotonic()
    while process.poll() is None:
        time.sleep(_LOOK)
        now = time.monotonic()
        if now - start > seconds:
            return False
        if now - said > _SIGN_OF_LIFE:
            said = now
            lines = log.read_bytes()[-500:].decode(errors="replace").split()
            last = printable(" ".join(lines))[-80:]
            print(f"{name}: {(now - start) / 60:.0f} minutes: {last}", flush=True)
    return True


def _end(process: subprocess.Popen) -> None:
    """Interrupt a stage that still runs, and end it with all processes that it leaves.

    A stage that has failed may leave processes, which would slow down the stages after it.
    """
    try:
        if process.poll() is None:
            _signal(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    finally:
        _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.wait()


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to a stage and its own processes; Windows can only end the process."""
    if sys.platform == "win32":
        process.terminate()
        return
    # macOS reports a group whose processes have all ended as a PermissionError.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
