"""Test a trained model: figures, a table of classes, a confusion matrix, and predictions."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from mmengine.config import Config, ConfigDict
from mmengine.dist import all_gather_object, is_main_process
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmpretrain.registry import METRICS
from sklearn.metrics import ConfusionMatrixDisplay, classification_report, confusion_matrix
from tqdm import tqdm

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, write_figure, write_whole
from tokenformer_vit.models.checkpoints import WEIGHTS
from tokenformer_vit.records import environment

from .config import datasets
from .runner import TrainingRunner

__all__ = ["Predictions", "configure_test", "run_test"]

_COLUMNS = ("precision", "recall", "f1-score", "support")
_COMPUTED = ("=", "+", "-", "@")  # a spreadsheet computes such a cell; after ' it is text
_MANY = 30  # above this many classes, the numbers are only in the files
_MANY_NAMES = 50  # above this many classes, a matrix has no room for the names


@METRICS.register_module()
class Predictions(BaseMetric):
    """The true and the most likely class of each image, in the order of the data set.

    Processes take the images in turn; their sampler needs ``round_up=False``.
    """

    default_prefix = ""

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Note path, label, most likely class and its probability."""
        scores, best = torch.stack([each["pred_score"] for each in data_samples]).max(dim=1)
        self.results += [
            (str(sample.get("img_path", sample.get("sample_idx", ""))), label, *answer)
            for sample, label, *answer in zip(
                data_samples,
                torch.cat([sample["gt_label"] for sample in data_samples]).tolist(),
                best.tolist(),
                scores.tolist(),
                strict=True,
            )
        ]

    def evaluate(self, size: int) -> dict[str, list]:
        """Return the rows of all processes as ``rows``."""
        parts, self.results = all_gather_object(self.results), []
        rows = [row for turn in zip_longest(*parts) for row in turn if row is not None]
        if not all(math.isfinite(score) for *_, score in rows):
            raise InputError(
                "the model's output is not finite: its training diverged; test an earlier "
                "checkpoint"
            )
        return {"rows": rows}

    def compute_metrics(self, results: list) -> dict[str, list]:
        """Return the rows of one process."""
        return {"rows": results}


def configure_test(cfg: Config, checkpoint: str | Path, out: str | Path) -> None:
    """Turn the config of a training into the config of a test.

    A model of one label an image is measured by accuracy and loss; others, such as those of
    several labels, by the ``test_evaluator`` of their config.

    Args:
        cfg: The config, changed in place.
        checkpoint: Training checkpoint (``.pth``), exported ``.safetensors`` file, or its folder.
        out: Folder for the results; it is made.

    Raises:
        InputError: If the config is that of a language model or has no test data, there is no such
            checkpoint, or the folder cannot be made.
    """
    if cfg.model.type == "CausalLM" or not cfg.get("test_dataloader"):
        raise InputError(
            f"{cfg.filename} tests no images: give test_dataloader, test_cfg and test_evaluator; "
            "for a language model use `tokenformer-vit evaluate-lm`"
        )
    checkpoint = Path(checkpoint, WEIGHTS) if Path(checkpoint).is_dir() else Path(checkpoint)
    if not checkpoint.is_file():
        raise InputError(f"there is no checkpoint {checkpoint}; give an existing file")
    make_folder(Path(out), "--out")
    cfg.load_from, cfg.resume = str(checkpoint), False
    cfg.work_dir = str(out)  # not the run's own, whose dumped config would be overwritten
    backbone = cfg.model.get("backbone") or {}
    for start in ("checkpoint_path", "pretrained"):  # the training's start may be gone
        for part in (backbone, backbone.get("module") or {}):  # LoRA wraps a backbone
            if part.get(start):
                part[start] = type(part[start])()
    evaluators = cfg.test_evaluator
    evaluators = evaluators if isinstance(evaluators, list) else [evaluators]
    if all(each.type in ("Accuracy", "AccuracyAndLoss") for each in evaluators):
        cfg.test_evaluator = [{"type": "AccuracyAndLoss"}, {"type": "Predictions"}]
        cfg.test_dataloader.sampler.round_up = False
        steps = (step for each in datasets(cfg.test_dataloader.dataset) for step in each.pipeline)
        for step in steps:
            if step["type"] == "PackInputs":
                step["meta_keys"] = ("img_path", "sample_idx")
    # None removes mmengine's default hooks, which are for trainings.
    unwanted = ("timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
    cfg.default_hooks = ConfigDict({"guard": {"type": "GuardHook"}, **dict.fromkeys(unwanted)})
    hooks = cfg.get("custom_hooks") or []  # GrowthHook gives the model the checkpoint's size
    cfg.custom_hooks = [hook for hook in hooks if hook.type == "GrowthHook"]


class _TestHook(Hook):
    """Shows progress, and notes the epoch of the weights."""

    epoch: int | None = None
    averaged: bool | None = None

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        if "epoch" in checkpoint.get("meta", {}):  # an exported file does not say
            self.epoch = checkpoint["meta"]["epoch"]
            self.averaged = checkpoint["meta"].get("averaged", "ema_state_dict" in checkpoint)

    def before_test(self, runner) -> None:
        # tqdm's None: no bar where standard error is no terminal.
        hidden = None if is_main_process() else True
        self._bar = tqdm(
            total=len(runner.test_dataloader), disable=hidden, desc="testing", leave=False
        )

    def after_test_iter(self, *_args: Any, **_kwargs: Any) -> None:
        self._bar.update()

    def after_test(self, runner) -> None:
        self._bar.close()


def run_test(cfg: Config, cfg_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the test that :func:`configure_test` prepared; the main process writes the results.

    Args:
        cfg: The config.
        cfg_options: Values that the user overrode in it, for the record.

    Returns:
        The content of ``metrics.json``, the same on every process.

    Raises:
        InputError: If the checkpoint is of another model or other classes, or the model's output
            is not finite.
    """
    runner = TrainingRunner.from_cfg(cfg)
    hook = _TestHook()
    runner.register_hook(hook)
    runner.load_or_resume()  # wrong weights are found before the data are read
    metrics = runner.test()
    rows = metrics.pop("rows", [])
    dataset: Any = runner.test_dataloader.dataset
    classes: list[str] = list(dataset.metainfo.get("classes") or ())
    record = {
        "config": str(cfg.filename),
        "checkpoint": str(cfg.load_from),
        "epoch": hook.epoch,
        "averaged_weights": hook.averaged,
        "data_root": next(datasets(cfg.test_dataloader.dataset)).get("data_root"),
        "images": len(rows) or len(dataset),
        "cfg_options": dict(cfg_options or {}),
        "metrics": {name: float(value) for name, value in metrics.items()},
        **environment(),
        "classes": _per_class(rows, classes) if rows else [],
    }
    if is_main_process():
        _write(Path(cfg.work_dir), record, rows, classes)
    return record


def _per_class(rows: Sequence[tuple], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall and F1 score in percent, and the number of images, by class."""
    _, labels, answers, _ = zip(*rows, strict=True)
    numbers = range(len(classes))
    # Not by name: a class may be called "accuracy", as a line of scikit-learn's report is.
    report: Any = classification_report(
        labels,
        answers,
        labels=list(numbers),
        target_names=[str(number) for number in numbers],
        output_dict=True,
        zero_division=0.0,  # type: ignore[arg-type]
    )
    found = []
    for number, name in enumerate(classes):
        *shares, support = (report[str(number)][column] for column in _COLUMNS)
        figures = [*(100 * share for share in shares), int(support)]
        found.append({"index": number, "class": name, **dict(zip(_COLUMNS, figures, strict=True))})
    return found


def _write(folder: Path, record: dict[str, Any], rows: list[tuple], classes: list[str]) -> None:
    """Print the figures, and write all files; each is complete or absent."""
    for name, value in record["metrics"].items():
        print(f"{name}: {value:.3f}")
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    # Undecodable bytes in a folder's name become escapes, which JSON can hold.
    write_whole(folder / "metrics.json", text.encode(errors="backslashreplace"))
    if not rows:
        return
    table = [tuple(row.values()) for row in record["classes"]]
    for _, name, *shares, support in table if len(table) <= _MANY else ():
        print(f"  {printable(name):32.32}", *(f"{share:7.2f}" for share in shares), f"{support:7}")
    _write_csv(folder / "per_class.csv", ("index", "class", *_COLUMNS), table)
    named = ((path, classes[label], classes[best], score) for path, label, best, score in rows)
    _write_csv(folder / "predictions.csv", ("path", "label", "predicted", "score"), named)
    _, labels, answers, _ = zip(*rows, strict=True)
    matrix = confusion_matrix(labels, answers, labels=range(len(classes)))
    draw_confusion(matrix, classes, folder / "confusion_matrix.png")


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [printable(cell) if isinstance(cell, str) else cell for cell in row]
        writer.writerow([f"'{cell}" if str(cell).startswith(_COMPUTED) else cell for cell in cells])
    write_whole(path, lines.getvalue().encode(errors="backslashreplace"))


def draw_confusion(matrix: Any, names: Sequence[str], path: Path) -> None:
    """Draw (K, K) counts by true and predicted class into a PNG, with what there is room for."""
    size = len(names)
    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.subplots()
    # Escaped: matplotlib reads text between two $ as a formula.
    labels = [printable(name)[:32].replace("$", r"\$") for name in names]
    ConfusionMatrixDisplay(matrix, display_labels=labels).plot(
        include_values=size <= _MANY,
        values_format="d",
        xticks_rotation="vertical",
        ax=axes,
        # Makes a single image off the diagonal visible beside many on it.
        im_kw=None if size <= _MANY else {"norm": PowerNorm(0.4, vmin=0)},
    )
    axes.tick_params(labelsize=10 if size <= _MANY else 6)
    if size > _MANY_NAMES:
        axes.set(xticks=[], yticks=[])
    axes.set_title(f"Confusion matrix: {int(matrix.sum()):,} images, {size} classes")
    write_figure(path, figure, dpi=150)
