"""The processes of a run: started by torchrun, Slurm or MPI, on one machine or on many.

All processes see the same files: each reads the checkpoint by itself.
"""

import os
from datetime import timedelta
from typing import Any

import torch

from tokenformer_vit.errors import InputError

from .config import name_of
from .engine import Config, init_dist

# Where each launcher says which process this is: in all, on its machine, and of how many.
_VARIABLES = {
    "pytorch": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def is_first(launcher: str) -> bool:
    """Tell whether this process is the first of a run, before the processes meet."""
    if launcher == "none":
        return True
    if (name := _VARIABLES[launcher][0]) not in os.environ:
        raise InputError(f"--launcher {launcher} needs {name}, which a launcher sets: start by it")
    return os.environ[name] == "0"


def start_processes(cfg: Config) -> None:
    """Connect the processes of a launcher: by NCCL on GPUs, by gloo on CPUs.

    The config gets the settings of its data-parallel wrapper.
    """
    if cfg.launcher == "none":
        return
    gpus = torch.cuda.device_count()
    wrapper: Any = {"type": "MMDistributedDataParallel", **(cfg.get("model_wrapper_cfg") or {})}
    if name_of(wrapper["type"]) == "MMDistributedDataParallel":
        wrapper.setdefault("broadcast_buffers", False)  # τ is the same in all processes
    if cfg.get("find_unused_parameters"):  # mmengine reads it only without a wrapper
        wrapper["find_unused_parameters"] = True
    cfg.model_wrapper_cfg = wrapper if gpus else {**wrapper, "device_ids": None}
    how = dict((cfg.get("env_cfg") or {}).get("dist_cfg") or {})
    rank, local, number = (os.environ[name] for name in _VARIABLES[cfg.launcher])
    if gpus:
        # Slurm may show each process only its own GPU, whose number is then 0.
        os.environ[_VARIABLES[cfg.launcher][1]] = os.environ["LOCAL_RANK"] = str(int(local) % gpus)
        init_dist(cfg.launcher, **how)
        return
    os.environ.update(RANK=rank, LOCAL_RANK=local, WORLD_SIZE=number)
    os.environ.setdefault("MASTER_PORT", "29500")  # as in mmengine
    limit = how.get("timeout") and timedelta(seconds=how["timeout"])
    torch.distributed.init_process_group("gloo", timeout=limit)
