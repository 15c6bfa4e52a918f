"""What every record of a run says, whether it trained a model or measured one."""

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

from .files import write_whole

__all__ = ["TRAINING_PACKAGES", "environment", "write_record"]

_distributions = cache(packages_distributions)  # it opens every installed package: a second
TRAINING_PACKAGES = ("torch", "torchvision", "timm", "mmengine", "mmpretrain")


def environment(
    packages: Iterable[str] = TRAINING_PACKAGES, device: str | None = None
) -> dict[str, Any]:
    """Describe the machine, the libraries and the state of the source code.

    Args:
        packages: Names as they are imported; those that are not installed are left out.
        device: ``cuda`` or ``cpu``, which of the two is described; default: the GPU if there is
            one.

    Returns:
        ``commit``, ``date``, ``hardware`` and ``versions``, ready for JSON.
    """
    root, commit = Path(__file__).parents[1], f"tokenformer_vit {tokenformer_vit.__version__}"
    if (root / ".git").exists():  # else it is installed, maybe within some other repository
        describe = ["git", "describe", "--always", "--dirty"]
        with suppress(OSError, subprocess.CalledProcessError):  # no git, or not to be asked
            commit = subprocess.check_output(describe, cwd=root, text=True, stderr=DEVNULL).strip()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "versions": {"python": platform.python_version(), **_versions(packages)},
    }


def _versions(packages: Iterable[str]) -> dict[str, str]:
    # mmengine and mmpretrain are distributed under other names too. Nothing is imported: a
    # measurement does without most of these.
    distributions, found = _distributions(), {}
    for name in packages:
        with suppress(PackageNotFoundError):
            # Python 3.10 does not know what timm's distribution contains: it has the same name.
            found[name] = version(distributions.get(name, [name])[0])
    if "torch" in found:
        found["torch"] = torch.__version__  # this one also says for which CUDA it was built
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, each list of plain values on a line of its own.

    Args:
        path: The file; one that is there stays until the new one is complete.
        record: Plain values, lists and dicts.

    Raises:
        OSError: If it cannot be written; ``filename`` is ``path``.
    """
    text = json.dumps(record, indent=2)
    # Within a JSON string there is no line break, so that these brackets are never text.
    text = re.sub(
        r"\[\n([^\[\]{}]*?)\n *\]",
        lambda match: f"[{' '.join(match[1].split())}]" if '"' not in match[1] else match[0],
        text,
    )
    write_whole(path, f"{text}\n".encode())
