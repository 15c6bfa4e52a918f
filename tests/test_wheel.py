"""The wheel has all that it needs; `nox -s wheel` trains, tests and predicts with it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("tokenformer_vit", "configs", "setup.py", "pyproject.toml", "MANIFEST.in")
BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"


def build(what, source, target):
    """Build an sdist or a wheel and return its path."""
    code = BUILD.format(what, str(target))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True
    )
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that was built from the source distribution, as packagers build theirs."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "clone").mkdir()
    for name in (*SOURCES, "README.md", "LICENSE"):
        source, target = ROOT / name, folder / "clone" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    shutil.unpack_archive(build("sdist", folder / "clone", folder), folder / "sdist")
    (sdist,) = (folder / "sdist").iterdir()
    return build("wheel", sdist, folder)


@pytest.mark.slow
def test_the_wheel_has_the_configs_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert b"tokenformer-vit = tokenformer_vit.__main__:main" in archive.read(points)
    assert "tokenformer_vit/py.typed" in names
    shipped = {name for name in names if name.startswith("tokenformer_vit/.mim/configs/")}
    files = (path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.py"))
    assert {name for name in shipped if name.endswith(".py")} == {
        f"tokenformer_vit/.mim/{path.as_posix()}" for path in files
    }
    weights = (ROOT / "tokenformer_vit/models/pretrained").rglob("*.*")
    assert {path.relative_to(ROOT).as_posix() for path in weights} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tokenformer_vit"}
