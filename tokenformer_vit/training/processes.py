"""The processes of a run: started by torchrun, Slurm or MPI, on one machine or on many.

Processes exchange nothing through files. The first one reads and writes checkpoints, and
:func:`from_first` sends the others what they need.
"""

import io
import os
import pickle
import re
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from mmengine.config import Config
from mmengine.dist import (
    all_gather_object,
    broadcast,
    broadcast_object_list,
    get_world_size,
    init_dist,
    is_main_process,
)
from mmengine.utils.dl_utils import set_multi_processing
from torch import Tensor

from tokenformer_vit.errors import InputError, one_line

T = TypeVar("T")

# What torchrun sets, and the variables of the other launchers with the same content.
_VARIABLES = {
    "pytorch": {name: name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
    "slurm": {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": "SLURM_NTASKS",
    },
    "mpi": {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    },
}
_STARTS = {
    "pytorch": "torchrun --nproc_per_node=N --no-python tokenformer-vit train ...",
    "slurm": "srun --ntasks=N tokenformer-vit train ...",
    "mpi": "mpirun -np N -x MASTER_ADDR=HOST tokenformer-vit train ...",
}
_DEFAULT_PORT = 29500  # PyTorch's
# Without it, torchrun keeps the store with the addresses of the processes when it restarts them.
_NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def is_first(launcher: str) -> bool:
    """Tell whether this process is the first of a run, before the processes meet."""
    return os.environ.get(_VARIABLES.get(launcher, {}).get("RANK", ""), "0") == "0"


def start_processes(cfg: Config) -> None:
    """Connect the processes of a launcher: by NCCL on GPUs, by gloo on CPUs.

    Raises:
        InputError: If the launcher did not start this process, there is no GPU for it, or the
            processes cannot connect.
    """
    if cfg.launcher == "none":
        return
    _set_environment(cfg.launcher)
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if 0 < gpus <= local:
        raise InputError(
            f"there is no GPU for process {local} of this machine, which has {gpus}: start at most "
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
            init_dist("pytorch", **environment.get("dist_cfg", {}))
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


def _set_environment(launcher: str) -> None:
    """Set the variables of torchrun from those of another launcher.

    Raises:
        InputError: If the launcher did not start this process, or could not restart it.
    """
    needed = dict(_VARIABLES[launcher])
    if launcher == "slurm":
        # A step may use fewer machines than its job.
        nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in os.environ else "SLURM_NODELIST"
        job = os.environ.get("SLURM_JOB_ID", "")
        # Two jobs of one user may share a machine, so each has a port of its own.
        port = 20000 + int(job) % 10000 if job.isdecimal() else _DEFAULT_PORT
        os.environ.setdefault("MASTER_PORT", str(port))
        if nodes in os.environ:
            os.environ.setdefault("MASTER_ADDR", first_host(os.environ[nodes]))
        elif "MASTER_ADDR" not in os.environ:
            needed["MASTER_ADDR"] = nodes
    else:
        needed["MASTER_ADDR"] = "MASTER_ADDR"
    if launcher == "mpi":
        os.environ.setdefault("MASTER_PORT", str(_DEFAULT_PORT))
    elif launcher == "pytorch":
        needed["MASTER_PORT"] = "MASTER_PORT"
    absent = [name for name in needed.values() if name not in os.environ]
    if absent:
        raise InputError(
            f"--launcher {launcher} needs {_STARTS[launcher].split()[0]}: "
            f"{', '.join(absent)} are not in the environment; start by `{_STARTS[launcher]}`"
        )
    for name, other in needed.items():
        os.environ[name] = os.environ[other]
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher == "pytorch" and restarts != "0" and keeps_store:
        raise InputError(
            f"torchrun may restart this run {restarts} times, and restarted processes could wait "
            "forever for addresses of dead ones: start it as "
            f"`{_NEW_STORE}=1 torchrun --rdzv-backend=c10d --max-restarts={restarts} ...`"
        )


def first_host(nodes: str) -> str:
    """Return the first machine of a list in Slurm's notation.

    Inside a container there is often no ``scontrol``, which would expand the list.

    Args:
        nodes: List such as ``gpu[003-004,007],cpu1``, whose first machine is ``gpu003``.
    """
    first = re.match(r"(\[[^]]*\]|[^,[])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else "")


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and lists them in their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach().contiguous())
        return tuple(obj.shape), obj.dtype, obj.device.type


class _Unpickler(pickle.Unpickler):
    """Puts empty tensors where tensors were left out, and lists them in their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: Any) -> Tensor:
        shape, dtype, device = pid
        self.tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self.tensors[-1]


def from_first(make: Callable[[], T]) -> T:
    """Return on all processes what the first one makes.

    All processes must call this together. Tensors are sent one after another, to the same kind of
    device as in the first process. Plain values are sent as a pickle, as in PyTorch's collectives:
    the processes of a run trust each other.

    Args:
        make: Called in the first process only. Returns tensors and plain values in dicts and lists.

    Raises:
        InputError: In the other processes, if ``make`` raised an error in the first one.
    """
    if get_world_size() == 1:
        return make()
    made, failure, file = None, None, io.BytesIO()
    pickler = _Pickler(file)
    if is_main_process():
        try:
            made = make()
            pickler.dump(made)
        except Exception as error:
            failure = error
    told = [failure and one_line(failure), file.getvalue()]
    broadcast_object_list(told)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise InputError(f"the first process stopped: {told[0]}")
    tensors = pickler.tensors
    if not is_main_process():
        unpickler = _Unpickler(io.BytesIO(cast(bytes, told[1])))
        made, tensors = unpickler.load(), unpickler.tensors
    for tensor in tensors:
        if tensor.numel():
            broadcast(tensor.reshape(-1).view(torch.uint8))  # not all backends have all types
    return cast(T, made)


def check_alike(facts: Mapping[str, Any]) -> None:
    """Check that all processes have the same data and schedule: each machine has its own files.

    Raises:
        InputError: If a fact differs; the message gives both values and their machines.
    """
    everywhere = all_gather_object((socket.gethostname(), dict(facts)))
    host, expected = everywhere[0]
    for number, (other, own) in enumerate(everywhere):
        for name in {**expected, **own}:  # the facts of epochs and of iterations have other names
            value, first = own.get(name), expected.get(name)
            if value != first:
                raise InputError(
                    f"{name} is {value} in process {number} on {other}, but {first} in process 0 "
                    f"on {host}: give all machines the same data and config"
                )


def check_last_checkpoints(work_dir: Path) -> None:
    """Check that the first process has the last checkpoint, if any machine has one.

    Machines may have a work directory each, and after a restart another machine may be first.

    Args:
        work_dir: Work directory on this machine.

    Raises:
        InputError: If another machine has another checkpoint; the message names both machines.
    """
    pointer = work_dir / "last_checkpoint"
    text = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    everywhere = all_gather_object((socket.gethostname(), Path(text).name))
    host, first = everywhere[0]
    for other, name in everywhere:
        if name not in ("", first):
            raise InputError(
                f"the last checkpoint in {work_dir} is {name} on {other}, but "
                f"{first or 'there is none'} on {host}, which now has the first process: copy the "
                f"later one and last_checkpoint to {host}, or delete the other last_checkpoint; a "
                "--work-dir on a disk that all machines share avoids this"
            )
