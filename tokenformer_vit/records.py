"""Records of trainings and measurements: JSON with the machine, versions and results."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import tokenformer_vit

from .errors import InputError, one_line
from .files import write_whole

_USED = ("torch", "torchvision", "timm", "mmengine", "mmpretrain", "transformers", "tokenizers")


def environment(device: str | None = None) -> dict[str, Any]:
    """Return command, commit, date, hardware and versions; ``device`` is by default the GPU."""
    root, program = Path(__file__).parents[1], Path(sys.argv[0]).name
    # A copy of the source code is told its commit; a package may lie in another repository.
    commit = os.environ.get("TOKENFORMER_VIT_COMMIT") or None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    if commit is None and (root / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):  # git is missing or refuses
            commit = subprocess.check_output(describe, text=True).strip()
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        machine = {"hardware": torch.cuda.get_device_name()}
    else:  # speeds and last digits depend on the model of the CPU and its instructions
        cpu = platform.processor() or platform.machine()
        with suppress(OSError, KeyError):  # only Linux has this file, only of x86 with these fields
            found = dict(re.findall(r"(?m)^(.+?)\s*: (.+)$", Path("/proc/cpuinfo").read_text()))
            cpu = f"{found['model name']}, family {found['cpu family']}, model {found['model']}"
        cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
        machine = {"hardware": cores, "cpu": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}"}
    versions = {name: sys.modules[name].__version__ for name in _USED if name in sys.modules}
    return {
        "command": shlex.join([program.replace("__main__.py", "tokenformer-vit"), *sys.argv[1:]]),
        "commit": commit or tokenformer_vit.__version__,
        "date": datetime.date.today().isoformat(),
        **machine,
        "versions": {"python": platform.python_version(), **versions},
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, with each list of numbers on one line."""
    text = json.dumps(record, indent=2)
    # A JSON string has no line break, so these brackets are never part of a text.
    text = re.sub(r'\[\n([^\[\]{}"]*)\n *\]', lambda m: f"[{' '.join(m[1].split())}]", text)
    write_whole(path, f"{text}\n".encode())


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({one_line(error)}): copy it again") from error
