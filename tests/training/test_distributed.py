"""Processes meet however they were started, and agree on signals."""

import os
import socket
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tokenformer_vit.training import distributed
from tokenformer_vit.training.distributed import start_processes
from tokenformer_vit.training.runner import Termination

LAUNCHED = {
    "pytorch": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


@pytest.fixture
def environment():
    """The environment, without variables of launchers; a test may change it."""
    with patch.dict(os.environ):
        for name in [*os.environ]:
            if name.startswith(("SLURM_", "OMPI_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")):
                del os.environ[name]
        yield os.environ


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_process_that_sees_one_gpu_takes_it(monkeypatch, environment, launcher):
    """Slurm's usual binding shows each process only its own GPU."""
    called = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(distributed, "init_dist", lambda *args, **how: called.append((*args, how)))
    environment.update(dict(zip(LAUNCHED[launcher], ("3", "3", "4"), strict=True)))
    given: dict = {"env_cfg": {"dist_cfg": {"timeout": 60}}}
    cfg = SimpleNamespace(launcher=launcher, get=given.get)
    start_processes(cfg)
    assert called.pop() == (launcher, {"timeout": 60})
    assert environment[LAUNCHED[launcher][1]] == "0"
    # mmengine gives the GPU of the process.
    wrapper = {"type": "MMDistributedDataParallel", "broadcast_buffers": False}
    assert cfg.model_wrapper_cfg == wrapper
    given["model_wrapper_cfg"] = {"broadcast_buffers": True}
    start_processes(cfg)
    assert cfg.model_wrapper_cfg == {**wrapper, "broadcast_buffers": True}
    given["model_wrapper_cfg"] = {"type": "MMFullyShardedDataParallel"}
    start_processes(cfg)
    assert cfg.model_wrapper_cfg == given["model_wrapper_cfg"]


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_processes_meet_without_a_gpu(environment, in_two_processes, launcher):
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(port.getsockname()[1])
    environment["MASTER_ADDR"] = "127.0.0.1"

    def meet(rank):
        values = (str(rank), str(rank), "2")
        os.environ |= dict(zip(LAUNCHED[launcher], values, strict=True))
        with patch("torch.cuda.device_count", lambda: 0):
            start_processes(SimpleNamespace(launcher=launcher, get=lambda key: None))

    def work(rank):
        told = torch.tensor([float(rank + 1)])
        torch.distributed.all_reduce(told)
        return told.item()

    assert in_two_processes(work, meet) == [3, 3]


def test_two_processes_learn_at_the_same_call_what_one_noticed(in_two_processes):
    def ask(rank):
        termination = Termination()
        answers = []
        for number in range(200):
            if rank == 1 and number == 30:
                termination._note(15, None)
            answers.append(termination.agreed())
        return answers.index(True)

    one, other = in_two_processes(ask)
    assert one == other >= 30
