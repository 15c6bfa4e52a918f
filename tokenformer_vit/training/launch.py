"""Start a run: its processes, by torchrun, Slurm or MPI, and its parts."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, cast

import mmengine
import torch
from mmengine.config import Config
from mmengine.dist import init_dist, master_only
from mmengine.fileio import join_path
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from mmengine.utils import get_git_hash
from mmengine.utils.dl_utils import set_multi_processing

from tokenformer_vit.errors import InputError, one_line

from .background import BackgroundWriter
from .checkpoint import ExactCheckpointHook
from .guard import unwrap
from .storage import secure_files

_RANKS = {"pytorch": "RANK", "slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
# Environment variables that a launcher sets.
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
    "pytorch": "torchrun --nproc_per_node=N --no-python tokenformer-vit train ...",
    "slurm": "srun --ntasks=N tokenformer-vit train ...",
    "mpi": "mpirun -np N -x MASTER_ADDR=HOST tokenformer-vit train ...",
}


# Lines that tell a user nothing, at each epoch or about mmengine itself.
_NOISE = ("Exp name: ", '"FileClient" will be deprecated', '"HardDiskBackend" is the alias')


class TrainingRunner(Runner):
    """mmengine's runner, with checkpoints in the background and a short output.

    Config, environment and hooks are printed to the log file only.

    Attributes:
        writer: Writes the checkpoints.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.writer = BackgroundWriter()
        super().__init__(*args, **kwargs)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger, and keep the start of a run off the terminal."""
        logger = super().build_logger(*args, **kwargs)
        self.terminal = _Terminal()
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(self.terminal)
        return logger

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What mmengine notes in each checkpoint; to format a config takes it seconds."""
        return {
            "cfg": self.cfg.pretty_text,
            "seed": self.seed,
            "experiment_name": self.experiment_name,
            "mmengine_version": mmengine.__version__ + get_git_hash(),
        }

    @master_only
    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: dict | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: dict | None = None,
        by_epoch: bool = True,
        backend_args: dict | None = None,
    ) -> None:
        """Write a checkpoint in the background; arguments and content are mmengine's."""
        progress = {"epoch": self.epoch + by_epoch, "iter": self.iter + (not by_epoch)}
        noted = {"time": time.strftime("%Y%m%d_%H%M%S"), **self._facts}
        dataset: Any = self.train_dataloader.dataset
        optimizer, schedulers = cast(Any, self.optim_wrapper), cast(Any, self.param_schedulers)
        checkpoint: dict[str, Any] = {
            "meta": {**progress, **(meta or {}), **noted, "dataset_meta": dataset.metainfo},
            "state_dict": unwrap(self.model).state_dict(),
            "message_hub": self.message_hub.state_dict(),
        }
        if save_optimizer:
            checkpoint["optimizer"] = optimizer.state_dict()
        if save_param_scheduler:
            checkpoint["param_schedulers"] = [each.state_dict() for each in schedulers or ()]
        self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
        path = join_path(out_dir, filename, backend_args=backend_args)
        self.writer.write(checkpoint, str(path), backend_args)


class _Terminal(logging.Filter):
    """Shows only warnings until everything is built, then everything except noise."""

    built = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(_NOISE):
            return False
        return self.built or record.levelno >= logging.WARNING


class _Built(Hook):
    """Notes that everything a config names is built, weights included."""

    priority = "VERY_HIGH"  # another hook may validate before training
    done = False

    def before_run(self, runner) -> None:
        runner.terminal.built = True

    def before_train(self, runner) -> None:
        self.done = True  # mmengine initialises and loads weights after before_run


@contextmanager
def config_explained(cfg: Config, built: _Built | None = None) -> Iterator[None]:
    """Report an error in a ``with`` block as an error in the config.

    Args:
        cfg: The config that the block builds from.
        built: An error after everything was built is not blamed on the config.

    Raises:
        InputError: Instead of any error that does not explain itself; the message names the config.
    """
    try:
        yield
    except (InputError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config may name anything, so any error may follow
        if built is not None and built.done:
            raise
        raise InputError(
            f"{cfg.filename} cannot be used ({type(error).__name__}: {one_line(error)}); --debug "
            "shows where it fails"
        ) from error


def run_training(cfg: Config, *hooks: Hook) -> Runner:
    """Build what a config names, and train.

    Args:
        cfg: The config.
        *hooks: Hooks besides those of the config.

    Returns:
        The runner, at the end of its training.

    Raises:
        InputError: If a part cannot be built, or stops the run for a reason that a user can
            correct.
    """
    secure_files()
    built = _Built()
    with config_explained(cfg, built):
        runner: Any = TrainingRunner.from_cfg(cfg)
        for hook in (built, *hooks):
            runner.register_hook(hook)
        try:
            runner.train()
        finally:
            for hook in runner.hooks:
                if isinstance(hook, ExactCheckpointHook):
                    hook.release()
            runner.writer.wait()
    return runner


def is_first(launcher: str) -> bool:
    """Tell whether this process is the first of a run, before the processes meet."""
    return os.environ.get(_RANKS.get(launcher, ""), "0") == "0"


def start_processes(cfg: Config) -> None:
    """Connect the processes of a launcher, on GPUs or, unlike mmengine, on CPUs.

    Raises:
        InputError: If the launcher did not start this process, there is no GPU for it, or the
            processes cannot connect.
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
    wrapper = {"type": "CompressingDataParallel", **(cfg.get("model_wrapper_cfg") or {})}
    if cfg.get("find_unused_parameters"):  # mmengine reads it only without a wrapper
        wrapper["find_unused_parameters"] = True
    cfg.model_wrapper_cfg = wrapper if gpus else {**wrapper, "device_ids": None}
    environment = cfg.get("env_cfg") or {}
    try:
        if gpus:
            # In mmengine's order; its runner then skips both calls.
            set_multi_processing(**environment.get("mp_cfg", {}), distributed=True)
            init_dist(cfg.launcher, **environment.get("dist_cfg", {}))
            return
        seconds = environment.get("dist_cfg", {}).get("timeout")
        torch.distributed.init_process_group(
            "gloo", timeout=None if seconds is None else timedelta(seconds=seconds)
        )
    except (RuntimeError, ValueError) as error:  # DistNetworkError, a port that is not a number
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"the processes cannot connect at {where} ({one_line(error)}): choose a free port, as "
            "in MASTER_PORT=29501 or `torchrun --master_port=29501`"
        ) from error
