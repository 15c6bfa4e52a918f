"""Checkpoints in the background hold exactly their step, in order, and are whole or absent."""

import copy
import shutil
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import ExactCheckpointHook, background, secure_files
from tokenformer_vit.training.background import BackgroundWriter, snapshot


def same(one, other):
    """Tell whether two states are equal, and hold values of the same types."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def trained(device="cpu"):
    """Return a tied model and its optimiser, with state."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)).to(device)
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(5, device=device)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    return {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"base_values": [0.1, 0.2]},
        "rng": (1, None, "MT19937"),
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_snapshot_holds_the_state_of_its_moment(device):
    model, optimizer = trained(device)
    state = state_of(model, optimizer)
    expected = torch.utils._pytree.tree_map(
        lambda each: each.detach().cpu().clone() if isinstance(each, torch.Tensor) else each,
        copy.deepcopy(state),
    )
    copied, ready = snapshot(state)
    optimizer.step()  # in place, and on a GPU queued while the copy is
    state["scheduler"]["base_values"][0] = 7
    if ready is not None:
        ready.synchronize()
    assert same(copied, expected)
    assert isinstance(copied["state_dict"], OrderedDict)
    assert copied["state_dict"]._metadata == state["state_dict"]._metadata
    tied, other = copied["state_dict"].values()
    assert tied.data_ptr() == other.data_ptr()
    assert not torch.equal(tied, model[0].weight.cpu())


@pytest.fixture
def held(monkeypatch):
    """Hold every write until an event; collect what is written."""
    go, written, write = threading.Event(), [], background.write_checkpoint

    def held_write(checkpoint, path, backend_args=None):
        assert go.wait(60)
        write(checkpoint, path, backend_args)
        written.append(Path(path).name)

    monkeypatch.setattr(background, "write_checkpoint", held_write)
    secure_files()
    yield go, written
    go.set()


def test_writes_and_what_follows_come_in_order_and_not_before_they_are_complete(held, tmp_path):
    (go, written), writer = held, BackgroundWriter()
    value = torch.zeros(3)
    for number in (1, 2):
        writer.write({"value": value}, str(tmp_path / f"{number}.pth"))
        writer.then(lambda: written.append("pointed"))
        value += 1
    third = threading.Thread(target=writer.write, args=({}, str(tmp_path / "3.pth")))
    third.start()  # it waits: two copies are in memory
    assert written == []
    assert not list(tmp_path.iterdir())
    go.set()
    third.join()
    writer.wait()
    assert written == ["1.pth", "pointed", "2.pth", "pointed", "3.pth"]
    for number in (1, 2):
        saved = torch.load(tmp_path / f"{number}.pth", weights_only=True)["value"]
        assert saved.tolist() == [number - 1.0] * 3


@pytest.mark.parametrize("in_background", [True, False])
def test_after_an_error_nothing_is_written_and_it_is_raised(tmp_path, in_background):
    secure_files()
    (tmp_path / "file").write_text("no folder")
    writer, done = BackgroundWriter(), []
    writer.background = in_background
    writer.check()

    def run():
        writer.write({}, str(tmp_path / "file" / "1.pth"))
        writer.then(lambda: done.append("pointed"))
        writer.write({}, str(tmp_path / "2.pth"))
        writer.wait()

    with pytest.raises(InputError, match=r"cannot write .*1\.pth .*: free some space, .*--resume"):
        run()
    for again in (writer.check, writer.wait):
        with pytest.raises(InputError, match="cannot write"):
            again()
    assert done == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_run_goes_on_while_its_checkpoints_are_written(train, tmp_path, monkeypatch):
    options = (
        "--cfg-options",
        "train_dataloader.num_workers=0",
        "val_dataloader.num_workers=0",
        "optim_wrapper.accumulative_counts=2",
        "default_hooks.checkpoint.by_epoch=False",
        "default_hooks.checkpoint.interval=3",
        "default_hooks.checkpoint.max_keep_ckpts=9",
        "default_hooks.checkpoint.save_best=accuracy/top1",
        "train_cfg.max_epochs=2",
    )
    train(tmp_path / "waiting", *options, "default_hooks.checkpoint.background=False")
    present, late, write = [0], [], background.write_checkpoint
    before = ExactCheckpointHook.before_train_iter

    def note(hook, runner, *args, **kwargs):
        present[0] = runner.iter
        before(hook, runner, *args, **kwargs)

    def write_late(checkpoint, path, backend_args=None):
        time.sleep(0.3)
        late.append(present[0] >= checkpoint["meta"]["iter"])
        assert Path(path).name != "timed.pth"
        write(checkpoint, path, backend_args)

    monkeypatch.setattr(ExactCheckpointHook, "before_train_iter", note)
    monkeypatch.setattr(background, "write_checkpoint", write_late)
    train(tmp_path / "going_on", *options, "default_hooks.checkpoint.minutes=1e6")
    assert any(late)
    waiting, going_on = ({p.name for p in (tmp_path / name).glob("*.pth")} for name in RUNS)
    assert waiting == going_on >= {f"iter_{step}.pth" for step in range(3, 13, 3)}
    for name in waiting:
        one, other = (torch.load(tmp_path / run / name, weights_only=True) for run in RUNS)
        assert one.keys() == other.keys()
        for part in ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"):
            assert (part not in one) or same(one[part], other[part]), (name, part)
        if "exact_resume" in one:
            for part in ("rng", "gradients", "sampler_seed"):
                assert same(one["exact_resume"][part], other["exact_resume"][part])
        assert one["meta"].keys() == other["meta"].keys()
        for key in ("epoch", "iter", "seed"):
            assert one["meta"][key] == other["meta"][key]


RUNS = ("waiting", "going_on")


@pytest.mark.slow
def test_checkpoints_come_by_the_clock_too(train, tmp_path, monkeypatch):
    """A regular checkpoint replaces the timed one; a run also resumes at the end of an epoch."""
    names, point_to, kept = [], ExactCheckpointHook._point_to, tmp_path / "kept.pth"

    def noted(hook, runner, path):
        point_to(hook, runner, path)
        names.append(Path(path).name)
        if names == ["timed.pth"] * 3:  # at the iterations 2, 4 and 6
            shutil.copy(path, kept)

    monkeypatch.setattr(ExactCheckpointHook, "_point_to", noted)
    options = ("train_cfg.max_epochs=2", "default_hooks.checkpoint.minutes=1e-6")
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    train(run, "--cfg-options", *options)
    assert [name for name in names if name != "timed.pth"] == ["epoch_1.pth", "epoch_2.pth"]
    assert names.index("timed.pth") < names.index("epoch_1.pth")
    assert not (run / "timed.pth").exists()

    assert torch.load(kept, weights_only=True)["meta"]["iter"] == 6
    train(resumed, "--resume", str(kept), "--cfg-options", *options)
    for name in ("epoch_1.pth", "epoch_2.pth"):
        one, other = (torch.load(each / name, weights_only=True) for each in (run, resumed))
        assert same(one["exact_resume"]["rng"], other["exact_resume"]["rng"])
        assert same(one["state_dict"], other["state_dict"])
