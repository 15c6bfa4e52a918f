"""mmengine reads files without running code; a run notices changed data and signals."""

import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import mmengine
import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.registry import DefaultScope
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import load_from_local
from mmpretrain.registry import HOOKS, MODELS

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.checkpoint import ExactCheckpointHook
from tokenformer_vit.training.guard import classes_of
from tokenformer_vit.training.identity import check_identity, run_identity
from tokenformer_vit.training.mmengine_internals import checkpoint_schemes
from tokenformer_vit.training.processes import is_first
from tokenformer_vit.training.storage import (
    AtomicLocalBackend,
    load_checkpoint_together,
    load_plain_checkpoint,
    secure_files,
)
from tokenformer_vit.training.termination import PatientWorker, Termination

BACKBONE = {
    "type": "TimmClassificationBackbone",
    "model_name": "tokenformer_tiny",
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
}


@pytest.fixture(autouse=True)
def secured():
    secure_files()


@pytest.mark.parametrize(
    "name",
    [
        "http://localhost/x.pth",
        "https://localhost/x.pth",
        "open-mmlab://resnet50",
        "openmmlab://resnet50",
        "mmcls://resnet50",
        "torchvision://resnet50",
        "modelzoo://resnet50",
        "pavi://x",
        "s3://bucket/x.pth",
        "openmmlab:s3://bucket/x.pth",
        "unheard-of://x",
    ],
)
def test_what_lies_elsewhere_is_not_loaded(name):
    with pytest.raises(InputError, match="download it first"):
        CheckpointLoader.load_checkpoint(name, "cpu", logger="silent")


def test_every_scheme_of_mmengine_has_our_loader():
    before = checkpoint_schemes()
    assert set(before.values()) == {load_checkpoint_together}
    secure_files()
    assert checkpoint_schemes() == before
    assert isinstance(mmengine.fileio.get_file_backend("x.pth"), AtomicLocalBackend)


@pytest.mark.slow
def test_importing_replaces_nothing_and_a_plain_runner_is_safe(tmp_path):
    mark, trap = tmp_path / "executed", tmp_path / "trap.pth"
    (tmp_path / "plain.py").write_text(
        "custom_imports = dict(imports=['tokenformer_vit.training'])\n"
        "default_scope = 'mmpretrain'\n"
        f"model = dict(type='ImageClassifier', backbone={BACKBONE!r})\n"
        f"work_dir, load_from = {str(tmp_path / 'run')!r}, {str(trap)!r}\n"
    )
    code = f"""
import pathlib, torch
from mmengine.config import Config
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.fileio.handlers import file_handlers
from mmengine.runner import CheckpointLoader, Runner
before = dict(CheckpointLoader._schemes), dict(file_handlers)
import tokenformer_vit.training.storage, tokenformer_vit.cli.train
cfg = Config.fromfile({str(tmp_path / "plain.py")!r})
assert (dict(CheckpointLoader._schemes), dict(file_handlers)) == before
assert type(get_file_backend("x.pth")) is LocalBackend
class Trap:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path({str(mark)!r}),)
torch.save({{"trap": Trap()}}, {str(trap)!r})
Runner.from_cfg(cfg).load_or_resume()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "trap.pth is damaged, or holds more than tensors" in run.stderr.splitlines()[-1]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("registry", "part"),
    [
        (HOOKS, {"type": "GuardHook"}),
        (HOOKS, {"type": "ExactCheckpointHook"}),
        (MODELS, BACKBONE),
    ],
)
def test_each_part_that_meets_a_checkpoint_secures_the_files(registry, part, monkeypatch):
    monkeypatch.setattr(CheckpointLoader, "_schemes", {"": load_from_local})
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        registry.build(dict(part))
    assert CheckpointLoader._schemes == {"": load_checkpoint_together}


def test_a_file_may_have_a_name_like_a_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.ones(1)}}, tmp_path / "run:1.pth")
    assert "w" in load_plain_checkpoint("run:1.pth")["state_dict"]


def test_text_that_mmengine_would_run_as_a_config_is_dropped(tmp_path):
    """Runner.resume() gives the text under meta.config to Config.fromstring, which runs it."""
    content = {"meta": {"config": "import os; os.abort()", "cfg": "x = 1"}, "state_dict": {}}
    torch.save(content, tmp_path / "x.pth")
    assert load_plain_checkpoint(str(tmp_path / "x.pth"))["meta"] == {"cfg": "x = 1"}


class Images:
    def __init__(self, root, names):
        self.names = [(f"{root}/train/{name}", index % 2) for index, name in enumerate(names)]

    def __len__(self):
        return len(self.names)

    def get_data_info(self, index):
        path, label = self.names[index]
        return {"img_path": path, "gt_label": label}


def identity(dataset, batch_size=8, world_size=2):
    loader = SimpleNamespace(batch_size=batch_size, dataset=dataset)
    runner = SimpleNamespace(train_dataloader=loader, world_size=world_size, model=None)
    return run_identity(runner)


def test_data_may_move_but_not_change():
    here = identity(Images("/data", ["a/1.png", "b/1.png"]))
    assert here["samples_per_iteration"] == 16
    check_identity(here, identity(Images("/elsewhere/d", ["a/1.png", "b/1.png"]), 16, 1))
    for other in (["a/1.png", "b/2.png"], ["b/1.png", "a/1.png"], ["a/1.png", "c/1.png"]):
        with pytest.raises(InputError, match=r"hash of training images .*and labels was"):
            check_identity(here, identity(Images("/data", other)))
    with pytest.raises(
        InputError, match="number of training samples was 2 in the checkpoint and is 3 now"
    ):
        check_identity(here, identity(Images("/data", ["a/1.png", "b/1.png", "b/2.png"])))
    with pytest.raises(
        InputError,
        match="batch size times the number of processes was 16 in the checkpoint and is 18 now",
    ):
        check_identity(here, identity(Images("/data", ["a/1.png", "b/1.png"]), 9))


posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@posix
def test_a_sigterm_is_noted_and_later_has_its_former_effect():
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination()
    termination.begin()
    assert not termination.noted
    os.kill(os.getpid(), signal.SIGTERM)
    assert termination.noted
    assert termination.running[0] == 1
    termination.end()
    assert termination.running[0] == 0
    assert signal.getsignal(signal.SIGTERM) is before


@posix
@pytest.mark.parametrize("running", [True, False])
def test_a_worker_outlives_a_sigterm_only_while_its_run_goes_on(running):
    termination = Termination()
    termination.running[0] = running
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        PatientWorker(None, termination.running)(0)
        os.write(write, b"up")
        for _ in range(10):
            time.sleep(0.05)
        os.write(write, b"alive")
        os._exit(7)
    os.close(write)
    assert os.read(read, 2) == b"up"
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if running else 0)
    assert os.read(read, 5) == (b"alive" if running else b"")
    os.close(read)


@pytest.mark.parametrize("name", ["train.pkl", "train.pickle"])
def test_pickled_annotations_are_not_read(tmp_path, name):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'ran'}",))

    (tmp_path / name).write_bytes(pickle.dumps({"metainfo": {}, "data_list": [Evil()]}))
    with pytest.raises(InputError, match=r"a pickle can run code: save it as \.json"):
        BaseDataset(ann_file=str(tmp_path / name))
    with pytest.raises(InputError, match="a pickle can run code"):
        mmengine.load(str(tmp_path / name))
    assert not (tmp_path / "ran").exists()
    mmengine.dump([1], tmp_path / "own.pkl")  # writing is safe


@pytest.mark.parametrize(
    "where", ["{victim}", "{victim}/best_x.pth", "", "/", "..", "best_top1_epoch_1.pth"]
)
def test_a_checkpoint_does_not_say_what_is_removed(tmp_path, where):
    """mmengine removes the best checkpoint that a checkpoint names when there is a better one."""
    victim, work_dir = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    work_dir.mkdir()
    (victim / "best_x.pth").write_text("mine")
    own = work_dir / "best_top1_epoch_1.pth"
    own.write_text("ours")
    hook = ExactCheckpointHook(save_best="top1")
    hook.out_dir = str(work_dir)
    named = where.format(victim=victim)
    hook.best_ckpt_path = named
    info = {"best_ckpt": named, "best_ckpt_top1": named, "best_score": 1.0}
    hook._keep_best_within(SimpleNamespace(message_hub=SimpleNamespace(runtime_info=info)))
    expected = str(own) if where.startswith("best_") else None
    assert hook.best_ckpt_path == info["best_ckpt"] == info["best_ckpt_top1"] == expected
    assert info["best_score"] == 1.0


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [("pytorch", "RANK"), ("slurm", "SLURM_PROCID"), ("mpi", "OMPI_COMM_WORLD_RANK")],
)
def test_the_first_process_of_each_launcher(monkeypatch, launcher, variable):
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert is_first(launcher)
    assert is_first("none")
    monkeypatch.setenv(variable, "1")
    assert not is_first(launcher)
    assert is_first("none")  # by itself, although it may be a task of a job


@pytest.mark.parametrize("meta", [7, {"dataset_meta": 7}, {"dataset_meta": {"classes": 7}}, None])
def test_classes_of_a_foreign_checkpoint(meta):
    assert classes_of({"meta": meta}) is None
    assert classes_of({"meta": {"dataset_meta": {"classes": ["a", 1]}}}) == ["a", "1"]


def test_a_checkpoint_has_sixteen_bytes_a_parameter(trained):
    checkpoint = load_plain_checkpoint(str(trained.work_dir / "epoch_2.pth"))
    count = sum(tensor.numel() for tensor in checkpoint["state_dict"].values())
    tensors = [*checkpoint["state_dict"].values(), *checkpoint["ema_state_dict"].values()]
    for state in checkpoint["optimizer"]["state"].values():
        tensors += state.values()
    size = sum(tensor.nbytes for tensor in tensors)
    assert size == pytest.approx(16 * count, rel=0.01)
