"""What a run shows: ten lines at its start, then speed and ETA."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from mmengine.hooks import LoggerHook
from mmengine.logging import MessageHub

from tokenformer_vit.training import ProgressHook, progress
from tokenformer_vit.training.reports import read_scalars


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make_runner(metainfo=None, **own):
    """Make the parts of a runner that a hook reads, with 48 images or sequences per step."""
    data = SimpleNamespace(metainfo=metainfo or {}, __len__=lambda: 7)
    loader = type("Loader", (), {"batch_size": 4, "dataset": data, "__len__": lambda _: 100})()
    common = {
        "train_dataloader": loader,
        "hooks": [LoggerHook(interval=2)],
        "world_size": 12,
        "optim_wrapper": SimpleNamespace(_accumulative_counts=1),
        "train_loop": None,
        "logger": logging.getLogger("test"),
        "message_hub": MessageHub(f"hub{id(loader)}"),
    }
    return SimpleNamespace(**{**common, **own})


@pytest.fixture(autouse=True)
def undescribed(request, monkeypatch):
    """Bars are tested without a whole runner to describe."""
    if "bar" in request.node.name or "eta" in request.node.name or "speed" in request.node.name:
        monkeypatch.setattr(progress, "describe_run", lambda runner: "")


def test_the_terminal_begins_with_ten_lines_that_matter(trained, data_root):
    lines = trained.output.splitlines()
    (start,) = [index for index, line in enumerate(lines) if line.endswith("Training:")]
    # The CPU of this machine may be slow in bfloat16.
    (warning,) = [line for line in lines[:start] if "This CPU multiplies" not in line]
    assert "An optimiser step takes 16 images, but the learning rate is for 64" in warning
    lines = lines[start:]
    facts = dict(line.split(maxsplit=1) for line in lines[1:9])
    assert facts["config"] == str(trained.config)
    assert facts["model"].startswith("tokenformer_tiny; Θ gelu_l2; 384 pairs")
    assert facts["parameters"] == "19,875"
    assert facts["data"] == f"48 training and 48 validation images, 3 classes in {data_root}"
    assert "1 process, bfloat16 autocast" in facts["device"]
    assert facts["step"].startswith("16 images (8 a process x 2 batches accumulated); AdamW, ")
    assert facts["step"].endswith("learning rate 0.005")
    assert facts["length"] == "6 steps in 2 epochs"
    assert facts["results"].startswith(str(trained.work_dir))
    assert "--resume" in lines[9]
    assert len(lines) < 60  # not hundreds, with the config, the environment and the hooks
    assert not any("Exp name" in line or "FileClient" in line for line in lines)


def test_the_log_file_has_what_the_terminal_leaves_out(trained):
    (log,) = trained.work_dir.glob("*/*.log")
    text = log.read_text(encoding="utf-8")
    for part in ("System environment:", "Config:", "Hooks will be executed", "Training:"):
        assert part in text


def test_the_log_has_images_per_second(trained):
    train, _ = read_scalars(sorted(trained.work_dir.glob("*/vis_data/scalars.json")))
    for record in train.values():
        assert record["images/s"] == pytest.approx(8 / record["time"], rel=0.9)
    assert re.search(r"Epoch\(train\).*eta: .*images/s: \d", trained.output)


@pytest.mark.parametrize(
    ("metainfo", "name", "number"),
    [({"classes": ["a"]}, "images/s", 96), ({"context_length": 128}, "tokens/s", 96 * 128)],
)
def test_speed_counts_images_or_tokens_of_all_processes(metainfo, name, number):
    runner = make_runner(metainfo, max_iters=9, iter=0)
    hook = ProgressHook()
    hook.before_train(runner)
    # The first iteration is slow. Then the losses are read after every second one.
    speeds = []
    for runner.iter, seconds in enumerate((9, 1.5, 0.25, 0.75)):
        runner.message_hub.update_scalar("train/time", seconds)
        hook.after_train_iter(runner, runner.iter)
        speeds.append(runner.message_hub.get_scalar(f"train/{name}").current())
    hook.after_train(runner)
    assert speeds == pytest.approx([number * 0.5 / of for of in (9, 1.5, 1.5, 0.5)])


def test_the_bar_shows_progress_and_eta_in_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    runner = make_runner(max_iters=10, iter=4, epoch=1, max_epochs=3)
    hook = ProgressHook()
    hook.before_train(runner)
    runner.message_hub.update_scalar("train/loss", 1.25)
    for index in range(3):
        hook.after_train_iter(runner, index)
    hook._bar.refresh()
    hook.after_train(runner)
    text = stream.getvalue()
    assert "7/10" in text
    assert re.search(r"[\d,]+ images/s", text)
    assert "epoch=2/3, loss=1.2500" in text


def test_the_eta_counts_the_validations_to_come(monkeypatch):
    now = 0.0
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    loop = SimpleNamespace(epoch=0, max_epochs=4, val_begin=1, val_interval=1)
    runner = make_runner(max_iters=20, iter=0, epoch=0, max_epochs=4, train_loop=loop)
    hook = ProgressHook()
    hook.before_train(runner)
    etas = []
    for epoch, seconds in enumerate((20, 40), start=1):
        for _ in range(5):
            now += 1.0
            hook.after_train_iter(runner, 0)
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
    assert "10/20 [01:10<01:10, 48 images/s" in sys.stderr.getvalue()  # one iteration a second
