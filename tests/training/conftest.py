"""A small image data set, and runs of a config that trains on it in seconds."""

import copy
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.multiprocessing import start_processes

from tokenformer_vit.training.reports import read_scalars

from ..samples import CLASSES, write_images


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> Path:
    """16 training images a class: 48, six batches of eight."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        write_images(root / split, (8, 8), dict.fromkeys(CLASSES, 16), rng)
    return root


@pytest.fixture
def own(config, tmp_path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "own.py"
        path.write_text(f"_base_ = {str(config)!r}\n{text}\n")
        return path

    return write


BACKBONE = {
    "type": "TimmClassificationBackbone",
    "model_name": "tokenformer_tiny",
    **{"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2},
}
HEAD = {
    "type": "LabelHead",
    **{"num_classes": 3, "in_channels": 24},
    "loss": {"type": "LabelSmoothLoss", "label_smooth_val": 0.1, "mode": "original"},
}
SCHEDULE = [
    {"epoch": 1, "num_qkv_param_tokens": [30, 36], "num_ffn_param_tokens": 120},
    {"epoch": 2, "num_qkv_param_tokens": 48, "num_proj_param_tokens": 32},
]


def growing(schedule: Sequence[dict] = SCHEDULE, **how: Any) -> str:
    """Return the part of a config by which its model grows."""
    hooks = [{"type": "CostHook"}, {"type": "GrowthHook", "schedule": schedule, **how}]
    return f"custom_hooks = {hooks!r}\n"


def scalars(work_dir: Path) -> tuple[dict, dict]:
    """Read what a run logged in training, by iteration, and in validation."""
    return read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))


def losses(work_dir: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in scalars(work_dir)[0].items()}


def last_checkpoint(work_dir: Path) -> dict[str, Any]:
    return torch.load((work_dir / "last_checkpoint").read_text(), weights_only=True)


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two checkpoints have the same model and average, to the last bit."""
    for part in ("state_dict", "ema_state_dict"):
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name


class Train:
    """Runs of the command `train`, each in this process or, on request, in its own."""

    def __init__(self, config: Path, data_root: Path, command) -> None:
        self.arguments = [str(config), "--data-root", str(data_root)]
        self.command = command
        # What a process gets besides the present environment.
        self.environment: dict[str, str] = {}

    def of(self, config: Path) -> "Train":
        """Return the same for another config."""
        other = copy.copy(self)
        other.arguments = [str(config), *self.arguments[1:]]
        other.environment = {}
        return other

    def start(self, work_dir: Path, *extra: str, **how):
        words = ("train", *self.arguments, "--work-dir", work_dir, *extra)
        how = {"environment": self.environment, "stderr": subprocess.STDOUT, **how}
        return self.command.start(*words, **how)

    def __call__(self, work_dir: Path, *extra: str, launcher: tuple[str, ...] = ()) -> str:
        status, output = self._run(work_dir, extra, launcher)
        assert status == 0, output
        return output

    def fails(self, work_dir: Path, *extra: str) -> str:
        status, output = self._run(work_dir, extra)
        assert status == 2, output
        assert "Traceback" not in output.replace("Original Traceback", "")
        return re.findall(r"^error: .*", output, re.MULTILINE)[-1]

    def _run(
        self, work_dir: Path, extra: Sequence[str], launcher: tuple[str, ...] = ()
    ) -> tuple[int, str]:
        if launcher or self.environment or torch.cuda.is_available():
            process = self.start(work_dir, *extra, launcher=launcher)
            output, _ = process.communicate(timeout=240)
            return process.returncode, output
        done = self.command("train", *self.arguments, "--work-dir", work_dir, *extra)
        return done.status, done.output


@pytest.fixture(scope="session")
def train(config, data_root, command) -> Train:
    return Train(config, data_root, command)


@pytest.fixture(scope="session")
def trained(train, config, tmp_path_factory) -> SimpleNamespace:
    """Train under autocast, with a learning rate at which two epochs separate the classes.

    The run is finished, to be read and not to be changed.
    """
    work_dir = tmp_path_factory.mktemp("trained") / "small_run"
    output = train(
        work_dir,
        *("--amp", "--seed", "5", "--cfg-options", "train_cfg.max_epochs=2"),
        *("optim_wrapper.optimizer.lr=5e-3", "default_hooks.ema.momentum=0.5"),
        *("optim_wrapper.accumulative_counts=2",),
    )
    return SimpleNamespace(work_dir=work_dir, output=output, config=config)


@pytest.fixture
def in_two_processes(tmp_path) -> Callable:
    """Return what ``work(rank)`` returns in two processes that meet; their errors are raised."""

    def meet_by_file(rank: int) -> None:
        store = f"file://{tmp_path}/store"
        init_process_group("gloo", init_method=store, rank=rank, world_size=2)

    def run(work: Callable, meet: Callable = meet_by_file) -> list[Any]:
        def run_in_process(rank: int) -> None:
            torch.set_num_threads(1)  # a fork has no other threads of its parent's pool
            meet(rank)
            answers[rank] = work(rank)
            destroy_process_group()

        with torch.multiprocessing.get_context("fork").Manager() as manager:
            answers = manager.dict()
            # With one that fails, the other one ends.
            start_processes(run_in_process, nprocs=2, start_method="fork")
            return [answers[0], answers[1]]

    return run
