"""Records of trainings and measurements: JSON with the machine, versions and results."""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import torch

import tokenformer_vit

from .errors import InputError, one_line
from .files import write_whole

_distributions = cache(packages_distributions)  # it opens every installed package: a second
# Commit of a copy of the source code without its git repository.
COMMIT_VARIABLE = "TOKENFORMER_VIT_COMMIT"
TRAINING_PACKAGES = ("torch", "torchvision", "timm", "mmengine", "mmpretrain")


def environment(
    packages: Iterable[str] = TRAINING_PACKAGES, device: str | None = None
) -> dict[str, Any]:
    """Describe the machine, the versions of libraries and the commit of the source code.

    Args:
        packages: Import names of libraries; missing libraries are left out.
        device: Device to describe, ``cuda`` or ``cpu``; default: the GPU if there is one.

    Returns:
        ``commit``, ``date``, ``hardware`` and ``versions``, ready for JSON; of a CPU also ``cpu``,
        its name, family and model, and the instructions that PyTorch uses: speeds and last digits
        depend on them.
    """
    root, commit = Path(__file__).parents[1], os.environ.get(COMMIT_VARIABLE, "")
    commit = commit or f"tokenformer_vit {tokenformer_vit.__version__}"
    if (root / ".git").exists():  # an installed package may lie in another repository
        describe = ["git", "describe", "--always", "--dirty"]
        with suppress(OSError, subprocess.CalledProcessError):  # git is missing or refuses
            commit = subprocess.check_output(describe, cwd=root, text=True, stderr=DEVNULL).strip()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        machine = {"hardware": torch.cuda.get_device_name()}
    else:
        cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
        capability = torch.backends.cpu.get_cpu_capability()
        machine = {"hardware": cores, "cpu": f"{_cpu_name()}, {capability}"}
    return {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        **machine,
        "versions": {"python": platform.python_version(), **_versions(packages)},
    }


def _cpu_name() -> str:
    with suppress(OSError):  # only Linux has this file
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        fields = dict(re.findall(r"^(\S.*?)\s*: (.+)$", text, re.MULTILINE))
        if name := fields.get("model name"):
            # A virtual machine often hides which CPU it has; these two numbers of x86 tell it.
            family, model = fields.get("cpu family"), fields.get("model")
            return f"{name}, family {family}, model {model}" if family and model else name
    return platform.processor() or platform.machine()


def device_in_name(device: str) -> str:
    """Return how file names of records name a device, such as ``cpu`` or ``h100_80gb_hbm3``.

    Args:
        device: ``cuda`` or ``cpu``.
    """
    if device == "cpu":
        return device
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return re.sub("[^a-z0-9]+", "_", name).strip("_")


def _versions(packages: Iterable[str]) -> dict[str, str]:
    # mmengine and mmpretrain are also distributed under other names. Nothing is imported, because
    # a measurement does not need most of these libraries.
    distributions, found = _distributions(), {}
    for name in packages:
        with suppress(PackageNotFoundError):
            # Python 3.10 finds no distribution for timm; the names are equal.
            found[name] = version(distributions.get(name, [name])[0])
    if "torch" in found:
        found["torch"] = torch.__version__  # also names the version of CUDA
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, with each list of numbers on one line.

    Args:
        path: File to write; an old file stays until the new one is complete.
        record: Plain values, lists and dicts.

    Raises:
        OSError: If the file cannot be written; ``filename`` is ``path``.
    """
    text = json.dumps(record, indent=2)
    # A JSON string has no line break, so these brackets are never part of a text.
    text = re.sub(
        r"\[\n([^\[\]{}]*?)\n *\]",
        lambda match: f"[{' '.join(match[1].split())}]" if '"' not in match[1] else match[0],
        text,
    )
    write_whole(path, f"{text}\n".encode())


def read_record(path: Path) -> dict[str, Any]:
    """Read a record that :func:`write_record` wrote.

    Raises:
        InputError: If the file is damaged.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
        reason = f"it holds a {type(record).__name__}"
    except ValueError as error:
        reason = one_line(error)
    raise InputError(
        f"{path} is not a record ({reason}): restore the file, or delete it and run its command "
        "again"
    )
