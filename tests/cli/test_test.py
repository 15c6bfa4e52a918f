"""A test repeats validation's figure, agrees with the model run by hand, and fails in one line."""

import csv
import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from PIL import Image
from rich.console import Console
from timm.data import (
    create_transform,
    resolve_input_data_config,
    resolve_model_data_config,
)

from tokenformer_vit.cli import export
from tokenformer_vit.cli import test as tool
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.evaluation import (
    Evaluation,
    configure_test,
    draw_confusion,
    most_confused,
    print_evaluation,
    write_evaluation,
)
from tokenformer_vit.training.reports import read_scalars
from tokenformer_vit.vision.prediction import class_names, predict

VAL_IMAGES = {"bright": 10, "dark": 7, "[bold]split": 12}  # 29: an odd number, unequally shared

CONFIG = """
_base_ = "tokenformer_vit::digits_demo.py"
model = dict(
    backbone=dict(embed_dim=24, depth=2, num_heads=2),
    head=dict(num_classes=3, in_channels=24),
)
data_preprocessor = dict(num_classes=3)
train_dataloader = dict(batch_size=8)
val_dataloader = dict(batch_size=8)
test_dataloader = dict(batch_size=8)
val_evaluator = dict(topk=(1,))
test_evaluator = dict(topk=(1,))
param_scheduler = [dict(type="ConstantLR", factor=1.0)]
train_cfg = dict(max_epochs=2, val_interval=1)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, command):
    """A run of tools/train.py over two epochs; its averaged weights still lag behind."""
    root = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    for split, counts in (("train", dict.fromkeys(VAL_IMAGES, 16)), ("val", VAL_IMAGES)):
        for label, (name, count) in enumerate(counts.items()):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 100, (8, 8, 3), dtype=np.uint8)
                pixels[:, (0, 8, 4)[label] :] += 120
                Image.fromarray(pixels).save(folder / f"{index}.png")
    config, work_dir = root / "small.py", root / "work"
    config.write_text(CONFIG)
    done = command("train", config, "--data-root", root, "--work-dir", work_dir)
    assert done.status == 0, done.output
    return SimpleNamespace(config=config, data=root, work_dir=work_dir)


def metrics(run, checkpoint, out, *options):
    """Run the tool in this process and return what it recorded."""
    arguments = [run.config, checkpoint, "--data-root", run.data, "--out", out, "--cfg-options"]
    arguments += ["test_dataloader.num_workers=0", *options]
    tool.main([str(argument) for argument in arguments])
    return json.loads((out / "metrics.json").read_text())


def failure(run, checkpoint, out, *options):
    with pytest.raises(InputError) as error:
        metrics(run, checkpoint, out, *options)
    assert "\n" not in str(error.value)
    return str(error.value)


def validated(run):
    _, val = read_scalars(run.work_dir.glob("*/vis_data/scalars.json"))
    return {epoch: record["accuracy/top1"] for epoch, record in val.items()}


def changed_checkpoint(run, path, change):
    checkpoint = torch.load(run.work_dir / "epoch_2.pth", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def test_command_repeats_validation_and_leaves_the_run_alone(run, command):
    before = {path: path.read_bytes() for path in run.work_dir.rglob("*") if path.is_file()}
    checkpoint = run.work_dir / "epoch_2.pth"
    status, out, err, _ = command.process("test", run.config, checkpoint, "--data-root", run.data)
    assert status == 0, err
    folder = run.work_dir / "test"
    record = json.loads((folder / "metrics.json").read_text())
    assert record["accuracy"] == {"top1": validated(run)[2]}
    assert f"top-1 accuracy: {validated(run)[2]:.3f} %" in out
    assert "epoch 2, averaged weights (EMA)" in out
    assert all(name in out for name in VAL_IMAGES)  # [bold] is a class's name here, not markup
    last = f"Done. In {folder}: metrics.json, per_class.csv, confusion_matrix.png"
    assert out.splitlines()[-1] == last

    assert record["config"] == str(run.config)
    assert record["checkpoint"] == str(checkpoint)
    assert (record["data_root"], record["cfg_options"]) == (str(run.data), {})
    assert (record["epoch"], record["averaged_weights"], record["images"]) == (2, True, 29)
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert {row["class"]: row["support"] for row in record["classes"]} == VAL_IMAGES
    with (folder / "per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [{key: str(value) for key, value in row.items()} for row in record["classes"]]
    with Image.open(folder / "confusion_matrix.png") as image:
        image.load()
        assert min(image.size) > 500
    assert not list(folder.glob(".*"))
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.slow
def test_every_checkpoint_and_the_export_repeat_validation(run, tmp_path):
    first = metrics(run, run.work_dir / "epoch_1.pth", tmp_path / "1")
    assert first["accuracy"] == {"top1": validated(run)[1]}
    last = metrics(run, run.work_dir / "epoch_2.pth", tmp_path / "2")
    exported = metrics(run, run.work_dir / "model.safetensors", tmp_path / "3")
    assert exported["accuracy"] == last["accuracy"] == {"top1": validated(run)[2]}
    assert exported["classes"] == last["classes"]
    assert first["classes"] != last["classes"]
    assert (exported["epoch"], exported["averaged_weights"]) == (None, None)


@pytest.mark.slow
def test_the_weights_tested_are_the_averaged_ones(run, tmp_path):
    def online(checkpoint):
        averaged = checkpoint.pop("ema_state_dict")
        for name in checkpoint["state_dict"]:
            checkpoint["state_dict"][name] = averaged[f"module.{name}"]
        checkpoint["meta"]["averaged"] = False

    record = metrics(run, changed_checkpoint(run, tmp_path / "x.pth", online), tmp_path)
    assert record["averaged_weights"] is False
    assert record["accuracy"]["top1"] != validated(run)[2]


def test_figures_agree_with_the_model_run_by_hand(run, tmp_path):
    record = metrics(run, run.work_dir / "epoch_2.pth", tmp_path)
    model = timm.create_model(f"local-dir:{run.work_dir}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    confusion = np.zeros((3, 3))
    for true, name in enumerate(row["class"] for row in record["classes"]):
        for path in (run.data / "val" / name).iterdir():
            with torch.no_grad():
                scores = model(transform(Image.open(path).convert("RGB"))[None])
            confusion[true, scores.argmax()] += 1
    right, supports, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    assert record["accuracy"]["top1"] == pytest.approx(100 * right.sum() / 29, rel=1e-5)
    for index, row in enumerate(record["classes"]):
        precision, recall = (
            100 * right[index] / max(total[index], 1) for total in (predicted, supports)
        )
        assert row["index"] == index
        assert row["support"] == supports[index]
        assert row["precision"] == pytest.approx(precision, rel=1e-5)
        assert row["recall"] == pytest.approx(recall, rel=1e-5)
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        assert row["f1-score"] == pytest.approx(f1, rel=1e-5)


@pytest.mark.slow
def test_two_processes_count_every_image_once(run, tmp_path, command):
    alone = metrics(run, run.work_dir / "epoch_2.pth", tmp_path / "alone")
    status, out, err, _ = command.process(
        "test",
        *(run.config, run.work_dir / "epoch_2.pth", "--data-root", run.data),
        *("--batch-size", 4, "--launcher", "pytorch", "--out", tmp_path / "two"),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    )
    assert status == 0, err
    assert out.count("Done.") == 1
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    for key in ("images", "accuracy", "classes"):
        assert two[key] == alone[key]


def test_what_training_started_from_need_not_be_there(run, tmp_path):
    gone = f"model.backbone.checkpoint_path={tmp_path / 'gone.pth'}"
    record = metrics(run, run.work_dir / "epoch_2.pth", tmp_path, gone)
    assert record["accuracy"] == {"top1": validated(run)[2]}
    options = {"test_dataloader.num_workers": 0, "model.backbone.checkpoint_path": gone[31:]}
    assert record["cfg_options"] == options


def test_missing_checkpoint(run, tmp_path):
    assert str(tmp_path / "x.pth") in failure(run, tmp_path / "x.pth", tmp_path)
    assert "there is no checkpoint" in failure(run, tmp_path, tmp_path / "out")


def test_an_exported_folder_is_tested_by_its_weights(run, tmp_path, command):
    exported = tmp_path / "exported"
    exported.mkdir()
    shutil.copy(run.work_dir / "model.safetensors", exported)
    done = command("test", run.config, exported, "--data-root", run.data)
    assert done.status == 0, done.output
    record = json.loads((exported / "test" / "metrics.json").read_text())
    assert record["accuracy"] == {"top1": validated(run)[2]}
    assert record["checkpoint"] == str(exported / "model.safetensors")


@pytest.mark.parametrize("name", ["epoch_2.pth", "model.safetensors"])
def test_checkpoint_of_another_model(name, run, tmp_path):
    message = failure(run, run.work_dir / name, tmp_path, "model.backbone.depth=3")
    assert "another model" in message
    assert "backbone.model.blocks.2." in message
    assert not (tmp_path / "metrics.json").exists()


def test_other_number_of_classes(run, tmp_path):
    checkpoint = run.work_dir / "epoch_2.pth"
    words = ("model.head.num_classes=4", "data_preprocessor.num_classes=4")
    message = failure(run, checkpoint, tmp_path, *words)
    assert "head.fc.weight is (3, 24) in the file and (4, 24) in the model" in message


def test_checkpoint_that_would_run_code_ends_the_command_in_one_line(run, tmp_path, bomb, command):
    path = changed_checkpoint(run, tmp_path / "x.pth", lambda checkpoint: checkpoint.update(x=bomb))
    done = command("test", run.config, path, "--data-root", run.data)
    assert done.status == 1
    assert "Traceback" not in done.output
    assert done.err.splitlines()[-1].startswith(f"error: {path} ")
    assert "run code" in done.err.splitlines()[-1]


def test_diverged_weights_are_not_given_an_accuracy(run, tmp_path):
    def diverge(checkpoint):
        # Finite, as the reader of weights demands, but what they compute is not.
        checkpoint["state_dict"]["head.fc.weight"][0] = torch.finfo().max

    path = changed_checkpoint(run, tmp_path / "x.pth", diverge)
    assert "output is not finite" in failure(run, path, tmp_path / "out")


def test_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").touch()
    assert "--out" in failure(run, run.work_dir / "epoch_2.pth", tmp_path / "file" / "out")


@pytest.mark.parametrize(("num_classes", "topk"), [(3, (1,)), (5, (1, 5)), (10, (1, 5))])
def test_configured_for_the_classes_and_the_folder(num_classes, topk, run, tmp_path):
    keys = ("model.head.num_classes", "data_preprocessor.num_classes")
    cfg = load_config(run.config, dict.fromkeys(keys, num_classes))
    configure_test(cfg, run.work_dir / "epoch_2.pth", tmp_path)
    assert cfg.test_evaluator[0].topk == topk
    assert cfg.work_dir == str(tmp_path)  # a run's own would get this test's logs and config


def test_of_many_classes_the_best_and_the_worst_are_shown(tmp_path):
    classes = [
        {"index": i, "class": f"name {i}", **dict.fromkeys(("precision", "recall"), 50.0)}
        | {"f1-score": float(i * 7 % 40), "support": 5}
        for i in range(40)
    ]
    confusion = torch.eye(40, dtype=torch.int64) * 5
    evaluation = Evaluation("c.py", "x.pth", None, None, 200, {"top1": 1.0}, classes, confusion)
    console = Console(width=120, record=True)
    print_evaluation(evaluation, console)
    shown = [line.split("│")[5] for line in console.export_text().splitlines() if "name" in line]
    ends = [*range(39, 29, -1), *range(9, -1, -1)]
    assert [float(cell) for cell in shown] == ends
    content = draw_confusion(confusion, [row["class"] for row in classes])
    (tmp_path / "x.png").write_bytes(content)
    with Image.open(tmp_path / "x.png") as image:
        image.load()
        assert min(image.size) > 700


def test_of_a_thousand_classes_the_most_frequent_confusions_are_drawn(monkeypatch):
    confusion = torch.eye(1000, dtype=torch.int64) * 10
    confusion[3, 7], confusion[900, 2], confusion[5, 4] = 9, 30, 1
    assert most_confused(confusion, 2) == [(900, 2, 30), (3, 7, 9)]
    assert most_confused(confusion, 30) == [(900, 2, 30), (3, 7, 9), (5, 4, 1)]
    figures, save = [], Figure.savefig

    def savefig(figure, *arguments, **options):
        figures.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw_confusion(confusion, [f"name {index}" for index in range(1000)])
    (axes,) = figures[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[:2] == ["name 900 taken for name 2", "name 3 taken for name 7"]
    assert [bar.get_width() for bar in axes.patches] == [30, 9, 1]
    assert {"75 %", "47 %", "9 %"} <= {text.get_text() for text in axes.texts}  # of the true class
    assert "10,000 of 10,040 images are right" in figures[0].get_suptitle()


@pytest.mark.parametrize("source", ["epoch_2.pth", "exported"])
def test_a_checkpoint_answers_images_as_the_test_does(run, tmp_path, source):
    """A training checkpoint contains all that predict and compress need."""
    checkpoint = run.work_dir / "epoch_2.pth"
    if source != "epoch_2.pth":
        export.main([str(checkpoint), str(tmp_path / "folder")])
        checkpoint = tmp_path / "folder"
    model = load_model(None, checkpoint)
    assert class_names(model) == sorted(VAL_IMAGES)
    paths = sorted((run.data / "val").rglob("*.png"))
    answers = [top[0]["label"] for _, top in predict(model, paths, topk=1)]
    right = sum(answer == path.parent.name for path, answer in zip(paths, answers, strict=True))
    assert 100 * right / len(paths) == pytest.approx(validated(run)[2], abs=1e-4)
    exported = load_model(None, run.work_dir)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images), exported(images))
    assert resolve_input_data_config(model) == resolve_input_data_config(exported)


def test_an_export_does_not_overwrite(run, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="already exists"):
        export.main([str(run.work_dir / "epoch_2.pth"), str(tmp_path / "mine")])


def test_names_of_classes_are_shown_as_they_are_and_do_nothing(tmp_path):
    names = [r"$\frac$", "a$b$c", r"back\$lash", "line\nbreak", "\x1b[31mred\u202e", "\udcff"]
    classes = [
        {"index": i, "class": name, **dict.fromkeys(("precision", "recall", "f1-score"), 50.0)}
        | {"support": 5}
        for i, name in enumerate(names)
    ]
    confusion = torch.eye(len(names), dtype=torch.int64) * 5
    evaluation = Evaluation("c.py", "x.pth", None, None, 30, {"top1": 1.0}, classes, confusion)
    console = Console(width=120, record=True, file=io.StringIO())
    print_evaluation(evaluation, console)
    shown = console.export_text()
    for name in (r"$\frac$", "a$b$c", r"line\nbreak", r"\x1b[31mred\u202e", r"\udcff"):
        assert name in shown
    write_evaluation(evaluation, tmp_path)
    written = json.loads((tmp_path / "metrics.json").read_bytes())
    assert [row["class"] for row in written["classes"]] == names
    with (tmp_path / "per_class.csv").open(encoding="utf-8", newline="") as file:
        assert [row["class"] for row in csv.DictReader(file)] == [*names[:-1], r"\udcff"]


def test_dollars_are_drawn_not_computed(monkeypatch):
    drawn = []
    monkeypatch.setattr(MathTextParser, "parse", lambda *_, **__: pytest.fail("a formula"))
    draw_text = RendererAgg.draw_text

    def draw(renderer, gc, x, y, text, *arguments, **options):
        drawn.append(text)
        return draw_text(renderer, gc, x, y, text, *arguments, **options)

    monkeypatch.setattr(RendererAgg, "draw_text", draw)
    draw_confusion(torch.eye(2, dtype=torch.int64), ["$a$", "b\nc"])
    assert {"$a$", r"b\nc"} <= set(drawn)
