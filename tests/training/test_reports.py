"""The results of a run: the record, the curves, the export and its card."""

import json

import numpy as np
import pytest
import timm
import torch
from mmpretrain import ImageClassificationInferencer
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from tokenformer_vit.cli import export
from tokenformer_vit.training import reports
from tokenformer_vit.training.reports import draw_curves, read_scalars

from ..samples import CLASSES


def test_logs_of_resumed_runs_are_merged(tmp_path):
    lines = [
        {"loss": 3.0, "step": 1},
        {"loss": 2.0, "step": 2},
        {"accuracy/top1": 10.0, "step": 1},
        {"loss": 2.5, "step": 2},
        {"loss": 1.5, "step": 3},
        {"accuracy/top1": 20.0, "step": 2},
    ]
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    first.write_text("\n".join(map(json.dumps, lines[:3])))
    # A crash of the machine leaves half a line.
    second.write_bytes("\n".join(map(json.dumps, lines[3:])).encode() + b'\n{"loss": \xff')
    train, val = read_scalars([first, second])
    assert [record["loss"] for record in train.values()] == [3.0, 2.5, 1.5]
    assert {step: record["accuracy/top1"] for step, record in val.items()} == {1: 10.0, 2: 20.0}


def test_curves_of_a_classifier_are_over_epochs_and_mark_growth(monkeypatch, tmp_path):
    figures, panels = [], {}
    monkeypatch.setattr(reports.Figure, "savefig", lambda figure, *_, **how: figures.append(figure))
    train = {step: {"loss": 4.0 - step, "lr": 0.1} for step in (1, 2, 3)}
    first = {"accuracy/top1": 10.0, "accuracy/top5": 40.0, "cross_entropy": 2.5, "time": 3.0}
    second = {"accuracy/top1": 20.0, "accuracy/top5": 50.0, "cross_entropy": 1.5, "time": 3.0}
    val = {1: first, 2: second}
    draw_curves(train, val, tmp_path / "curves.png", growth=[2], iters_per_epoch=2, title="digits")
    for axes in figures[0].axes:
        named = [line for line in axes.lines if not line.get_label().startswith("_")]
        lines = {line.get_label(): line.get_xydata().tolist() for line in named}
        panels[axes.get_title()] = lines
    assert figures[0].get_suptitle() == "digits: accuracy/top1 20.00, accuracy/top5 50.00"
    assert panels["loss"] == {
        "training": [[0.5, 3.0], [1.0, 2.0], [1.5, 1.0]],
        "validation": [[1.0, 2.5], [2.0, 1.5]],
        "model grew": [[1.0, 0.0], [1.0, 1.0]],
    }
    accuracies = {"accuracy/top1": [[1, 10], [2, 20]], "accuracy/top5": [[1, 40], [2, 50]]}
    assert panels["validation"] == accuracies


def test_the_exported_folder_says_what_is_known_of_the_run(trained, data_root):
    record = json.loads((trained.work_dir / "record.json").read_text())
    card = (trained.work_dir / "README.md").read_text(encoding="utf-8")
    for fact in (
        *(f"data: {data_root.name}", "train_images: 48", "val_images: 48"),
        *("config: small.py", "epochs: 2", "iterations: 12", "optimizer: AdamW", "seed: 5"),
        *("learning_rate: 0.005", "images_per_step: 16", "dtype: bfloat16 autocast"),
        *("weights: exponential", f"Top-1 accuracy: {record['accuracy/top1']:.4g} %"),
    ):
        assert f"- {fact}" in card, fact
    assert record["loss_first"] == pytest.approx(1.0986, abs=0.02)  # ln 3: the head starts at zero
    assert str(data_root.parent) not in card  # a path may be private
    assert "datasets:" not in card  # a folder does not say which data set it is


def test_the_export_of_a_checkpoint_knows_data_and_recipe_but_no_results(trained, tmp_path):
    export.main([str(trained.work_dir / "epoch_1.pth"), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- train_images: 48" in card
    assert "- epochs: 1\n  - iterations: 6\n" in card
    assert "accuracy" not in card


@torch.no_grad()
def test_inferencer_agrees_with_the_export(config, trained, data_root, tmp_path):
    last = str(trained.work_dir / "epoch_2.pth")
    inferencer = ImageClassificationInferencer(str(config), pretrained=last, device="cpu")
    assert tuple(inferencer.classes) == CLASSES  # the checkpoint's: the config names none
    large = np.random.default_rng(3).integers(0, 256, (31, 40, 3), dtype=np.uint8)
    Image.fromarray(large).save(tmp_path / "large.png")
    files = [data_root / "val" / name / "0.png" for name in CLASSES] + [tmp_path / "large.png"]
    results = inferencer([str(file) for file in files], batch_size=3)
    model = timm.create_model(f"local-dir:{trained.work_dir}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    scores = model(torch.stack([transform(Image.open(file)) for file in files])).softmax(-1)
    for expected, result in zip(scores, results, strict=True):
        np.testing.assert_allclose(result["pred_scores"], expected, rtol=1e-4, atol=1e-6)
        assert result["pred_class"] == CLASSES[expected.argmax()]
    assert len({result["pred_class"] for result in results}) > 1
