"""The benchmark of a training loop splits the steps of a real training into its parts."""

import json
import re
import signal
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.hooks import ParamSchedulerHook
from mmengine.optim import OptimWrapper
from mmengine.registry import DefaultScope
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import MODELS

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import (
    ForeachMovingAverage,
    LabelPreprocessor,
    loop_speed,
)
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.loop_speed import OVERHEAD, PARTS, measure_loop
from tokenformer_vit.training.synthetic import SyntheticImages, shrink, with_synthetic_images

STEPS = 5
WITHOUT_WORKERS = {"train_dataloader.num_workers": 0}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Return the only folder in which temporary files are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def benchmark(command, config, tmp_path, monkeypatch):
    """Measure the small config in a folder of its own, and return the record."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "small.py"
    own.write_text(f"_base_ = {str(config)!r}\ntrain_dataloader = dict(num_workers=0)\n")

    def run(*words):
        options = ("--steps", STEPS, "--warm-up", 2, "--out", "deep/loop.json")
        done = command("benchmark", "--loop", own, *options, *words)
        assert done.status == 0, done.output
        return json.loads((tmp_path / "deep" / "loop.json").read_text()), done.out

    return run


def check_arithmetic(record):
    for run in record["runs"]:
        assert [part["part"] for part in run["parts"]] == [*PARTS]
        parts = np.array([part["seconds"] for part in run["parts"]])
        assert parts.shape == (len(PARTS), record["n"])
        assert (parts >= 0).all()
        assert parts.sum(0) == pytest.approx(run["seconds"], rel=1e-4)
        for entry in (run, *run["parts"]):
            points = np.percentile(entry["seconds"], (20, 50, 80))
            assert [entry[f"seconds_p{p}"] for p in (20, 50, 80)] == pytest.approx(points, rel=1e-4)
        speed = record["items"] * record["n"] / sum(run["seconds"])
        assert run["images_per_s"] == pytest.approx(speed, rel=1e-4)
        assert 0 < run["overhead_p20"] <= run["overhead_p50"] <= run["overhead_p80"]
        assert all(run["parts"][PARTS.index(part)]["cpu_seconds_p50"] > 0 for part in OVERHEAD)


def test_synthetic_and_real_images(benchmark, data_root, tmp_path, temporary):
    # 48 images are six batches of eight: the measured steps are more than an epoch.
    record, printed = benchmark("--data-root", data_root)
    check_arithmetic(record)
    assert [run["data"] for run in record["runs"]] == ["synthetic", "real"]
    facts = {"config": "small", "processes": 1, "items": 8, "batch_size": 8, "accumulation": 1}
    facts |= {"n": STEPS, "warm_up": 2, "unit": "image", "small_tensors": False}
    assert facts.items() <= record.items()
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    assert (record["device"], record["dtype"]) == ("cpu", "float32")
    assert record["parameters"] == 19_875
    assert "--loop" in record["command"]
    for run in record["runs"]:
        assert f"{run['data']} data: {run['images_per_s']:,.1f} images/s\n" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "small.py", "temporary"]
    assert list(temporary.glob("tokenformer-vit-*")) == []


def test_a_step_has_all_of_its_batches(benchmark):
    record, _ = benchmark("--amp", "--cfg-options", "optim_wrapper.accumulative_counts=3")
    check_arithmetic(record)
    (run,) = record["runs"]
    assert (record["items"], record["accumulation"]) == (24, 3)
    assert record["dtype"] == "bfloat16 autocast"
    optimizer = next(part for part in run["parts"] if part["part"] == "optimizer")
    assert min(optimizer["seconds"]) > 0  # each step has one


def test_a_part_has_the_time_of_what_belongs_to_it(config, monkeypatch):
    clock = [0.0]

    def cost(owner, name, seconds):
        method = getattr(owner, name)

        def slowed(*args, **kwargs):
            clock[0] += seconds
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, slowed)

    cost(SyntheticImages, "__getitems__", 1)
    cost(LabelPreprocessor, "cast_data", 2)
    cost(LabelPreprocessor, "forward", 4)
    cost(ImageClassifier, "forward", 8)
    cost(OptimWrapper, "backward", 16)
    cost(OptimWrapper, "step", 32)
    cost(OptimWrapper, "zero_grad", 64)
    cost(ForeachMovingAverage, "update_parameters", 128)
    cost(ParamSchedulerHook, "after_train_iter", 256)
    stub = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: 2 * clock[0])
    monkeypatch.setattr(loop_speed, "time", stub)
    cfg = with_synthetic_images(load_config(config, WITHOUT_WORKERS), 4, 1)
    (run,) = measure_loop(cfg, 2, 2)["runs"]
    parts = {part["part"]: part for part in run["parts"]}
    copied = parts["copy"]["seconds"][0]
    assert copied >= 2
    expected = {"data": 1, "copy": copied, "preprocess": 4, "forward_backward": 8 + 16}
    expected |= {"optimizer": 32 + 64, "ema": 128, "hooks": 256}
    assert {name: part["seconds"] for name, part in parts.items()} == {
        name: [seconds, seconds] for name, seconds in expected.items()
    }
    assert parts["ema"]["cpu_seconds_p50"] == 2 * 128
    assert run["overhead_p50"] == 2 * (4 + 32 + 64 + 128 + 256)
    assert run["images_per_s"] == pytest.approx(8 / sum(expected.values()), rel=1e-4)


def test_as_many_tensors_each_small(benchmark):
    record, _ = benchmark("--small-tensors")
    check_arithmetic(record)
    cfg = load_config("imagenet_base_matched")
    sizes = []
    for change in (lambda cfg: None, shrink):
        change(cfg)
        with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
            model = MODELS.build({"data_preprocessor": cfg.data_preprocessor, **cfg.model})
        sizes.append([each.numel() for each in model.parameters()])
    assert len(sizes[0]) == len(sizes[1]) == 128
    assert sum(sizes[0]) == 86_447_848
    assert sum(sizes[1]) < 250_000
    assert record["small_tensors"]


def test_labels_have_the_form_that_the_pipeline_gives():
    for as_tensor in (True, False):
        images = SyntheticImages(1000, 4, 3, as_tensor)
        batch = images.__getitems__([999, 0, 999])
        assert (len(images), batch["inputs"].shape) == (1000, (3, 3, 4, 4))
        labels = batch["data_samples"]
        if not as_tensor:
            labels = torch.cat([sample.gt_label for sample in labels])
        assert labels[0] == labels[2]
        assert 0 <= labels.min() <= labels.max() < 3
        assert torch.equal(batch["inputs"][0], batch["inputs"][2])


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("--loop", "lm_reversal"), "data/reversal are not there: give --data-root"),
        (("--loop", "lm_reversal", "--small-tensors"), "lm_reversal.*give the config of one"),
        (("--loop", "digits_demo", "--data-root", "nowhere"), "no folder nowhere"),
    ],
)
def test_what_cannot_be_measured_is_one_line(command, words, pattern, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("benchmark", *words)
    assert (done.status, done.output.count("\n")) == (1, 1)
    assert re.search(pattern, done.output)


def test_an_error_in_a_step_is_reported_as_in_training(config, temporary):
    cfg = with_synthetic_images(load_config(config, WITHOUT_WORKERS), 52, 1)
    cfg.optim_wrapper.optimizer.lr = 1e30
    with pytest.raises(InputError, match="with a lower learning rate"):
        measure_loop(cfg, 2, 50)
    assert list(temporary.glob("tokenformer-vit-*")) == []


def test_a_training_that_is_too_short(config, data_root, temporary):
    cfg = load_config(config, WITHOUT_WORKERS, str(data_root))
    with pytest.raises(InputError, match=r"for 18 steps.* 2 .* 17 need 19: give fewer"):
        measure_loop(cfg, 2, 17)
    assert list(temporary.glob("tokenformer-vit-*")) == []


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(command, config, tmp_path, temporary):
    words = ("--loop", config, "--steps", 100_000)
    process = command.start(
        "benchmark", *words, cwd=tmp_path, environment={"TMPDIR": str(temporary)}
    )
    while not list(temporary.glob("*/*/*.log")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert printed.endswith("interrupted; finished results are kept\n")
    assert list(temporary.glob("tokenformer-vit-*")) == []


@pytest.mark.slow
def test_two_processes(command, config, data_root, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    out = tmp_path / "loop.json"
    words = ("--loop", config, "--data-root", data_root, "--launcher", "pytorch", "--out", out)
    words += ("--steps", STEPS, "--warm-up", 2)
    done = command.process("benchmark", *words, launcher=launcher, cwd=tmp_path)
    assert done.status == 0, done.output
    assert done.out.count(" data: ") == 2  # one of the processes prints
    record = json.loads(out.read_text())
    check_arithmetic(record)
    assert (record["processes"], record["items"]) == (2, 16)
    assert [run["data"] for run in record["runs"]] == ["synthetic", "real"]
