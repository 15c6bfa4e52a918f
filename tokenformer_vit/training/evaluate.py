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
from sklearn.metrics import ConfusionMatrixDisplay, precision_recall_fscore_support
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, write_whole
from tokenformer_vit.models.checkpoints import WEIGHTS
from tokenformer_vit.records import environment

from .config import datasets
from .engine import Config, ConfigDict, Hook, all_gather_object, is_main_process
from .runner import TrainingRunner

_COLUMNS = ("index", "class", "precision", "recall", "f1-score", "support")
_MANY = 30  # above this many classes, the numbers are only in the files


def configure_test(cfg: Config, checkpoint: Path, out: Path) -> None:
    """Turn the config of a training into that of a test of ``checkpoint``, a file or a folder.

    A model of one label an image is measured by accuracy and loss; others, such as those of
    several labels, by the ``test_evaluator`` of their config.
    """
    if cfg.model.type == "CausalLM" or not cfg.get("test_dataloader"):
        raise InputError(
            f"{cfg.filename} tests no images: give test_dataloader, test_cfg and test_evaluator; "
            "for a language model use `tokenformer-vit evaluate-lm`"
        )
    checkpoint = checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint
    make_folder(out, "--out")
    cfg.load_from, cfg.resume = str(checkpoint), False
    cfg.work_dir = str(out)  # not the run's own, whose dumped config would be overwritten
    backbone = cfg.model.get("backbone") or {}
    for part in (backbone, backbone.get("module") or {}):  # LoRA wraps a backbone
        for start in ("checkpoint_path", "pretrained"):  # the training's start may be gone
            part.pop(start, None)
    evaluators = cfg.test_evaluator
    cfg.test_evaluator = evaluators = evaluators if isinstance(evaluators, list) else [evaluators]
    if all(each.type in ("Accuracy", "AccuracyAndLoss") for each in evaluators):
        default = (1,) if evaluators[0].type == "Accuracy" else (1, 5)
        topk = evaluators[0].get("topk", default)
        cfg.test_evaluator = [{"type": "AccuracyAndLoss", "topk": topk}]
        cfg.test_dataloader.sampler.round_up = False
        for dataset in datasets(cfg.test_dataloader.dataset):
            for step in dataset.pipeline:
                if step["type"] == "PackInputs":
                    step["meta_keys"] = ("img_path", "sample_idx")
    # None removes mmengine's default hooks, which are for trainings.
    unwanted = ("timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
    cfg.default_hooks = ConfigDict({"guard": {"type": "GuardHook"}, **dict.fromkeys(unwanted)})
    hooks = cfg.get("custom_hooks") or []  # GrowthHook gives the model the checkpoint's size
    cfg.custom_hooks = [hook for hook in hooks if hook.type == "GrowthHook"]


class _TestHook(Hook):
    """Shows progress and, if wanted, notes the answer to each image."""

    def __init__(self, notes_answers: bool) -> None:
        self._notes_answers, self._rows = notes_answers, []

    def before_test(self, runner) -> None:
        hidden = not is_main_process() or None  # None: where standard error is no terminal
        number = len(runner.test_dataloader)
        self._bar = tqdm(total=number, disable=hidden, desc="testing", leave=False)

    def after_test_iter(self, runner, batch_idx: int, data_batch=None, outputs: Any = None) -> None:
        self._bar.update()
        if self._notes_answers:
            scores, best = torch.stack([each.pred_score for each in outputs]).max(dim=1)
            paths = [str(each.get("img_path", each.get("sample_idx", ""))) for each in outputs]
            labels = torch.cat([each.gt_label for each in outputs]).tolist()
            self._rows += zip(paths, labels, best.tolist(), scores.tolist(), strict=True)

    def after_test(self, runner) -> None:
        self._bar.close()

    def rows(self) -> list[tuple]:
        """Return path, label, most likely class and its probability, in the order of the data."""
        turns = zip_longest(*all_gather_object(self._rows))  # processes take images in turn
        rows = [row for turn in turns for row in turn if row is not None]
        if not all(math.isfinite(score) for *_, score in rows):
            raise InputError("the model's output is not finite: test an earlier checkpoint")
        return rows


def run_test(cfg: Config, cfg_options: Mapping[str, Any] | None = None) -> None:
    """Run the test that :func:`configure_test` prepared; ``cfg_options`` are for the record."""
    weights, cfg.load_from = cfg.load_from, None
    runner = TrainingRunner.from_cfg(cfg)
    hook = _TestHook([each.type for each in cfg.test_evaluator] == ["AccuracyAndLoss"])
    runner.register_hook(hook)
    checkpoint = runner.load_checkpoint(weights)  # wrong ones are found before the data are read
    meta = checkpoint.get("meta") or {}
    epoch = meta.get("epoch")  # an exported file does not say it
    averaged = meta.get("averaged", "ema_state_dict" in checkpoint)
    metrics, rows = runner.test(), hook.rows()
    if not is_main_process():
        return
    dataset: Any = runner.test_dataloader.dataset
    classes: list[str] = list(dataset.metainfo.get("classes") or ())
    record = {
        "config": str(cfg.filename),
        "checkpoint": weights,
        "epoch": epoch,
        "averaged_weights": None if epoch is None else averaged,
        "data_root": next(datasets(cfg.test_dataloader.dataset)).get("data_root"),
        "images": len(rows) or len(dataset),
        "cfg_options": dict(cfg_options or {}),
        "metrics": {name: float(value) for name, value in metrics.items()},
        **environment(),
        "classes": _per_class(rows, classes) if rows else [],
    }
    _write(Path(cfg.work_dir), record, rows, classes)


def _per_class(rows: Sequence[tuple], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall and F1 score in percent, and the number of images, by class."""
    _, labels, answers, _ = zip(*rows, strict=True)
    numbers = range(len(classes))
    no_answer: Any = 0.0  # scikit-learn's type is wrong
    found: Any = precision_recall_fscore_support(
        labels, answers, labels=numbers, zero_division=no_answer
    )
    percents = [(100 * share).tolist() for share in found[:3]]
    table = zip(numbers, classes, *percents, found[3].tolist(), strict=True)
    return [dict(zip(_COLUMNS, row, strict=True)) for row in table]


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
        print(f"  {name:32.32}", *(f"{share:7.2f}" for share in shares), f"{support:7}")
    _write_csv(folder / "per_class.csv", _COLUMNS, table)
    named = ((path, classes[label], classes[best], score) for path, label, best, score in rows)
    _write_csv(folder / "predictions.csv", ("path", "label", "predicted", "score"), named)
    _, labels, answers, _ = zip(*rows, strict=True)
    draw_confusion(labels, answers, classes, folder / "confusion_matrix.png")


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        computed = ("=", "+", "-", "@")  # by a spreadsheet; after ' it is text
        writer.writerow([f"'{cell}" if str(cell).startswith(computed) else cell for cell in row])
    write_whole(path, lines.getvalue().encode(errors="backslashreplace"))


def draw_confusion(
    labels: Sequence[int], answers: Sequence[int], names: Sequence[str], path: Path
) -> None:
    """Draw counts by true and predicted class into a PNG, with what there is room for."""
    size = len(names)
    # Escaped: matplotlib reads text between two $ as a formula, and only UTF-8.
    shown = [name[:32].encode(errors="backslashreplace").decode() for name in names]
    shown = [name.replace("$", r"\$") for name in shown]
    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.subplots()
    ConfusionMatrixDisplay.from_predictions(
        labels,
        answers,
        labels=range(size),
        display_labels=shown,
        include_values=size <= _MANY,
        values_format="d",
        xticks_rotation="vertical",
        ax=axes,
        # Makes a single image off the diagonal visible beside many on it.
        im_kw=None if size <= _MANY else {"norm": PowerNorm(0.4, vmin=0)},
    )
    axes.tick_params(labelsize=10 if size <= _MANY else 6)
    if size > 50:  # no room for names
        axes.set(xticks=[], yticks=[])
    axes.set_title(f"Confusion matrix: {len(labels):,} images, {size} classes")
    figure.savefig(path, dpi=150)
