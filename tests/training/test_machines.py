"""A run on two machines: two agents of torchrun, each with a folder that the other cannot see."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tokenformer_vit.training.reports import read_scalars

pytestmark = pytest.mark.slow

# Everything that has a state: workers, mixup, drop path, averaged and accumulated weights.
OPTIONS = (
    *("--launcher", "pytorch", "--batch-size", "4"),
    *("--cfg-options", "train_dataloader.num_workers=1", "train_cfg.max_epochs=4"),
    *("optim_wrapper.accumulative_counts=2", "default_hooks.checkpoint.by_epoch=False"),
    "default_hooks.checkpoint.interval=4",
)


def free_port() -> int:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        return port.getsockname()[1]


def losses(folder: Path) -> dict[int, float]:
    train, _ = read_scalars(sorted(folder.glob("run/*/vis_data/scalars.json")))
    return {step: record["loss"] for step, record in train.items()}


class Cluster:
    """Two machines with a process each, and a relative work directory on their own disks.

    The agent that is started first has the first process, and the store where agents meet.
    """

    def __init__(self, train, root: Path) -> None:
        self.train, self.root, self.machines = train, root, [root / "a", root / "b"]
        self.agents: list[subprocess.Popen] = []
        for machine in self.machines:
            machine.mkdir(parents=True)

    @property
    def first(self) -> Path:
        """Return the machine that had the first process, which alone has the log."""
        (first,) = {path.parents[3] for path in self.root.glob("*/run/*/*/*.json")}
        return first

    def start(self, *words: str, nodes: str = "2") -> list[subprocess.Popen]:
        port = free_port()
        launcher = (
            *("-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=1"),
            "--max-restarts=3",
        )
        for machine in self.machines:
            own = f"--rdzv-conf=last_call_timeout=20,is_host={int(not self.agents)}"
            start = {"launcher": (*launcher, own), "cwd": machine}
            self.agents.append(self.train.start(Path("run"), *words, *OPTIONS, **start))
        return self.agents


@pytest.fixture
def cluster(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cluster = Cluster(train, tmp_path / "cluster")
    yield cluster
    for agent in cluster.agents:
        agent.terminate()  # an agent ends its process; one that ended before stays as it is


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> Path:
    """Train without an interruption on one machine, and return its disk."""
    root = tmp_path_factory.mktemp("whole")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    train(root / "run", *OPTIONS, launcher=launcher)
    return root


def wait_for(agents, done):
    deadline = time.monotonic() + 400
    while not done():
        assert all(agent.poll() is None for agent in agents), agents[0].communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def worker(agent: subprocess.Popen) -> int:
    """Return the process that an agent of torchrun started."""
    (number,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return int(number)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_is_started_again_and_goes_on_exactly(cluster, whole, killed):
    agents = cluster.start("--resume")
    wait_for(agents, lambda: any(cluster.root.glob("*/run/*/*/*.json")))
    wait_for(agents, lambda: max(losses(cluster.first), default=0) >= 10)
    os.kill(worker(agents[killed]), signal.SIGKILL)
    output = [agent.communicate(timeout=400)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    first = cluster.first
    assert len(list(first.glob("run/*/vis_data"))) == 2  # it was in fact started again
    assert losses(first) == losses(whole)
    weights = [folder / "run" / "model.safetensors" for folder in (first, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    (other,) = {*cluster.machines} - {first}
    assert not [*other.glob("run/*.pth")]  # the first process sent it the checkpoint


def test_a_lost_machine_leaves_the_other_one_training(cluster):
    agents = cluster.start("--resume", "--elastic", nodes="1:2")
    wait_for(agents, lambda: any(cluster.root.glob("*/run/*/*/*.json")))
    wait_for(agents, lambda: max(losses(cluster.first), default=0) >= 10)
    for process in (worker(agents[1]), agents[1].pid):
        os.kill(process, signal.SIGKILL)
    agents[1].communicate()
    output, _ = agents[0].communicate(timeout=400)
    assert agents[0].returncode == 0, output
    assert "written by 2 processes, this run has 1: each step takes the same samples" in output
    assert list(losses(cluster.first)) == list(range(1, 25))
