"""Make a folder ready with which a machine without network can run ``benchmark --all``.

The folder has::

    wheels/   packages that a machine with PyTorch often lacks
    data/     data sets
    run.sh    installs the wheels into site/ and runs the stages
"""

import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, write_whole
from tokenformer_vit.records import COMMIT_VARIABLE, environment

from .stages import STAGES

# What this package needs beyond the packages in THERE. timm is there, but often too old.
WHEELS = (
    *("timm", "mmengine", "mmcv-lite", "mmpretrain"),
    *(
        "addict",
        "importlib-metadata",
        "lazy-importer",
        "mat4py",
        "model-index",
        "modelindex",
        "ordered-set",
    ),
    *("platformdirs", "termcolor", "yapf"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
)
# What a machine that is set up for PyTorch is expected to have.
THERE = (
    *("torch", "torchvision", "numpy", "pillow", "safetensors", "huggingface-hub", "tqdm", "rich"),
    *("pyyaml", "matplotlib", "pandas", "pyarrow", "scikit-learn", "opencv-python", "einops"),
    *("pytest", "transformers", "tokenizers", "typing-extensions", "packaging"),
    *("click", "markdown", "requests", "tabulate", "zipp"),
)
# Linux on x86_64. A pure wheel fits every platform.
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_RUN = """#!/bin/sh
# Installs the wheels beside this file, and runs the stages. Start it in the repository's root.
# Its options are those of `tokenformer-vit benchmark --all`.
set -e
kit=$(dirname "$0")
python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$kit/site" \\
    "$kit"/wheels/*.whl
export PYTHONPATH="$(cd "$kit" && pwd)/site:$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
export {variable}={commit}
exec python3 -m tokenformer_vit benchmark --all --data-root "$kit/data" --out "$kit/results" "$@"
"""


def prepare(
    folder: Path, data: Sequence[Path], python: str, most_mib: float, root: Path
) -> list[str]:
    """Make the folder, and check how large it is together with the source code.

    Args:
        folder: Folder to write, within ``root``. What it has already is kept.
        data: Folders to copy to ``data/``, under their own names.
        python: Version of Python on the other machine, such as 3.12.
        most_mib: Most MiB of the folder and the source code together.
        root: The repository.

    Returns:
        Lines that say what the folder has, and how large it is.

    Raises:
        InputError: If ``folder`` is not in the repository, wheels cannot be had, a data set is
            missing or read by no stage, or it is all too large.
    """
    if not folder.resolve().is_relative_to(root):
        raise InputError(f"--prepare {folder} is not in {root}; choose a folder there")
    make_folder(folder, "--prepare")
    for source in data:
        if not source.is_dir():
            raise InputError(f"--data {source}: there is no such folder")
        if source.absolute().name not in _data_sets():
            raise InputError(
                f"--data {source}: the stages only read folders of the name "
                f"{' or '.join(_data_sets())}; rename it"
            )
    sizes = {f"--data {source}": _size(_files(source)) for source in data}
    sizes["the source code"] = _size(_tracked(root))
    _check_size(sizes, most_mib)  # before anything large is copied

    names = _download(folder / "wheels", python)
    for source in data:
        for path in _files(source):
            target = folder / "data" / source.absolute().name / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(shutil.SameFileError):  # the data set of the folder itself
                shutil.copyfile(path, target)
    commit = environment()["commit"]
    text = _RUN.format(variable=COMMIT_VARIABLE, commit=shlex.quote(commit))
    write_whole(folder / "run.sh", text.encode())
    sizes = {"the source code": sizes["the source code"]}
    sizes |= {part.name: _size(_files(part)) for part in sorted(folder.iterdir()) if part.is_dir()}
    _check_size(sizes, most_mib)
    return [
        f"{len(names)} wheels for Python {python}: {', '.join(names)}",
        f"commit {commit}",
        *(f"{size / 2**20:6.1f} MiB  {name}" for name, size in sizes.items()),
        f"{sum(sizes.values()) / 2**20:6.1f} MiB  together, at most {most_mib:g}",
    ]


def wanted_wheels() -> list[str]:
    """Return NAME==VERSION of each wheel, in the versions that are installed here.

    Raises:
        InputError: If the packages for training are not installed.
    """
    wanted = []
    for name in WHEELS:
        with suppress(importlib.metadata.PackageNotFoundError):  # other versions may not need it
            wanted.append(f"{name}=={importlib.metadata.version(name)}")
    if not any(each.startswith("mmpretrain==") for each in wanted):
        raise InputError("mmpretrain is not installed: in the clone, run pip install '.[train]'")
    return wanted


def _data_sets() -> list[str]:
    """List the folders of the data root that stages read."""
    needs = (stage.needs.partition("{data}/")[2] for stages in STAGES.values() for stage in stages)
    return sorted({name for name in needs if name})


def _download(wheels: Path, python: str) -> list[str]:
    """Download the wheels that are not there.

    Raises:
        InputError: If the packages are not installed here, or a wheel cannot be downloaded.
    """
    wheels.mkdir(exist_ok=True)
    wanted = wanted_wheels()
    known = [wheel for each in wanted for wheel in _wheels_of(wheels, each, python)]
    for name in WHEELS:  # pip refuses two versions
        for other in set(wheels.glob(f"{_in_file(name)}-*.whl")).difference(known):
            other.unlink()
    missing = [each for each in wanted if not _wheels_of(wheels, each, python)]
    if not missing:
        return wanted
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
    command += ["--only-binary=:all:", "--python-version", python, *platforms, *missing]
    done = subprocess.run(command, capture_output=True, text=True)
    if missing := [each for each in missing if not _wheels_of(wheels, each, python)]:
        said = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
        raise InputError(
            f"no wheels of {', '.join(missing)} ({said}): run this with a network, or put them "
            f"into {wheels}"
        )
    return wanted


def _wheels_of(wheels: Path, wanted: str, python: str) -> list[Path]:
    """Find the wheel of NAME==VERSION that fits a version of Python."""
    name, _, version = wanted.partition("==")
    tags = re.compile(rf"-(py2\.)?py3-none-any|-cp{re.escape(python.replace('.', ''))}-")
    return [
        path for path in wheels.glob(f"{_in_file(name)}-{version}-*.whl") if tags.search(path.name)
    ]


def _in_file(name: str) -> str:
    return re.sub("[-_.]+", "_", name)


def _tracked(root: Path) -> list[Path]:
    """List the files of the repository as git knows them: tracked, or new and not ignored.

    Raises:
        InputError: If it is no git repository.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"{root} is no git repository; run this in a clone") from error
    return [root / name for name in listed.decode().split("\0") if name]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files if path.exists())


def _check_size(sizes: dict[str, int], most_mib: float) -> None:
    total = sum(sizes.values()) / 2**20
    if total > most_mib:
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
        raise InputError(
            f"{total:.1f} MiB are more than {most_mib:g} ({parts}): leave out data, or raise "
            "--most-mib"
        )
