"""Test a trained classifier: measure it, print the figures, write them to files."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from mmengine.config import Config, ConfigDict
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmpretrain.evaluation import ConfusionMatrix
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from tqdm import tqdm

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, write_whole
from tokenformer_vit.models.checkpoints import WEIGHTS
from tokenformer_vit.records import environment

from .loop import loading_explained
from .storage import secure_files

FILES = ("metrics.json", "per_class.csv", "confusion_matrix.png")
_COLUMNS = ("precision", "recall", "f1-score", "support")
# Above this many classes only the best and the worst are printed, and a matrix has no numbers.
_MANY = 30
_ENDS = 10
# Above this many classes a matrix has no room for the names.
_MANY_CELLS = 50
_LABEL = 32  # characters of a name in a chart


@dataclass(frozen=True)
class Evaluation:
    """The figures of one test.

    Attributes:
        config: File that the config came from.
        checkpoint: File that the weights came from.
        epoch: Epochs that the weights were trained for; None if the file does not say.
        averaged_weights: Whether the weights are the EMA's; None if the file does not say.
        images: Number of images tested.
        accuracy: Percentages, by ``top1`` and, from five classes on, ``top5``; of a nested model
            also ``top1_at_0.25`` and so on.
        classes: A row for each class: ``index``, ``class``, ``precision``, ``recall`` and
            ``f1-score`` in percent, and ``support``, the number of its images.
        confusion: (K, K) int64, images by true class (rows) and predicted class (columns).
        data_root: Folder, or source on the hub, of the images; a list if there are several.
        cfg_options: Values of the config that were overridden, by dotted key.
    """

    config: str
    checkpoint: str
    epoch: int | None
    averaged_weights: bool | None
    images: int
    accuracy: dict[str, float]
    classes: list[dict[str, Any]]
    confusion: Tensor
    data_root: str | list[str] | None = None
    cfg_options: Mapping[str, Any] = field(default_factory=dict)


def configure_test(cfg: Config, checkpoint: str | Path, out: str | Path) -> None:
    """Turn the config of a training run into the config of a test.

    Only two hooks stay: ``GuardHook``, and ``GrowthHook``, which gives the model the size of the
    checkpoint. The others write logs and weights of a run. ``EMAHook`` is not needed, because the
    ``state_dict`` of a checkpoint already holds the weights that the run validates.

    Args:
        cfg: The config, changed in place.
        checkpoint: Training checkpoint (``.pth``), exported ``.safetensors`` file, or its folder.
        out: Folder for the results; it is made.

    Raises:
        InputError: If the config is not one of a classifier, the checkpoint does not exist or its
            folder has no weights, or the folder for the results cannot be made.
    """
    if "num_classes" not in (cfg.model.get("head") or {}):
        raise InputError(
            f"{cfg.filename} is not the config of an image classifier: for a language model, use "
            "`tokenformer-vit evaluate-lm`; fine-tune a masked autoencoder first"
        )
    if Path(checkpoint).is_dir():
        checkpoint = Path(checkpoint, WEIGHTS)
    if not Path(checkpoint).is_file():
        raise InputError(f"there is no checkpoint {checkpoint}; give an existing file")
    make_folder(Path(out), "--out")
    cfg.load_from, cfg.resume = str(checkpoint), False
    cfg.work_dir = str(out)  # not the run's own, whose dumped config would be overwritten
    forget_start(cfg)
    num_classes = cfg.model.head.num_classes
    cfg.test_evaluator = [
        {"type": "AccuracyAndLoss", "topk": tuple(k for k in (1, 5) if k <= num_classes)},
        {"type": "SingleLabelMetric", "average": None, "items": _COLUMNS},
        {"type": "ConfusionMatrix", "num_classes": num_classes},
    ]
    # None removes mmengine's default hooks; its logger would print the whole matrix.
    unwanted = ("timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
    cfg.default_hooks = ConfigDict({"guard": {"type": "GuardHook"}, **dict.fromkeys(unwanted)})
    hooks = cfg.get("custom_hooks") or []
    cfg.custom_hooks = [hook for hook in hooks if hook.type == "GrowthHook"]


def forget_start(cfg: Config) -> None:
    """Leave out the weights that a training started from: their file may not exist any more."""
    backbone = cfg.model.backbone.get("module", cfg.model.backbone)  # LoRA wraps it
    for start in ("checkpoint_path", "pretrained"):
        if backbone.get(start):
            backbone[start] = type(backbone[start])()


class _TestHook(Hook):
    """Shows progress, notes the epoch of the weights, and stops if the output is not finite."""

    epoch: int | None = None
    averaged: bool | None = None

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        if "epoch" in checkpoint.get("meta", {}):  # an exported file does not say
            self.epoch = checkpoint["meta"]["epoch"]
            self.averaged = checkpoint["meta"].get("averaged", "ema_state_dict" in checkpoint)

    def before_test(self, runner) -> None:
        # tqdm's None: no bar where standard error is no terminal.
        disable = None if is_main_process() else True
        self._bar = tqdm(
            total=len(runner.test_dataloader), disable=disable, desc="testing", leave=False
        )

    def after_test_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        scores = torch.stack([sample.pred_score for sample in outputs or ()])  # (B, K)
        if not scores.isfinite().all():
            raise InputError(
                "the model's output is not finite, because its training diverged: test an earlier "
                "checkpoint"
            )
        self._bar.update()

    def after_test(self, runner) -> None:
        self._bar.close()


def run_test(cfg: Config, cfg_options: Mapping[str, Any] | None = None) -> Evaluation:
    """Run the test that :func:`configure_test` prepared.

    Args:
        cfg: The config.
        cfg_options: Values that the user overrode in it, for the record.

    Returns:
        The figures of all images, the same on every process.

    Raises:
        InputError: If checkpoint, config and data do not fit each other, an image cannot be read,
            or the model's output is not finite.
    """
    secure_files()
    runner = Runner.from_cfg(cfg)
    hook = _TestHook()
    runner.register_hook(hook)
    with loading_explained():
        metrics = runner.test()
    dataset: Any = runner.test_dataloader.dataset
    columns = [metrics[f"single-label/{name}_classwise"] for name in _COLUMNS]
    return Evaluation(
        config=str(cfg.filename),
        checkpoint=str(cfg.load_from),
        epoch=hook.epoch,
        averaged_weights=hook.averaged,
        images=int(metrics["confusion_matrix/result"].sum()),  # fewer, of a shortened test
        accuracy={
            name.removeprefix("accuracy/"): value
            for name, value in metrics.items()
            if name.startswith("accuracy/")
        },
        classes=[
            {"index": index, "class": name, **dict(zip(_COLUMNS, row, strict=True))}
            for index, (name, *row) in enumerate(
                zip(dataset.metainfo["classes"], *columns, strict=True)
            )
        ],
        confusion=metrics["confusion_matrix/result"],
        data_root=cfg.test_dataloader.dataset.get("data_root"),
        cfg_options=cfg_options or {},
    )


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print accuracy and per-class metrics; with many classes, only the best and the worst."""
    rows = evaluation.classes
    title, ends = "classes", {}
    if len(rows) > _MANY:
        rows = sorted(rows, key=lambda row: row["f1-score"], reverse=True)
        rows = rows[:_ENDS] + rows[-_ENDS:]
        title, ends = f"the {_ENDS} best and the {_ENDS} worst classes by F1 score", {_ENDS - 1}
    table = Table("index", "class", *_COLUMNS, title=title)
    for column in table.columns:
        column.justify = "right"
    table.columns[1].justify, table.columns[1].overflow = "left", "fold"
    for place, row in enumerate(rows):
        table.add_row(
            str(row["index"]),
            Text(printable(row["class"])),  # Text: a name may look like rich's markup
            *(f"{row[name]:.2f}" for name in _COLUMNS[:-1]),
            str(row["support"]),
            end_section=place in ends,
        )
    console.print(table)
    for name, value in evaluation.accuracy.items():
        rank, _, size = name.replace("top", "top-").partition("_at_")
        of_pairs = f", {size} of the pairs" * bool(size)
        console.print(f"{rank} accuracy{of_pairs}: {value:.3f} %", highlight=False)
    weights = {True: ", averaged weights (EMA)", False: ", not averaged", None: ""}
    epoch = "" if evaluation.epoch is None else f", epoch {evaluation.epoch}"
    console.print(
        Text(
            f"{evaluation.images} images; {evaluation.checkpoint}{epoch}"
            f"{weights[evaluation.averaged_weights]}"
        ),
        soft_wrap=True,
    )


def write_evaluation(evaluation: Evaluation, folder: str | Path) -> None:
    """Write :data:`FILES` into a folder; each file is complete or absent.

    Raises:
        InputError: If a file cannot be written.
    """
    folder = Path(folder)
    record = {**vars(evaluation), **environment()}
    del record["confusion"]  # the picture shows it
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"

    lines = io.StringIO()
    writer = csv.DictWriter(lines, ["index", "class", *_COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(evaluation.classes)

    names = [row["class"] for row in evaluation.classes]
    contents = (
        # Undecodable bytes in a folder's name become escapes, which JSON can hold.
        text.encode(errors="backslashreplace"),
        lines.getvalue().encode(errors="backslashreplace"),
        draw_confusion(evaluation.confusion, names),
    )
    for name, content in zip(FILES, contents, strict=True):
        try:
            write_whole(folder / name, content)
        except OSError as error:
            raise InputError(
                f"cannot write {error.filename} ({error.strerror}): free some space, or give "
                "another --out"
            ) from error


def draw_confusion(confusion: Tensor, names: Sequence[str]) -> bytes:
    """Draw a confusion matrix as a PNG; for many classes, the most frequent confusions instead.

    Args:
        confusion: (K, K) int64, true class by predicted class.
        names: K class names.

    Returns:
        The content of a PNG file. Up to 50 classes it shows the matrix, and up to 30 also the
        numbers. With more, the cells would be unreadable: it shows the 30 most frequent confusions.
    """
    matplotlib.use("Agg")  # before mmpretrain's plot asks pyplot for a window
    from matplotlib import pyplot

    # Escaped: matplotlib reads text between two $ as a formula.
    labels = [_short(printable(name)).replace("$", r"\$") for name in names]
    if len(names) > _MANY_CELLS:
        figure = _draw_most_confused(confusion, labels)
    else:
        figure = ConfusionMatrix.plot(
            confusion, include_values=len(names) <= _MANY, classes=labels, show=False
        )
        axes = figure.axes[0]
        axes.tick_params(axis="x", labelrotation=90)
        if len(names) > _MANY:
            axes.tick_params(labelsize=6)
            # Makes a single image off the diagonal visible beside many on it.
            axes.images[0].set_norm(PowerNorm(0.4, vmin=0))
        axes.set_title(f"Confusion matrix: {int(confusion.sum()):,} images, {len(names)} classes")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return picture.getvalue()


def most_confused(confusion: Tensor, number: int) -> list[tuple[int, int, int]]:
    """List the most frequent confusions.

    Args:
        confusion: (K, K) int64, true class by predicted class.
        number: Number of confusions, at most.

    Returns:
        True class, predicted class and number of images, from the most frequent on; ties in the
        order of the classes.
    """
    wrong = confusion.clone().fill_diagonal_(0)
    counts, places = wrong.flatten().sort(descending=True, stable=True)
    return [
        (place // len(confusion), place % len(confusion), count)
        for place, count in zip(places[:number].tolist(), counts[:number].tolist(), strict=True)
        if count
    ]


def _draw_most_confused(confusion: Tensor, labels: Sequence[str]) -> Figure:
    pairs = most_confused(confusion, _MANY)
    of_class = confusion.sum(dim=1).tolist()
    shares = [100 * count / of_class[true] for true, _, count in pairs]
    figure = Figure(figsize=(11, 1.5 + 0.25 * len(pairs)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(pairs)), [count for *_, count in pairs], color="C1")
    axes.bar_label(bars, [f"{share:.0f} %" for share in shares], padding=3)
    axes.set_yticks(
        range(len(pairs)),
        [f"{labels[true]} taken for {labels[guess]}" for true, guess, _ in pairs],
    )
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    right = int(confusion.diagonal().sum())
    axes.set_xlabel("images (and their share of the true class)")
    figure.suptitle(
        f"Most frequent confusions of {len(labels)} classes; "
        f"{right:,} of {int(confusion.sum()):,} images are right"
    )
    return figure


def _short(label: str) -> str:
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 3]}..."
