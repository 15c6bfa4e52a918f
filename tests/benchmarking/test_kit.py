"""A folder for a machine without network has all that is needed, and stays small."""

import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tokenformer_vit.benchmarking import kit
from tokenformer_vit.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"python_version": "3.12", "sys_platform": "linux", "platform_system": "Linux"}
# Only configs that read the hub's parquet files need it, and no stage does.
NOT_NEEDED = {"datasets"}


def needed(requirements):
    """The names that requirements without extras have on the other machine."""
    parsed = map(Requirement, requirements or ())
    return {
        canonicalize_name(each.name)
        for each in parsed
        if each.marker is None or each.marker.evaluate({**MACHINE, "extra": ""})
    }


def test_wheels_and_what_is_there_are_all_that_is_required():
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    declared = setup.call_args.kwargs
    ours = needed(declared["install_requires"]) | needed(declared["extras_require"]["train"])
    for each in kit.wanted_wheels():
        ours |= needed(requires(each.partition("==")[0]))
    assert ours - NOT_NEEDED <= {*kit.WHEELS, *kit.THERE}
    assert not set(kit.WHEELS) & set(kit.THERE)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A small repository, whose kit has the wheels already; there is no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    root = tmp_path / "clone"
    wheels = root / "build/kit/wheels"
    wheels.mkdir(parents=True)
    (root / ".gitignore").write_text("build/\n")
    (root / "code.py").write_bytes(b"x" * 2**20)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    for each in kit.wanted_wheels():
        name, version = each.split("==")
        tag = "cp312-cp312-manylinux" if name == "pydantic-core" else "py2.py3-none-any"
        (wheels / f"{name.replace('-', '_')}-{version}-{tag}.whl").write_bytes(b"")
    data = tmp_path / "cifar10"
    (data / "deep").mkdir(parents=True)
    (data / "deep/some.parquet").write_bytes(b"y" * 2**21)
    return root, wheels, data


def test_what_a_folder_has(clone):
    root, wheels, data = clone
    (wheels / "timm-0.1-py3-none-any.whl").write_bytes(b"")
    (wheels / "own-1.0-py3-none-any.whl").write_bytes(b"")
    lines = kit.prepare(root / "build/kit", [data], "3.12", 4, root)
    assert (root / "build/kit/data/cifar10/deep/some.parquet").stat().st_size == 2**21
    assert not (wheels / "timm-0.1-py3-none-any.whl").exists()  # pip refuses two versions
    assert (wheels / "own-1.0-py3-none-any.whl").exists()
    assert f"timm=={version('timm')}" in lines[0]
    assert lines[-1] == "   3.0 MiB  together, at most 4"
    script = (root / "build/kit/run.sh").read_text()
    assert re.search(r"TOKENFORMER_VIT_COMMIT=\S", script)
    assert subprocess.run(["sh", "-n", root / "build/kit/run.sh"]).returncode == 0
    for again in (data, root / "build/kit/data/cifar10"):
        assert kit.prepare(root / "build/kit", [again], "3.12", 4, root) == lines


@pytest.mark.skipif(sys.platform == "win32", reason="run.sh is a script of the shell")
def test_the_script_keeps_the_python_path_of_the_machine(clone, tmp_path):
    root, _, _ = clone
    kit.prepare(root / "build/kit", [], "3.12", 4, root)
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s %s\\n" "$PYTHONPATH" "$*"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for own in ("", "/opt/torch:/opt/more"):
        done = subprocess.run(
            ["sh", "build/kit/run.sh", "--minutes", "9"],
            cwd=root,
            env={**environment, "PYTHONPATH": own},
            capture_output=True,
            text=True,
            check=True,
        )
        path, _, command = done.stdout.splitlines()[-1].partition(" ")
        assert path.split(":") == [
            f"{root}/build/kit/site",
            str(root),
            *filter(None, own.split(":")),
        ]
        assert command.endswith("--out build/kit/results --minutes 9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most_mib": 2.5}, r"3.0 MiB are more than 2.5 \(.*cifar10 2.0.*leave out data"),
        ({"data": [Path("nowhere")]}, "nowhere: there is no such folder"),
        ({"data": [ROOT / "tests"]}, "tests: the stages only read folders of the name cifar10; re"),
        ({"folder": Path("/somewhere")}, "/somewhere is not in .*choose a folder there"),
        ({"python": "3.13"}, r"no wheels of pydantic-core==\S+ \(.*run this with a network"),
    ],
)
def test_refusals(clone, changes, message):
    root, _, data = clone
    words = {"folder": root / "build/kit", "data": [data], "python": "3.12", "most_mib": 4}
    with pytest.raises(InputError, match=message):
        kit.prepare(**{**words, **changes}, root=root)
    assert not (root / "build/kit/data").exists()
