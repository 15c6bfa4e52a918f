"""The results of a run: the record, the curves, the export and its card."""

import json
import math
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import timm
import torch
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from tokenformer_vit.cli import export
from tokenformer_vit.errors import InputError
from tokenformer_vit.training import AutocastOptimWrapper
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.reports import (
    _peak_mib,
    draw_curves,
    environment,
    read_scalars,
)

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
    """Collect the figures that are saved, by their panels' titles."""
    figures = []
    save = Figure.savefig

    def savefig(figure, *arguments, **options):
        figures.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)

    def panels():
        (figure,) = figures
        return figure.get_suptitle(), {
            axes.get_title(): {
                line.get_label(): line.get_xydata().tolist()
                for line in axes.lines
                if not line.get_label().startswith("_")
            }
            for axes in figure.axes
        }

    return panels


def test_curves_of_a_classifier_have_a_title_and_the_validation_loss(drawn, tmp_path):
    train = {step: {"loss": 4.0 - step, "lr": 0.1} for step in (1, 2, 3)}
    val = {
        1: {"accuracy/top1": 10.0, "accuracy/top5": 40.0, "cross_entropy": 2.5},
        2: {"accuracy/top1": 20.0, "accuracy/top5": 50.0, "cross_entropy": 1.5},
    }
    path = tmp_path / "curves.png"
    draw_curves(train, val, path, growth=[2], iters_per_epoch=2, title="digits")
    title, panels = drawn()
    assert title == "digits: top-1 20.00, top-5 50.00"
    loss, accuracy, _ = panels.values()
    assert loss["training"] == [[0.5, 3.0], [1.0, 2.0], [1.5, 1.0]]  # over epochs, as all panels
    assert loss["validation"] == [[1.0, 2.5], [2.0, 1.5]]
    assert loss["model grew"] == [[1.0, 0.0], [1.0, 1.0]]
    assert accuracy == {"top-1": [[1, 10], [2, 20]], "top-5": [[1, 40], [2, 50]]}
    assert list(panels) == ["loss (nats)", "validation accuracy (%)", "learning rate"]
    with Image.open(path) as picture:
        assert picture.width > 1000


def test_curves_of_a_text_have_the_loss_of_its_perplexity(drawn, tmp_path):
    train = {step: {"loss": 4.0 - step, "lr": 0.1} for step in (1, 2)}
    val = {2: {"perplexity": math.exp(2), "perplexity/en": 5.0, "perplexity/fr": 9.0}}
    draw_curves(train, val, tmp_path / "curves.png", iters_per_epoch=None)
    _, panels = drawn()
    loss, perplexity, _ = panels.values()
    assert loss["training"] == [[1.0, 3.0], [2.0, 2.0]]
    assert loss["validation"] == [[2.0, 2.0]]
    assert perplexity == {"en": [[2, 5]], "fr": [[2, 9]]}


def test_curves_of_a_pre_training_have_the_error_of_held_out_images(drawn, tmp_path):
    train = {step: {"loss": 2.0 - 0.5 * step, "lr": 0.1} for step in (1, 2)}
    draw_curves(train, {1: {"reconstruction/error": 0.75}}, tmp_path / "curves.png", title="mae")
    title, panels = drawn()
    assert title == "mae: error 0.75"
    loss, error, _ = panels.values()
    assert loss == {"training": [[1.0, 1.5], [2.0, 1.0]]}
    assert error == {"error": [[1, 0.75]]}


def test_curves_of_an_earlier_run_have_no_validation_loss(drawn, tmp_path):
    draw_curves({1: {"loss": 3.0, "lr": 0.1}}, {1: {"accuracy/top1": 9.0}}, tmp_path / "c.png")
    assert list(drawn()[1]["loss (nats)"]) == ["training"]


def test_bfloat16_training_needs_no_gpu():
    model = torch.nn.Linear(3, 3).to(get_device())
    images = torch.randn(2, 3, device=get_device())
    wrapper = AutocastOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with wrapper.optim_context(model):
        assert model(images).dtype == torch.bfloat16
    with OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)).optim_context(model):
        assert model(images).dtype == torch.float32


def test_training_ends_with_a_record(trained):
    record = json.loads((trained.work_dir / "record.json").read_text())
    assert record["dtype"] == "bfloat16 autocast"
    assert (record["seed"], record["epochs"], record["iterations"]) == (5, 2, 12)
    assert (record["images_per_step"], record["train_images"]) == (16, 48)
    assert record["peak_mib"] > 100
    assert record["loss_first"] == pytest.approx(1.0986, abs=0.02)  # ln 3: the head starts at zero
    assert record["versions"]["torch"] == torch.__version__
    assert 0 <= record["accuracy/top1"] <= 100
    if find_spec("tensorboard"):
        assert list(trained.work_dir.glob("*/vis_data/events.out.tfevents.*"))


def test_the_exported_folder_says_what_is_known_of_the_run(trained, data_root):
    record = json.loads((trained.work_dir / "record.json").read_text())
    card = (trained.work_dir / "README.md").read_text(encoding="utf-8")
    for fact in (
        "Folder: " + data_root.name,
        "Training images: 48",
        "Validation images: 48",
        "Config: small.py",
        "Epochs: 2",
        "Iterations: 12",
        "Optimiser: AdamW",
        "Learning rate: 0.005",
        "Batch size (images a step): 16",
        "Precision: bfloat16 autocast",
        "Weights: exponential moving average",
        "Seed: 5",
        f"Top-1 accuracy: {record['accuracy/top1']:.4g} %",
    ):
        assert f"- {fact}" in card, fact
    assert str(data_root.parent) not in card  # a path may be private
    assert "datasets:" not in card  # a folder does not say which data set it is


def test_a_model_of_bgr_images_is_refused_before_training(train, tmp_path):
    line = train.fails(tmp_path, "--cfg-options", "data_preprocessor.to_rgb=False")
    assert "data_preprocessor.to_rgb is False" in line
    assert "set `default_hooks.export=None`" in line
    assert not list(tmp_path.glob("*.pth"))


def test_resizing_unlike_the_exported_model_is_said(train, tmp_path, trained):
    said = 'set backend="pillow" in ResizeEdge'
    opencv = "test_dataloader.dataset.pipeline.1.backend=cv2"
    output = train(tmp_path, "--cfg-options", "train_cfg.max_epochs=2", opencv)
    assert output.count(said) == 1
    assert said not in trained.output


def test_the_export_of_a_checkpoint_knows_data_and_recipe_but_no_results(trained, tmp_path):
    export.main([str(trained.work_dir / "epoch_1.pth"), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- Training images: 48" in card
    assert "- Epochs: 1\n  - Iterations: 6\n" in card
    assert "Validation:" not in card
    assert "accuracy" not in card


@pytest.mark.slow
def test_a_config_without_a_file_trains_and_exports(config, data_root, tmp_path):
    """A notebook may make its config by hand and run it in mmengine's own runner."""
    options = {"train_cfg.max_epochs": 2, "train_dataloader.num_workers": 0}
    cfg = load_config(config, options, str(data_root), work_dir=str(tmp_path))
    Runner.from_cfg(Config(cfg.to_dict())).train()
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
    assert val[2]["cross_entropy"] == pytest.approx(expected, rel=1e-4)
    assert val[1]["cross_entropy"] != pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is known everywhere")
def test_a_system_that_cannot_tell_its_peak_memory_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # as under Windows
    assert _peak_mib() is None


def test_a_machine_without_git_is_no_obstacle(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"].startswith("tokenformer_vit 0.")


@pytest.mark.parametrize(
    ("module", "error", "remedy"),
    [
        # Where transformers and pycocotools are both installed.
        ("mmpretrain.models", TypeError("NoneType takes no arguments"), "uninstall pycocotools"),
        # On a server without graphics libraries.
        (
            "mmpretrain.datasets",
            ImportError("libGL.so.1: cannot open shared object file"),
            "apt-get install libgl1",
        ),
    ],
)
def test_an_unusable_installation_is_explained(module, error, remedy, monkeypatch):
    class Finder:
        def find_spec(self, name, *_):
            if name == module:
                raise error

    for name in (module, "tokenformer_vit.training"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(InputError, match=remedy):
        import_module("tokenformer_vit.training")
