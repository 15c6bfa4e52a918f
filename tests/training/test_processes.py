"""Processes meet however they were started, and share what only the first one has."""

import copy
import os
import socket
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.identity import check_processes, keep_samples
from tokenformer_vit.training.processes import (
    check_alike,
    check_last_checkpoints,
    first_host,
    from_first,
    start_processes,
)

LAUNCHED = {
    "pytorch": {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    "slurm": {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_NODELIST": "a",
    },
    "mpi": dict.fromkeys(
        [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE")], "1"
    ),
}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment():
    """The environment, without variables of launchers; a test may change it."""
    known = {name for variables in LAUNCHED.values() for name in variables} | {*MEETING}
    known |= {name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM"))}
    with patch.dict(os.environ):
        for name in known:
            os.environ.pop(name, None)
        yield os.environ


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_launcher_without_its_environment(environment, launcher):
    last = list(LAUNCHED[launcher])[-1]
    with pytest.raises(
        InputError, match=rf"--launcher {launcher} needs \w+: .*{last}.* are not in"
    ):
        start_processes(SimpleNamespace(launcher=launcher))


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_more_processes_than_gpus(monkeypatch, environment, launcher):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment.update({**LAUNCHED[launcher], **MEETING})
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        environment[name] = "2"
    with pytest.raises(InputError, match="no GPU for process 2 of this machine, which has 2"):
        start_processes(SimpleNamespace(launcher=launcher))


@pytest.mark.parametrize("fails", [False, True])
def test_processes_on_gpus_meet_as_mmengine_lets_them(monkeypatch, environment, config, fails):
    called = []

    def init_dist(launcher, **kwargs):
        called.append((launcher, kwargs))
        if fails:
            raise RuntimeError("NCCL error:\nunhandled system error")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    module = "tokenformer_vit.training.processes"
    monkeypatch.setattr(f"{module}.init_dist", init_dist)
    monkeypatch.setattr(f"{module}.set_multi_processing", lambda **kwargs: None)
    environment.update({**LAUNCHED["slurm"], **MEETING})
    cfg = load_config(config)
    cfg.launcher = "slurm"
    if fails:
        with pytest.raises(
            InputError, match=r"cannot connect at 127\.0\.0\.1:29500 \(NCCL error: un"
        ):
            start_processes(cfg)
    else:
        start_processes(cfg)
    assert called == [("pytorch", {"backend": "nccl", "timeout": None})]
    assert "device_ids" not in cfg.model_wrapper_cfg  # mmengine gives the GPU of the process


def test_restarts_need_a_new_store(monkeypatch, environment):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment.update({**LAUNCHED["pytorch"], **MEETING, "LOCAL_RANK": "1"})
    environment.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_MAX_RESTARTS="3")
    with pytest.raises(InputError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv"):
        start_processes(SimpleNamespace(launcher="pytorch"))
    for name, value in (("USE_AGENT_STORE", "False"), ("MAX_RESTARTS", "0")):
        own = patch.dict(os.environ, {f"TORCHELASTIC_{name}": value})
        with own, pytest.raises(InputError, match="there is no GPU"):
            start_processes(SimpleNamespace(launcher="pytorch"))


@pytest.mark.parametrize("fault", ["taken", "no number"])
def test_a_port_that_cannot_be_used(monkeypatch, environment, fault):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1]) if fault == "taken" else "x"
        environment.update({**LAUNCHED["pytorch"], **MEETING, "MASTER_PORT": port})
        with pytest.raises(InputError, match=rf"cannot connect at 127\.0\.0\.1:{port} ") as raised:
            start_processes(SimpleNamespace(launcher="pytorch", get=lambda key: None))
    assert "\n" not in str(raised.value)
    assert "choose a free port" in str(raised.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-004,007],cpu1", "gpu003"),
        ("gpu[03,07-09]", "gpu03"),
        ("rack[2-3]-node[10-12].site", "rack2-node10.site"),
        ("login-1,n[1-2]", "login-1"),
    ],
)
def test_the_first_machine_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


def test_each_slurm_job_has_its_own_address(monkeypatch, environment):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment.update({**LAUNCHED["slurm"], "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4812345"})
    environment.update({"SLURM_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]"})
    with pytest.raises(InputError, match="there is no GPU"):
        start_processes(SimpleNamespace(launcher="slurm"))
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("n3", "22345")


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_processes_meet_without_a_gpu_and_without_scontrol(environment, in_two_processes, launcher):
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(port.getsockname()[1])

    def meet(rank):
        own = LAUNCHED[launcher] | {"PATH": ""}
        if launcher == "slurm":
            own |= {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}
            own["SLURM_NODELIST"] = "127.0.0.1,n2"
        else:
            own |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
            own["MASTER_ADDR"] = "127.0.0.1"
        os.environ |= own
        with patch("torch.cuda.device_count", lambda: 0):
            start_processes(SimpleNamespace(launcher=launcher, get=lambda key: None))

    received = in_two_processes(lambda rank: from_first(lambda: rank + 5), meet)
    assert received == [5, 5]


def test_the_first_process_alone_makes_what_all_receive(in_two_processes, seed):
    made = {
        "state_dict": {
            "float": torch.randn(3, 5),
            "bfloat16": torch.randn(7).bfloat16(),
            "transposed": torch.randn(4, 6).T,
            "bool": torch.rand(9) > 0.5,
            "step": torch.tensor(3),
            "empty": torch.empty(0, 4),
        },
        "rng": [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}],
        "meta": {"epoch": 7, "cfg": "x = 1"},
    }

    def work(rank):
        received = from_first(lambda: copy.deepcopy(made) if rank == 0 else None)
        assert received["meta"] == made["meta"]
        assert received["rng"][0]["python"] == made["rng"][0]["python"]
        assert torch.equal(received["rng"][0]["torch"], made["rng"][0]["torch"])
        for name, tensor in made["state_dict"].items():
            assert received["state_dict"][name].dtype == tensor.dtype
            assert torch.equal(received["state_dict"][name], tensor)
        return "equal"

    assert in_two_processes(work) == ["equal"] * 2


def test_an_error_of_the_first_process_stops_all(tmp_path, in_two_processes):
    def work(rank):
        from_first(lambda: (tmp_path / "absent.pth").read_bytes())

    first, other = in_two_processes(work)
    assert first.startswith("FileNotFoundError: ")
    assert other.startswith("InputError: the first process stopped: ")
    assert "absent.pth" in first
    assert "absent.pth" in other


@pytest.mark.parametrize("name", ["samples", "schedule"])
def test_machines_with_other_data_are_refused(in_two_processes, name):
    def work(rank):
        facts = {"samples": 48, "schedule": [1, 2]}
        check_alike(facts)
        check_alike({**facts, name: facts[name] if rank == 0 else 7})

    for line in in_two_processes(work):
        assert f"{name} is 7 in process 1 on {socket.gethostname()}, but " in line
        assert "give all machines the same data and config" in line


@pytest.mark.parametrize("facts", [{"max_epochs": 7}, {"max_epochs": 7, "max_iters": 7}])
def test_machines_with_other_facts_are_refused(in_two_processes, facts):
    one, two = in_two_processes(lambda rank: check_alike(facts if rank else {"max_iters": 9}))
    assert one == two
    assert one.startswith(f"InputError: max_iters is {facts.get('max_iters')} in process 1 on ")
    assert ", but 9 in process 0 on " in one


def test_a_later_checkpoint_on_another_machine_is_not_forgotten(tmp_path, in_two_processes):
    def work(rank):
        folder = tmp_path / str(rank)
        folder.mkdir()
        check_last_checkpoints(folder)  # a new run
        if rank == 0:
            (folder / "last_checkpoint").write_text("/some/where/epoch_1.pth")
        check_last_checkpoints(folder)  # only the first process writes checkpoints
        (folder / "last_checkpoint").write_text(f"epoch_{rank + 1}.pth\n")
        check_last_checkpoints(folder)

    for line in in_two_processes(work):
        assert "is epoch_2.pth on" in line
        assert "but epoch_1.pth on" in line
        assert "copy the later one" in line


def checkpoint_of(processes, samples=24):
    return {"exact_resume": {"rng": [{}] * processes, "run": {"samples_per_iteration": samples}}}


def test_another_number_of_processes_needs_leave(monkeypatch):
    check_processes(checkpoint_of(1)["exact_resume"])
    with pytest.raises(InputError, match=r"with 8 processes, and this run has 1.*add --elastic"):
        check_processes(checkpoint_of(8)["exact_resume"])
    assert keep_samples({}, 5) == 5
    assert keep_samples(checkpoint_of(8), 5) == keep_samples(checkpoint_of(1), 5) == 24
    monkeypatch.setattr("tokenformer_vit.training.identity.get_world_size", lambda: 6)
    assert keep_samples(checkpoint_of(8), 5) == 4
    monkeypatch.setattr("tokenformer_vit.training.identity.get_world_size", lambda: 7)
    with pytest.raises(InputError, match="7 processes cannot share the 24 samples"):
        keep_samples(checkpoint_of(8), 5)
