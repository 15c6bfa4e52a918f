"""How a run starts: its processes, as torchrun, Slurm or MPI start them, and its parts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import init_dist
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmengine.utils.dl_utils import set_multi_processing

from tokenformer_vit.errors import InputError, one_line

from .checkpoint import ExactCheckpointHook

_RANKS = {"pytorch": "RANK", "slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
# What a launcher tells each of its processes.
_LAUNCHED = {
    "pytorch": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODELIST"),
    "mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "MASTER_ADDR",
    ),
}
_STARTS = {
    "pytorch": "torchrun --nproc_per_node=N tools/train.py ...",
    "slurm": "srun --ntasks=N python tools/train.py ...",
    "mpi": "mpirun -np N -x MASTER_ADDR=HOST python tools/train.py ...",
}


class _Started(Hook):
    """Notes that everything a config names was built, and training began."""

    done = False

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        self.done = True


@contextmanager
def config_explained(cfg: Config, started: _Started | None = None) -> Iterator[None]:
    """Say of an error in a ``with`` block that it is the config's.

    Args:
        cfg: What the block builds from.
        started: Errors after training began are none of the config's.

    Raises:
        InputError: In place of any error that does not explain itself; it names the config.
    """
    try:
        yield
    except (InputError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a config may name is anything, and so are its errors
        if started is not None and started.done:
            raise
        raise InputError(
            f"{cfg.filename} is no usable config ({type(error).__name__}: {one_line(error)}); "
            "--debug shows where it fails"
        ) from error


def run_training(cfg: Config) -> Runner:
    """Build what a config names, and train.

    Returns:
        The runner, at the end of its training.

    Raises:
        InputError: As its parts do; or if one of them cannot be built.
    """
    started = _Started()
    with config_explained(cfg, started):
        runner = Runner.from_cfg(cfg)
        runner.register_hook(started)
        try:
            runner.train()
        finally:
            for hook in runner.hooks:
                if isinstance(hook, ExactCheckpointHook):
                    hook.release()
    return runner


def is_first(launcher: str) -> bool:
    """Tell whether this process is the first of a run, before the processes have joined."""
    return os.environ.get(_RANKS.get(launcher, ""), "0") == "0"


def start_processes(cfg: Config) -> None:
    """Join the processes of a launcher, on GPUs or, which mmengine alone cannot, without.

    Raises:
        InputError: If the launcher did not start us, there is no GPU for this process, or the
            processes do not find each other.
    """
    if cfg.launcher == "none":
        return
    absent = [name for name in _LAUNCHED[cfg.launcher] if name not in os.environ]
    if absent:
        raise InputError(
            f"--launcher {cfg.launcher} needs {_STARTS[cfg.launcher].split()[0]}: "
            f"{', '.join(absent)} are not in the environment; start by `{_STARTS[cfg.launcher]}`"
        )
    gpus = torch.cuda.device_count()
    if not gpus and cfg.launcher != "pytorch":
        raise InputError(
            f"--launcher {cfg.launcher} needs GPUs, and this machine has none: start by "
            f"`{_STARTS['pytorch']}` with --launcher pytorch"
        )
    local = {"slurm": "SLURM_LOCALID", "mpi": "OMPI_COMM_WORLD_LOCAL_RANK"}
    rank = int(os.environ.get(local.get(cfg.launcher, "LOCAL_RANK"), 0))
    if 0 < gpus <= rank:
        raise InputError(
            f"there is no GPU for process {rank} of this machine, which has {gpus}: start at most "
            f"{gpus} processes on it"
        )
    environment = cfg.get("env_cfg") or {}
    try:
        if gpus:
            # In mmengine's order; its runner finds both done.
            set_multi_processing(**environment.get("mp_cfg", {}), distributed=True)
            init_dist(cfg.launcher, **environment.get("dist_cfg", {}))
            return
        torch.distributed.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:  # DistNetworkError, a port that is no number
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"the processes cannot meet at {where} ({one_line(error)}): choose a free port, as by "
            "MASTER_PORT=29501 or `torchrun --master_port=29501`"
        ) from error
    cfg.model_wrapper_cfg = {
        "type": "MMDistributedDataParallel",
        "device_ids": None,
        "broadcast_buffers": False,
    }
