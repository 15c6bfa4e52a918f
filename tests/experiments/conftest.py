"""Digits, a config that trains on them in seconds, a stand-in for training, empty results."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenformer_vit.experiments import launch, tables
from tokenformer_vit.vision import datasets

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ablations"))  # where `python ablations/NAME.py` finds its siblings

CONFIG = f"""
_base_ = "{ROOT}/configs/digits_demo.py"
model = dict(backbone=dict(depth=1))
train_dataloader = dict(batch_size=32)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=1),
]
train_cfg = dict(max_epochs=2, val_interval=1)
default_hooks = dict(logger=dict(interval=5))
"""


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    for name, images in datasets.digits().items():
        datasets.unpack(images, root / name, name)
    return root


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    """The root of a repository without records."""
    (tmp_path / "ablations" / "results").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def replace_training(tmp_path, monkeypatch) -> Callable[[str], Callable[[], list[str]]]:
    """Replace the training by a script; the result lists what it wrote into starts.txt."""

    def replace(script: str) -> Callable[[], list[str]]:
        path = tmp_path / "trainer.py"
        path.write_text(script)
        monkeypatch.setattr(launch, "TRAIN", ["trainer.py"])
        monkeypatch.setattr(launch, "LOOK", 0.05)
        monkeypatch.setattr(tables, "write_own", lambda question, out: out)  # takes seconds
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        starts = tmp_path / "work" / "starts.txt"
        return lambda: starts.read_text().splitlines() if starts.is_file() else []

    return replace
