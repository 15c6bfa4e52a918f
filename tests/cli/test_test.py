"""A test repeats validation's figure, agrees with the model run by hand, and fails in one line."""

import csv
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from matplotlib.mathtext import MathTextParser
from PIL import Image
from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from timm.data import create_transform, resolve_model_data_config

from tokenformer_vit.cli import test as tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.training import evaluate
from tokenformer_vit.training.reports import read_scalars
from tokenformer_vit.vision.images import read_image

from ..samples import write_images

# 29: an odd number, unequally shared. A spreadsheet would compute the last name.
VAL_IMAGES = {"bright": 10, "dark": 7, "=cmd()|$frac$": 12}


@pytest.fixture(scope="module")
def run(tmp_path_factory, command, config):
    """A run of two epochs at a constant rate; its averaged weights still lag behind."""
    root, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    for split, counts in (("train", dict.fromkeys(VAL_IMAGES, 16)), ("val", VAL_IMAGES)):
        write_images(root / split, (8, 8), counts, rng)
    text = "param_scheduler = [dict(type='ConstantLR', factor=1.0)]\ntrain_cfg = dict(max_epochs=2)"
    (root / "own.py").write_text(f"_base_ = {str(config)!r}\n{text}\n")
    config, work_dir = root / "own.py", root / "work"
    done = command("train", config, "--data-root", root, "--work-dir", work_dir)
    assert done.status == 0, done.output
    return SimpleNamespace(config=config, data=root, work_dir=work_dir)


def measured(run, checkpoint, out, *options):
    """Run the tool in this process and return what it recorded."""
    arguments = [run.config, checkpoint, "--data-root", run.data, "--out", out, "--cfg-options"]
    arguments += ["test_dataloader.num_workers=0", *options]
    tool.main([str(argument) for argument in arguments])
    return json.loads((out / "metrics.json").read_text())


def failure(run, checkpoint, out, *options):
    with pytest.raises(InputError) as error:
        measured(run, checkpoint, out, *options)
    assert "\n" not in str(error.value)
    return str(error.value)


def read_csv(path):
    text = path.read_text(encoding="utf-8")
    assert "\n=cmd" not in text
    assert ",=cmd" not in text
    return list(csv.DictReader(io.StringIO(text.replace("'=cmd", "=cmd"))))


def validated(run):
    _, val = read_scalars(run.work_dir.glob("*/vis_data/scalars.json"))
    names = ("accuracy/top1", "cross_entropy")
    return {epoch: {name: record[name] for name in names} for epoch, record in val.items()}


def test_command_repeats_validation_and_leaves_the_run_alone(run, command):
    before = {path: path.read_bytes() for path in run.work_dir.rglob("*") if path.is_file()}
    checkpoint = run.work_dir / "epoch_2.pth"
    status, out, err = command.process("test", run.config, checkpoint, "--data-root", run.data)
    assert status == 0, err
    folder = run.work_dir / "test"
    record = json.loads((folder / "metrics.json").read_text())
    assert record["metrics"] == pytest.approx(validated(run)[2], abs=1e-4)
    assert f"accuracy/top1: {validated(run)[2]['accuracy/top1']:.3f}" in out
    assert all(name in out for name in VAL_IMAGES)
    files = "metrics.json, per_class.csv, predictions.csv, confusion_matrix.png"
    assert out.splitlines()[-1] == f"Done. In {folder}: {files}"

    assert record["config"] == str(run.config)
    assert record["checkpoint"] == str(checkpoint)
    assert (record["data_root"], record["cfg_options"]) == (str(run.data), {})
    assert (record["epoch"], record["averaged_weights"], record["images"]) == (2, True, 29)
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert {row["class"]: row["support"] for row in record["classes"]} == VAL_IMAGES
    rows = [{key: str(value) for key, value in row.items()} for row in record["classes"]]
    assert read_csv(folder / "per_class.csv") == rows
    assert (folder / "confusion_matrix.png").is_file()
    assert not list(folder.glob(".*"))
    assert before == {path: path.read_bytes() for path in before}


def by_timm(folder, rows):
    """Return the scores of an exported model for the images of predictions.csv, (N, K)."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    with torch.no_grad():
        images = torch.stack([transform(read_image(row["path"])) for row in rows])
        return model(images).softmax(-1)


def test_figures_and_predictions_agree_with_the_exported_model(run, tmp_path):
    gone = tmp_path / "gone.pth"  # what the training started from
    options = [f"model.backbone.checkpoint_path={gone}"]
    record = measured(run, run.work_dir / "epoch_2.pth", tmp_path, *options)
    assert record["cfg_options"]["model.backbone.checkpoint_path"] == str(gone)
    names = [row["class"] for row in record["classes"]]
    rows = read_csv(tmp_path / "predictions.csv")
    assert sorted(Path(row["path"]) for row in rows) == sorted((run.data / "val").rglob("*.png"))
    for row, scores in zip(rows, by_timm(run.work_dir, rows), strict=True):
        assert row["label"] == Path(row["path"]).parent.name
        assert row["predicted"] == names[scores.argmax()]
        assert float(row["score"]) == pytest.approx(scores.max().item(), rel=1e-4)
    truth, found = ([row[name] for row in rows] for name in ("label", "predicted"))
    assert record["metrics"]["accuracy/top1"] == pytest.approx(100 * accuracy_score(truth, found))
    measures = precision_recall_fscore_support(truth, found, labels=names, zero_division=0)
    for row, *values in zip(record["classes"], *measures, strict=True):
        expected = [row[name] / 100 for name in ("precision", "recall", "f1-score")]
        assert values == pytest.approx([*expected, row["support"]])


@pytest.mark.slow
def test_two_processes_count_every_image_once(run, tmp_path, command):
    alone = measured(run, run.work_dir / "epoch_2.pth", tmp_path / "alone")
    status, out, err = command.process(
        "test",
        *(run.config, run.work_dir / "epoch_2.pth", "--data-root", run.data),
        *("--batch-size", 4, "--launcher", "pytorch", "--out", tmp_path / "two"),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    )
    assert status == 0, err
    assert out.count("Done.") == 1
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert (two["images"], two["classes"]) == (29, alone["classes"])
    assert two["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
    one, both = (read_csv(tmp_path / name / "predictions.csv") for name in ("alone", "two"))
    assert [{**row, "score": 0} for row in one] == [{**row, "score": 0} for row in both]


def test_an_export_is_tested_on_folders_which_may_lack_a_class(run, tmp_path, command):
    expected = json.loads((run.work_dir / "record.json").read_text())["accuracy/top1"]
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(run.work_dir / name, folder)
    refused = command("test", folder)
    assert "give a folder of them with --data-root" in refused.err
    few = shutil.copytree(run.data / "val", tmp_path / "few")
    for path in (few / "dark").glob("*"):
        path.unlink()
    for source, root in (
        *(([folder], root) for root in (run.data, run.data / "val")),
        *(([run.config, folder], run.data), ([run.work_dir], few)),
        ([run.work_dir / "epoch_2.pth"], run.data / "val"),
    ):
        done = command("test", *source, "--data-root", root, "--out", tmp_path / "out")
        assert done.status == 0, done.output
        record = json.loads((tmp_path / "out" / "metrics.json").read_text())
        counts = {row["class"]: row["support"] for row in record["classes"]}
        assert counts == ({**VAL_IMAGES, "dark": 0} if root == few else VAL_IMAGES)
        if root != few:
            assert record["metrics"]["accuracy/top1"] == pytest.approx(expected, abs=1e-3)
    shutil.move(few / "bright", few / "brihgt")
    done = command("test", folder, "--data-root", few)
    assert "the data have a class 'brihgt', but the model has" in done.err


def test_a_list_without_names_and_own_metrics(run, tmp_path):
    config = tmp_path / "listed.py"
    names = sorted(VAL_IMAGES)
    lines = [f"val/{name}/0.png {label}" for label, name in enumerate(names)]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    listed = f"type='CustomDataset', data_prefix='', ann_file={str(tmp_path / 'list.txt')!r}"
    config.write_text(
        f"_base_ = {str(run.config)!r}\n"
        f"test_dataloader = dict(dataset=dict({listed}, data_root={str(run.data)!r}))\n"
        "test_evaluator = dict(_delete_=True, type='Accuracy', topk=(1,), thrs=(0.0, 0.9))\n"
    )
    record = measured(SimpleNamespace(config=config, data=run.data), run.work_dir, tmp_path)
    assert [row["class"] for row in record["classes"]] == names
    figures = ("accuracy/top1_thr-0.00", "accuracy/top1_thr-0.90", "accuracy/top1", "cross_entropy")
    assert record["metrics"].keys() == set(figures)


def test_what_gives_no_figures_is_named(run, tmp_path):
    assert str(tmp_path / "x.pth") in failure(run, tmp_path / "x.pth", tmp_path)
    message = failure(run, run.work_dir, tmp_path, "model.backbone.depth=3")
    assert "another model: backbone.model.blocks.2." in message
    checkpoint = torch.load(run.work_dir / "epoch_2.pth", weights_only=True)
    # Finite, as the reader of weights demands, but what they compute is not.
    checkpoint["state_dict"]["head.fc.weight"][0] = torch.finfo().max
    torch.save(checkpoint, tmp_path / "x.pth")
    assert "output is not finite" in failure(run, tmp_path / "x.pth", tmp_path)
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("classes", [2, 1000])
def test_a_confusion_matrix_of_any_size_is_drawn(classes, tmp_path, monkeypatch):
    monkeypatch.setattr(MathTextParser, "parse", lambda *_, **__: pytest.fail("a formula"))
    names = ["$a$", "b\nc", *map(str, range(2, classes))]
    evaluate.draw_confusion([0, 1], [0, 1], names, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert min(image.size) > 500
