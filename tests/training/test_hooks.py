"""A run is checked before it starts, stops when it diverges, and shows how it goes."""

import os
import pickle
import re
import shutil
import struct
from contextlib import suppress
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.runner import load_checkpoint

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import hooks
from tokenformer_vit.training.checkpoint import load_plain_checkpoint
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.data.mixing import LabelHead
from tokenformer_vit.training.runner import run_training

from ..samples import Trap
from .conftest import scalars

AVERAGE = {"type": "EMAHook", "momentum": 4e-5}
RUNS = {
    f"custom_hooks = [{AVERAGE!r}]": "several hooks average the weights",
    "default_hooks = dict(ema=None)\n"
    f"custom_hooks = [dict({AVERAGE!r}, evaluate_on_ema=False)]": "evaluate_on_ema=False",
    "train_dataloader = dict(batch_size=49, drop_last=True)\n"
    "param_scheduler = []": "48 samples for each process, fewer than a batch of 49",
    "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=3)\n"
    "param_scheduler = []": r"dict\(type='ResumableSampler', endless=True\)",
    "model = dict(head=dict(num_classes=4))\ndata_preprocessor = dict(num_classes=4)": "3 classes",
}


@pytest.mark.parametrize("more", RUNS)
def test_parts_that_do_not_fit_each_other_are_refused(own, data_root, tmp_path, more):
    cfg = load_config(own(more), data_root=str(data_root), work_dir=str(tmp_path))
    with pytest.raises(InputError, match=RUNS[more]):
        run_training(cfg)


def test_unpacked_data_have_the_classes_of_their_source():
    unpacked = SimpleNamespace(metainfo={"classes": ("0_cat", "1_ant")})
    hooks.check_same_classes("checkpoint", ["cat", "ant"], unpacked)
    with pytest.raises(InputError, match="label 0 is 'ant' there and '0_cat' here"):
        hooks.check_same_classes("checkpoint", ["ant", "cat"], unpacked)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("loss", "the loss is inf at iteration 8, epoch 2.*Resume with a lower rate"),
        ("weights", "the weights are not finite at iteration 12, epoch 2.*checkpoint is .*epoch_1"),
    ],
)
def test_what_is_not_finite_is_named_and_neither_validated_nor_saved(
    train, tmp_path, monkeypatch, part, said
):
    """The logger's interval is longer than the run; an epoch has six iterations."""
    loss, steps = LabelHead.loss, iter(range(1, 100))

    def infinite_once(head, *args, **kwargs):
        found, step = loss(head, *args, **kwargs), next(steps)
        if part == "weights" and step == 12:
            torch.nn.init.constant_(head.fc.bias, torch.inf)
        factor = torch.inf if part == "loss" and step == 8 else 1
        return {name: value * factor for name, value in found.items()}

    monkeypatch.setattr(LabelHead, "loss", infinite_once)
    if part == "loss":  # without a step the weights stay finite
        monkeypatch.setattr(OptimWrapper, "should_update", lambda self: False)
    line = train.fails(tmp_path, "--cfg-options", "default_hooks.logger.interval=100")
    assert re.search(said, line)
    assert not (tmp_path / "epoch_2.pth").exists()
    assert list(scalars(tmp_path)[1]) == [1]


def test_the_terminal_begins_with_what_matters_and_ends_with_the_files(trained):
    lines = trained.output.splitlines()
    files = "model.safetensors, config.json, curves.png, record.json, checkpoints"
    assert f"Done. In {trained.work_dir}: {files}" in trained.output
    (start,) = [index for index, line in enumerate(lines) if line.endswith("Training:")]
    assert any("takes 16 images, but the learning rate is for 64" in line for line in lines)
    facts = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines[start + 1 :][:17])
    told = {
        "config": str(trained.config),
        "parameters": "19,875, 19,875 of them trained",
        **{"train_images": "48", "val_images": "48", "images_per_step": "16"},
        **{"processes": "1", "dtype": "bfloat16 autocast", "optimizer": "AdamW", "seed": "5"},
        "length": "6 steps in 2 epochs",
    }
    assert facts.items() >= told.items()
    assert all(  # accumulated or not, an iteration by epochs is a batch of 8
        record["images/s"] == pytest.approx(8 / record["time"])
        for record in scalars(trained.work_dir)[0].values()
    )
    assert len(lines) < 60  # not hundreds, with the config, the environment and the hooks


def test_a_checkpoint_runs_no_code(config, data_root, tmp_path):
    mark, trap = tmp_path / "executed", tmp_path / "trap.pth"
    torch.save({"state_dict": {}, "trap": Trap(mark)}, trap)
    with pytest.raises(InputError, match=r"trap\.pth is damaged, or holds more than tensors"):
        load_plain_checkpoint(str(trap))
    cfg = load_config(config, data_root=str(data_root), work_dir=str(tmp_path))
    cfg.load_from = str(trap)
    with pytest.raises(InputError, match="holds more than tensors"):
        run_training(cfg)
    cfg.load_from = None
    for kind in ("Pretrained", "PlainPretrained"):  # mmengine's own, too
        cfg.model.head.init_cfg = {"type": kind, "checkpoint": str(trap), "prefix": "head."}
        with pytest.raises((InputError, pickle.UnpicklingError)):
            run_training(cfg)
    assert not mark.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def write_gadget(path, mark):
    """Write a file that reaches ``exec`` through what mmengine's fork allows in files."""
    torch.save({"state_dict": {}}, path)
    with ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    text = lambda word: b"X" + struct.pack("<I", len(word)) + word.encode()  # noqa: E731
    getter = b"cbuiltins\ngetattr\n"
    module = getter + getter + text("__self__") + b"\x86R"
    execute = getter + module + text("exec") + b"\x86R"
    code = b"\x80\x02}" + text("x") + b"cmmengine.logging.history_buffer\nHistoryBuffer\n)R"
    code += b"}" + text("statistics_methods") + b"}s" + text("__setstate__") + execute + b"sb"
    code += text(f"open({str(mark)!r}, 'w')") + b"bs."
    with ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, code if name.endswith("data.pkl") else content)


def test_a_checkpoint_runs_no_code_that_the_fork_of_mmengine_would_run(tmp_path):
    write_gadget(tmp_path / "gadget.pth", tmp_path / "executed")
    for read in (load_checkpoint, lambda _, path: load_plain_checkpoint(path)):
        with suppress(Exception):  # it may be read, as something else
            read(torch.nn.Linear(1, 1), str(tmp_path / "gadget.pth"))
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_is_read_from_a_url_and_names_are_not_unique(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for number in range(2):
        torch.save({"state_dict": {"x": torch.tensor(number)}}, tmp_path / f"{number}.pth")

    def download(url, path, *_, **__):
        shutil.copy(tmp_path / f"{url.split('/')[-2]}.pth", path)

    monkeypatch.setattr("timm.models._hub.download_url_to_file", download)
    for number in (0, 1, 0):
        content = load_plain_checkpoint(f"https://example.org/{number}/epoch_1.pth")
        assert content["state_dict"]["x"] == number
    for address in ("https://example.org/2/epoch_1.pth", "s3://bucket/epoch_1.pth"):
        with pytest.raises(InputError, match="download"):
            load_plain_checkpoint(address)


def test_text_that_mmengine_would_run_as_a_config_is_dropped(tmp_path):
    """Runner.resume() gives the text under meta.config to Config.fromstring, which runs it."""
    content = {"meta": {"config": "import os; os.abort()", "cfg": "x = 1"}, "state_dict": {}}
    torch.save(content, tmp_path / "run:1.pth")
    assert load_plain_checkpoint(str(tmp_path / "run:1.pth"))["meta"] == {"cfg": "x = 1"}
