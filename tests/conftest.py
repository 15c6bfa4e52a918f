import faulthandler
import gc
import io
import itertools
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.attention import SDPBackend, sdpa_kernel

from .samples import CONFIG

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # `train` would start itself again with it


def pytest_collection_finish() -> None:
    """Leave what is imported out of later garbage collections."""
    gc.collect()
    gc.freeze()


def _write_blank(figure: Any, file: Any, **how: Any) -> None:
    Image.new("L", (1, 1)).save(file, "png")


SAVE_FIGURE = "matplotlib.figure.Figure.savefig"
# What takes most of a short run.
LEFT_OUT = {
    "mmengine.dataset.base_dataset.gc": SimpleNamespace(collect=int),
    "yapf.yapflib.yapf_api.FormatCode": lambda text, **how: (text, False),
    SAVE_FIGURE: _write_blank,
}


@pytest.fixture(scope="session", autouse=True)
def short_runs() -> Iterator[dict[str, Any]]:
    """Collect no garbage, and lay out no configs and figures, where these packages are."""
    found = {
        name: patch(name, new) for name, new in LEFT_OUT.items() if find_spec(name.split(".")[0])
    }
    for each in found.values():
        each.start()
    yield found
    for each in found.values():
        each.stop()


@pytest.fixture
def drawn(short_runs) -> Iterator[None]:
    """Draw figures as they are."""
    short_runs[SAVE_FIGURE].stop()
    yield
    short_runs[SAVE_FIGURE].start()


@pytest.fixture(scope="session")
def session_seed() -> int:
    """Return the seed for fixtures that several tests share."""
    return int(os.environ.get("SEED", 0)) or torch.seed() % 2**31


@pytest.fixture(autouse=True)
def seed(session_seed: int) -> Iterator[int]:
    """Draw fresh inputs in every test run; SEED=<the number printed> repeats a failure."""
    print(f"SEED={session_seed}")
    torch.manual_seed(session_seed)
    yield session_seed
    # Else pools of processes in later tests may wait for ever.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Done(NamedTuple):
    """Exit status of a command, or minus the signal that ended it, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def output(self) -> str:
        return self.out + self.err


def _fork(work: Callable[[], object]) -> Done:
    """Run a function in a fork. An error that it raises is the end of its stderr."""
    if sys.platform == "win32":
        pytest.skip("Windows has no fork")
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = out, err
            # pytest would collect the warnings, which a process prints.
            warnings.showwarning = lambda *of, **_: err.write(warnings.formatwarning(*of[:4]))
            torch.set_num_threads(1)  # OpenMP's other threads do not live in a fork
            # If it waits for ever, it ends with its traceback.
            faulthandler.register(signal.SIGALRM, err, chain=True)
            signal.alarm(240)
            status: Any = 1
            try:
                work()
                status = 0
            except SystemExit as error:
                status = error.code or 0
            except BaseException as error:
                err.write(f"{type(error).__name__}: {error}")
            finally:
                out.flush()
                err.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return Done(status, out.read(), err.read())


@pytest.fixture
def in_another_process() -> Callable[[Callable[[], object]], Done]:
    """Run a function in a fork; importing it all again would take seconds."""
    return _fork


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Compute attention as products: FlopCounterMode knows the fused kernel since PyTorch 2.15."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Find real data by a path within the folder TOKENFORMER_TEST_DATA, or skip the test."""

    def find(name: str) -> Path:
        root = os.environ.get("TOKENFORMER_TEST_DATA")
        if not root or not Path(root, name).exists():
            pytest.skip(f"{name} is not in TOKENFORMER_TEST_DATA={root or ''} (CONTRIBUTING.md)")
        return Path(root, name).resolve()

    return find


@pytest.fixture(scope="session")
def arrow_cache(tmp_path_factory) -> Iterator[Path]:
    """Let the library datasets write its copies into a temporary folder; return the folder."""
    config = pytest.importorskip("datasets.config")
    folder = tmp_path_factory.mktemp("arrow_cache")
    with (
        patch.object(config, "HF_DATASETS_CACHE", folder),
        patch.dict(os.environ, HF_DATASETS_CACHE=str(folder)),
    ):
        yield folder


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """Return the files of hf://datasets/owner/pictures, downloaded earlier; there is no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub/datasets--owner--pictures"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for revision in ("main", "v1.0", "refs/convert/parquet"):
        (folder / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
    return folder / "snapshots" / commit


class Command:
    """Our commands, by module: run within this process, which is faster, or as a user does."""

    def __call__(self, module: str, *words: object) -> Done:
        """Run to the end within this process."""
        from tokenformer_vit import cli

        out, err, status, threads = io.StringIO(), io.StringIO(), 0, torch.get_num_threads()
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            argv = ["tokenformer-vit", self.name(module), *map(str, words)]
            stack.enter_context(patch.object(sys, "argv", argv))
            if module == "train":
                _prepare_training(stack)
            torch.set_num_threads(1)  # as many as a process has: sums in the same order
            try:
                cli.main()
            except SystemExit as error:
                status = error.code
            finally:
                torch.set_num_threads(threads)
                torch.use_deterministic_algorithms(False)
        return Done(status, out.getvalue(), err.getvalue())

    def start(
        self,
        module: str,
        *words: object,
        launcher: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        **how: Any,
    ) -> subprocess.Popen:
        """Start a process, whose stdout and stderr are pipes."""
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
        line = [sys.executable, *launcher, "-m", "tokenformer_vit", self.name(module)]
        return subprocess.Popen([*line, *map(str, words)], env={**os.environ, **own}, **pipes)

    def process(
        self, module: str, *words: object, launcher: Sequence[str] = (), **how: Any
    ) -> Done:
        """Run to the end in a process: a fork, or a new one if a launcher starts it."""
        if not launcher:
            return _fork(lambda: self.run_file(module, *words))
        with self.start(module, *words, launcher=launcher, **how) as process:
            out, err = process.communicate(timeout=240)
        return Done(process.returncode, out, err or "")

    def run_file(self, module: str, *words: object) -> None:
        """Run a command as Python does; for a process that then ends."""
        sys.argv = ["tokenformer-vit", self.name(module), *map(str, words)]
        runpy.run_module("tokenformer_vit", run_name="__main__")

    @staticmethod
    def name(module: str) -> str:
        """Return the name of the command in a module."""
        from tokenformer_vit.cli import COMMANDS

        return next(name for name, (place, _) in COMMANDS.items() if place == module)


_numbers = itertools.count()


def _prepare_training(stack: ExitStack) -> None:
    """Give each run a name."""
    runner = import_module("tokenformer_vit.training.runner").TrainingRunner
    from_cfg = runner.from_cfg

    def named(cfg):
        cfg.experiment_name = f"run_{next(_numbers)}"  # else the second, which two runs may share
        return from_cfg(cfg)

    stack.enter_context(patch.object(runner, "from_cfg", named))


@pytest.fixture(scope="session")
def command() -> Command:
    return Command()


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    """Return a config of an image classifier that trains in a second."""
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def scope() -> Iterator[None]:
    """Let mmengine's registries look in mmpretrain first, as in a run."""
    registry = import_module("mmengine.registry")
    with registry.DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


@pytest.fixture
def process_group() -> Iterator[None]:
    """Let this process be the only one of a distributed training."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.fixture
def generator(seed) -> np.random.Generator:
    """NumPy's random numbers, from the printed seed."""
    return np.random.default_rng(seed)


@pytest.fixture
def parts() -> dict[str, Any]:
    """Return the arguments of ViT-5's parts, with scales that do not hide the blocks."""
    return {
        "norm": "rms",
        "qk_norm": True,
        "use_rot_pos_emb": True,
        "reg_tokens": 4,
        "no_embed_class": True,
        "init_values": 0.5,
    }
