"""A wheel, without a clone beside it, is enough to train, test and predict."""

import json
import os
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
        assert b"tokenformer-vit = tokenformer_vit.cli:main" in archive.read(points)
    assert "tokenformer_vit/py.typed" in names
    shipped = {name for name in names if name.startswith("tokenformer_vit/.mim/configs/")}
    files = (path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.py"))
    assert {name for name in shipped if name.endswith(".py")} == {
        f"tokenformer_vit/.mim/{path.as_posix()}" for path in files
    }
    folder = "tokenformer_vit/models/pretrained/tokenformer_cifar10_micro"
    assert {f"{folder}/{name}" for name in ("model.safetensors", "README.md")} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tokenformer_vit"}


@pytest.mark.slow
def test_the_wheel_trains_tests_and_predicts_in_an_empty_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    own = {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def tokenformer(*words):
        done = subprocess.run(
            [sys.executable, "-m", "tokenformer_vit", *words],
            cwd=empty,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    tokenformer("prepare-data", "--digits", "data/digits")
    short = ["--cfg-options", "train_cfg.max_epochs=4"]
    tokenformer("train", "configs/digits_demo.py", *short)
    weights = "work_dirs/digits_demo/model.safetensors"
    assert "top-1" in tokenformer("test", "digits_demo", weights)
    image = str(next((empty / "data/digits/val/7").iterdir()))
    answer = json.loads(tokenformer("predict", image, "--checkpoint", weights, "--json"))
    assert answer["file"] == image
    tokenformer("predict", image, "--model", "tokenformer_cifar10_micro")
    (empty / "own.py").write_text(
        '_base_ = "tokenformer_vit::digits_demo.py"\ntrain_cfg = dict(max_epochs=4)\n'
    )
    tokenformer("train", "own.py")
    assert (empty / "work_dirs/own/model.safetensors").is_file()
    tokenformer("train", "data/digits", *short)
    assert (empty / "work_dirs/digits/digits.py").is_file()
