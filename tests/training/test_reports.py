"""The results of a run: the record, the curves, the export and its card."""

import json
import math
import sys

import pytest
import timm
import torch
from mmengine.config import Config
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from tokenformer_vit.cli import export
from tokenformer_vit.training import reports
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.reports import draw_curves, read_scalars
from tokenformer_vit.training.runner import TrainingRunner

CLASSES = ("bright", "dark", "split")  # the folders of conftest.py


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
    with second.open("ab") as file:
        file.write(b'\n{"loss": \xff')  # of a crash of the machine
    train, val = read_scalars([first, second])
    assert [record["loss"] for record in train.values()] == [3.0, 2.5, 1.5]
    assert {step: record["accuracy/top1"] for step, record in val.items()} == {1: 10.0, 2: 20.0}


@pytest.fixture
def drawn(monkeypatch):
    """Return the title and the lines of the panels of a figure that would be written."""
    figures = []
    monkeypatch.setattr(reports, "write_figure", lambda _, figure, **how: figures.append(figure))

    def panels():
        found = {}
        for axes in figures[0].axes:
            named = [line for line in axes.lines if not line.get_label().startswith("_")]
            lines = {line.get_label(): line.get_xydata().tolist() for line in named}
            found[axes.get_title()] = lines
        return figures[0].get_suptitle(), found

    return panels


def test_curves_of_a_classifier_are_over_epochs_and_mark_growth(drawn, tmp_path):
    train = {step: {"loss": 4.0 - step, "lr": 0.1} for step in (1, 2, 3)}
    val = {
        1: {"accuracy/top1": 10.0, "accuracy/top5": 40.0, "cross_entropy": 2.5, "time": 3.0},
        2: {"accuracy/top1": 20.0, "accuracy/top5": 50.0, "cross_entropy": 1.5, "time": 3.0},
    }
    draw_curves(train, val, tmp_path, growth=[2], iters_per_epoch=2, title="digits")
    title, panels = drawn()
    assert title == "digits: accuracy/top1 20.00, accuracy/top5 50.00"
    assert panels["loss"] == {
        "training": [[0.5, 3.0], [1.0, 2.0], [1.5, 1.0]],
        "validation": [[1.0, 2.5], [2.0, 1.5]],
        "model grew": [[1.0, 0.0], [1.0, 1.0]],
    }
    accuracies = {"accuracy/top1": [[1, 10], [2, 20]], "accuracy/top5": [[1, 40], [2, 50]]}
    assert panels["validation"] == accuracies


@pytest.mark.parametrize(
    ("figures", "held_out"),
    [
        ({"perplexity": math.exp(2), "perplexity/en": 5.0}, {"validation": [[2.0, 2.0]]}),
        ({"reconstruction/error": 0.75}, {}),
    ],
)
def test_curves_of_texts_and_of_a_pre_training(drawn, tmp_path, figures, held_out):
    train = {step: {"loss": 4.0 - step, "lr": 0.1} for step in (1, 2)}
    draw_curves(train, {2: figures}, tmp_path, iters_per_epoch=None)
    _, panels = drawn()
    assert panels["loss"] == {"training": [[1.0, 3.0], [2.0, 2.0]], **held_out}
    assert panels["validation"] == {name: [[2, value]] for name, value in figures.items()}


def test_training_ends_with_a_record(trained):
    record = json.loads((trained.work_dir / "record.json").read_text())
    assert record["dtype"] == "bfloat16 autocast"
    assert (record["seed"], record["epochs"], record["iterations"]) == (5, 2, 12)
    assert (record["images_per_step"], record["train_images"]) == (16, 48)
    assert record["peak_mib"] > 100
    assert record["loss_first"] == pytest.approx(1.0986, abs=0.02)  # ln 3: the head starts at zero
    assert record["versions"]["torch"] == torch.__version__
    assert 0 <= record["accuracy/top1"] <= 100


def test_the_exported_folder_says_what_is_known_of_the_run(trained, data_root):
    record = json.loads((trained.work_dir / "record.json").read_text())
    card = (trained.work_dir / "README.md").read_text(encoding="utf-8")
    for fact in (
        *(f"Folder: {data_root.name}", "Training images: 48", "Validation images: 48"),
        *("Config: small.py", "Epochs: 2", "Iterations: 12", "Optimiser: AdamW", "Seed: 5"),
        *("Learning rate: 0.005", "Batch size (images a step): 16", "Precision: bfloat16 autocast"),
        *("Weights: exponential", f"Top-1 accuracy: {record['accuracy/top1']:.4g} %"),
    ):
        assert f"- {fact}" in card, fact
    assert str(data_root.parent) not in card  # a path may be private
    assert "datasets:" not in card  # a folder does not say which data set it is


def test_the_export_of_a_checkpoint_knows_data_and_recipe_but_no_results(trained, tmp_path):
    export.main([str(trained.work_dir / "epoch_1.pth"), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- Training images: 48" in card
    assert "- Epochs: 1\n  - Iterations: 6\n" in card
    assert "Validation:" not in card
    assert "accuracy" not in card


@pytest.mark.slow
def test_a_config_without_a_file_trains_and_exports(config, data_root, tmp_path):
    """A notebook may make its config by hand."""
    options = {"train_cfg.max_epochs": 2, "train_dataloader.num_workers": 0}
    cfg = load_config(config, options, str(data_root), work_dir=str(tmp_path))
    TrainingRunner.from_cfg(Config(cfg.to_dict())).train()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "- Training images: 48" in card
    assert "Config:" not in card
    assert (tmp_path / "curves.png").is_file()


def test_the_validation_loss_is_the_cross_entropy_of_the_exported_model(trained, data_root):
    """The export holds the averaged weights, with which the last validation was made."""
    model = timm.create_model(f"local-dir:{trained.work_dir}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    files = sorted((data_root / "val").glob("*/*.png"))
    images = torch.stack([transform(Image.open(file)) for file in files])
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(images), labels).item()
    _, val = read_scalars(sorted(trained.work_dir.glob("*/vis_data/scalars.json")))
    assert list(val) == [1, 2]
    # The run validates in bfloat16; tests/cli/test_test.py compares in float32.
    assert val[2]["cross_entropy"] == pytest.approx(expected, rel=2e-3)
    assert val[1]["cross_entropy"] != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("cuda", [True, False])
def test_the_peak_on_a_gpu_is_that_of_all_lines_of_the_log(monkeypatch, cuda):
    """mmengine's logger starts a new peak at each line."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 << 20)
    monkeypatch.setitem(sys.modules, "resource", None)  # as under Windows
    expected = [5, 9] if cuda else [None, None]
    assert [reports._peak_mib(logged) for logged in (0, 9)] == expected


VIT = """
model = dict(
    backbone=dict(
        _delete_=True, type="VisionTransformer", img_size=8, patch_size=4, out_type="cls_token",
        arch=dict(embed_dims=24, num_layers=1, num_heads=2, feedforward_channels=48),
    )
)
"""
ARC = """
model = dict(
    head=dict(type="ArcFaceClsHead", num_classes=3, in_channels=24, _delete_=True), train_cfg=None
)
train_dataloader = dict(dataset=dict(pipeline=[dict(type="LoadImage"), dict(type="PackInputs")]))
"""
PADDED = """
_pipeline = [dict(type="LoadImage"), dict(type="Pad", size=(8, 8)), dict(type="PackInputs")]
test_dataloader = dict(dataset=dict(pipeline=_pipeline))
"""
BGR = PADDED.replace("LoadImage", "LoadImageFromFile")
UNWANTED = "default_hooks = dict(results=dict(export=False))"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((VIT, "VisionTransformer"), (ARC, "ArcFaceClsHead"), (BGR, "BGR")),
        *((PADDED, "(Pad): use EvalTransform"), (UNWANTED, "export=False")),
    ],
    ids=["backbone", "head", "channels", "pipeline", "unwanted"],
)
def test_a_run_without_an_export_says_so_and_ends_with_a_record(
    train, config, tmp_path, text, reason
):
    path, run = tmp_path / "own.py", tmp_path / "run"
    path.write_text(f"_base_ = {str(config)!r}\n{text}")
    output = train.of(path)(run, "--cfg-options", "train_cfg.max_epochs=2")
    assert output.count("This run exports no model") == 1
    record = json.loads((run / "record.json").read_text())
    assert reason in record["not_exported"]
    assert record["epochs"] == 2
    assert (run / "curves.png").is_file()
    assert not (run / "model.safetensors").exists()
    described = "timm_config" in torch.load(run / "epoch_2.pth", weights_only=True)
    assert described is (text == UNWANTED)


def test_a_model_logs_to_the_backends_of_its_config(trained):
    """TensorBoard stands for W&B and MLflow, which are backends of the same visualizer."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (folder,) = trained.work_dir.glob("*/vis_data")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    scalars = read_scalars([folder / "scalars.json"])
    for name, lines in zip(("loss", "accuracy/top1"), scalars, strict=True):
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx({step: line[name] for step, line in lines.items()})
