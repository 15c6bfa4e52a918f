"""What a run shows: the progress bar, the curves, the record."""

import io
import json
import logging
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from PIL import Image

from tokenformer_vit.training import AutocastOptimWrapper, ProgressHook, reports
from tokenformer_vit.training.reports import (
    _peak_mib,
    draw_curves,
    environment,
    read_scalars,
)


def write_log(path, *records):
    path.parent.mkdir(parents=True)
    path.write_text(
        "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
    )
    return path


def test_logs_of_resumed_runs_are_merged(tmp_path):
    first = write_log(
        tmp_path / "1" / "scalars.json",
        {"loss": 3.0, "lr": 0.1, "step": 1},
        {"loss": 2.0, "lr": 0.1, "step": 2},
        {"accuracy/top1": 10.0, "step": 1},
        '{"loss": 1.',
    )
    second = write_log(
        tmp_path / "2" / "scalars.json",
        {"loss": 2.5, "lr": 0.1, "step": 2},
        {"loss": 1.5, "lr": 0.0, "step": 3},
        {"accuracy/top1": 20.0, "step": 2},
    )
    train, val = read_scalars([first, second])
    assert [record["loss"] for record in train.values()] == [3.0, 2.5, 1.5]
    assert {step: record["accuracy/top1"] for step, record in val.items()} == {1: 10.0, 2: 20.0}

    draw_curves(train, val, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(100_000)) > 3  # the three lines were drawn


def test_the_bar_shows_progress_and_eta_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    runner = SimpleNamespace(
        max_iters=10,
        iter=4,
        epoch=1,
        max_epochs=3,
        train_loop=None,
        logger=logging.getLogger("test"),
    )
    hook = ProgressHook()
    hook.before_train(runner)
    for _ in range(3):
        hook.after_train_iter(runner, 0, None, {"loss": torch.tensor(1.25)})
    hook._bar.refresh()
    hook.after_train(runner)
    text = stream.getvalue()
    assert "7/10" in text
    assert "epoch=2/3, loss=1.2500" in text


def test_the_eta_counts_the_validations_to_come(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now = 0.0
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(reports.time, "monotonic", lambda: now)
    loop = SimpleNamespace(epoch=0, max_epochs=4, val_begin=1, val_interval=1)
    runner = SimpleNamespace(
        max_iters=20, iter=0, epoch=0, max_epochs=4, train_loop=loop, logger=logging.getLogger("x")
    )
    hook = ProgressHook()
    hook.before_train(runner)
    etas = []
    for epoch, seconds in enumerate((20, 40), start=1):
        for _ in range(5):
            now += 1.0
            hook.after_train_iter(runner, 0, None, {"loss": torch.tensor(1.25)})
        loop.epoch = epoch
        hook.before_val(runner)
        now += seconds
        hook.after_val(runner)
        state = hook._bar.format_dict
        assert state["rate"] == pytest.approx(1)  # of training alone
        assert state["elapsed"] == now
        etas.append(state["eta"])
    hook._bar.refresh()
    hook.after_train(runner)
    # 15 iterations and 3 validations like the first; then 10 and 2 of what both took on average.
    assert etas == ["01:15", "01:10"]
    assert "10/20 [01:10<01:10" in sys.stderr.getvalue()


def test_bfloat16_training_needs_no_gpu():
    model = torch.nn.Linear(3, 3).to(get_device())
    images = torch.randn(2, 3, device=get_device())
    wrapper = AutocastOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with wrapper.optim_context(model):
        assert model(images).dtype == torch.bfloat16
    with OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)).optim_context(model):
        assert model(images).dtype == torch.float32


def test_training_under_autocast_ends_with_a_record(train, tmp_path):
    train(tmp_path, "--amp", "--seed", "5", "--cfg-options", "train_cfg.max_epochs=2")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["dtype"] == "bfloat16 autocast"
    assert (record["seed"], record["epochs"], record["iterations"]) == (5, 2, 12)
    assert (record["images_per_step"], record["train_images"]) == (8, 48)
    assert record["peak_mib"] > 100
    assert record["loss_first"] == pytest.approx(1.0986, abs=0.02)  # ln 3: the head starts at zero
    assert record["versions"]["torch"] == torch.__version__
    assert 0 <= record["accuracy/top1"] <= 100
    if find_spec("tensorboard"):
        assert list(tmp_path.glob("*/vis_data/events.out.tfevents.*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is known everywhere")
def test_a_system_that_cannot_tell_its_peak_memory_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # as under Windows
    assert _peak_mib() is None


def test_a_machine_without_git_is_no_obstacle(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"].startswith("tokenformer_vit 0.")


@pytest.mark.parametrize(
    ("module", "error", "line"),
    [
        # Where transformers and pycocotools are both installed.
        (
            "mmpretrain.models",
            'TypeError("NoneType takes no arguments")',
            "error: mmpretrain cannot be imported while transformers and pycocotools",
        ),
        # On a server without graphics libraries.
        (
            "cv2",
            'ImportError("libGL.so.1: cannot open shared object file")',
            "error: OpenCV, which mmcv needs, finds no libGL on this machine",
        ),
    ],
)
def test_an_unusable_installation_is_explained(module, error, line):
    code = f"""
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "{module}":
            raise {error}
sys.meta_path.insert(0, Finder())
from tokenformer_vit.command_line import run_tool
def main():
    import tokenformer_vit.training
run_tool(main)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(line)
