"""Results of a run: a record, curves, and weights for timm."""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mmengine.dist import master_only
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop

from tokenformer_vit.command_line import typed_command
from tokenformer_vit.files import write_figure
from tokenformer_vit.records import TRAINING_PACKAGES, environment, write_record

from .backbone import check_exportable, num_classes
from .distributed import unwrap
from .export import export_classifier, preprocessing, resizes_with_opencv, run_facts
from .metrics import RECONSTRUCTION, VAL_LOSS
from .progress import dtype_of
from .steps import samples_per_step

BEFORE_RECORD = 99  # RecordHook has 100, mmengine's lowest priority


@HOOKS.register_module()
class RecordHook(Hook):
    """Write ``record.json``: the command, hardware, versions, settings and results of a run.

    It is the last file of a run, so a run with a record is finished. ``seconds`` counts from the
    start of the last process; ``resumed_at_iteration`` tells where that process started.

    Args:
        unit: Name of what a batch consists of.
        metrics: Prefixes of the validation figures to record.
        packages: Packages whose versions are recorded, in addition to the packages of all runs.
    """

    priority = "LOWEST"

    def __init__(
        self,
        unit: str = "images",
        metrics: Sequence[str] = ("accuracy",),
        packages: Sequence[str] = (),
    ) -> None:
        self._unit, self._metrics, self._packages = unit, tuple(metrics), tuple(packages)

    def before_train(self, runner) -> None:
        """Start the clock, and note the commit of the source code before it can change."""
        self._start, self._first = time.monotonic(), runner.iter
        self._environment = environment((*TRAINING_PACKAGES, *self._packages))

    @master_only
    def after_train(self, runner) -> None:
        """Write the record."""
        path = Path(runner.work_dir) / "record.json"
        if runner.iter == self._first and path.is_file():
            return  # nothing was trained; the earlier record stays
        seconds = time.monotonic() - self._start
        by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
        scalars = runner.message_hub.log_scalars
        loss = scalars["train/loss"].data[0]
        record = {
            "command": typed_command(),
            **self._environment,
            "config": Path(runner.cfg.filename or "").name,
            "processes": runner.world_size,
            "dtype": dtype_of(runner),
            f"{self._unit}_per_step": samples_per_step(runner),
            "seed": runner.seed,
            "n": 1,
            f"train_{self._unit}": len(runner.train_dataloader.dataset),
            **({} if by_iteration else {"epochs": runner.epoch}),
            "iterations": runner.iter,
            **{
                key: runner.message_hub.runtime_info[key]
                for key in ("growth", "flops", "compression", "teacher")
                if key in runner.message_hub.runtime_info
            },
            "resumed_at_iteration": self._first,
            "seconds": round(seconds, 1),
            "peak_mib": _peak_mib(),
            "loss_first": round(float(loss[0]), 4),
            "loss_last_20_mean": round(float(loss[-20:].mean()), 4),
            **{
                name.removeprefix("val/"): round(float(scalars[name].current()), 3)
                for name in sorted(scalars)
                if name.removeprefix("val/").startswith(self._metrics)
            },
        }
        write_record(path, record)


def _peak_mib() -> int | None:
    """Return the peak memory of tensors on the GPU, or of this process on the CPU.

    Returns None on a CPU under Windows, where it is unknown.
    """
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20)
    try:
        import resource
    except ImportError:  # Windows does not have it
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))  # bytes on macOS, else KiB


@HOOKS.register_module()
class CurvesHook(Hook):
    """Draw loss, learning rate and validation of the whole run, resumed parts included."""

    priority = BEFORE_RECORD

    @master_only
    def after_train(self, runner) -> None:
        """Write ``curves.png`` into the work directory."""
        logs = sorted(Path(runner.work_dir).glob("*/vis_data/scalars.json"))
        train, val = read_scalars(logs)
        grown = runner.message_hub.runtime_info.get("growth") or ()
        by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
        draw_curves(
            train,
            val,
            Path(runner.work_dir) / "curves.png",
            growth=[growth["iteration"] for growth in grown],
            iters_per_epoch=None if by_iteration else len(runner.train_dataloader),
            title=Path(runner.cfg.filename or "").stem,
        )


def read_scalars(logs: Iterable[Path]) -> tuple[dict[int, dict], dict[int, dict]]:
    """Merge the scalar logs of a run and its resumptions.

    Args:
        logs: The files, in the order in which they were written.

    Returns:
        Training records by iteration, and validation records by epoch, or by iteration where the
        loop counts iterations. Where a resumed run repeats what a killed one had logged, the later
        record counts.
    """
    train: dict[int, dict] = {}
    val: dict[int, dict] = {}
    for log in logs:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that a killed run was writing
            (train if "loss" in record else val)[record["step"]] = record
    return dict(sorted(train.items())), dict(sorted(val.items()))


def draw_curves(
    train: dict[int, dict],
    val: dict[int, dict],
    path: Path,
    growth: Sequence[int] = (),
    iters_per_epoch: int | None = 1,
    title: str = "",
) -> None:
    """Draw loss, accuracy or perplexity, and learning rate into a PNG file.

    All panels share one x axis: epochs, or iterations where validation counts these.

    Args:
        train: Training records by iteration, from :func:`read_scalars`.
        val: Validation records by epoch, or by iteration.
        path: The file.
        growth: Iterations before which the model grew; each gets a dotted line.
        iters_per_epoch: Iterations of an epoch; None where validation counts iterations.
        title: Title of the figure, such as the name of the config.
    """
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    loss, validation, rate = figure.subplots(1, 3, sharex=True)
    scale = iters_per_epoch or 1
    times = [iteration / scale for iteration in train]
    loss.plot(times, [record["loss"] for record in train.values()], label="training")
    measured = dict.fromkeys(name for record in val.values() for name in record)
    texts = [name for name in measured if name.split("/")[0] == "perplexity"]
    losses = {step: record[VAL_LOSS] for step, record in val.items() if VAL_LOSS in record}
    if "perplexity" in measured:
        losses = {s: math.log(r["perplexity"]) for s, r in val.items() if "perplexity" in r}
    if losses:
        loss.plot(list(losses), list(losses.values()), marker=".", label="validation")
    loss.set(title="loss" if RECONSTRUCTION in measured else "loss (nats)")
    # With several texts, one curve for each text, without the perplexity over all texts.
    names = {name: name.removeprefix("perplexity/") for name in texts[1:] or texts}
    kind = "validation perplexity"
    if not names:
        names = {"accuracy/top1": "top-1", "accuracy/top5": "top-5"}
        kind = "validation accuracy (%)"
    if RECONSTRUCTION in measured:
        names, kind = {RECONSTRUCTION: "error"}, "validation loss of masked patches"
    last = []
    for name, label in names.items():
        points = {step: record[name] for step, record in val.items() if name in record}
        if points:
            validation.plot(list(points), list(points.values()), marker=".", label=label)
            validation.legend()
            last.append(f"{label} {list(points.values())[-1]:.2f}".strip())
    if texts:
        validation.set(yscale="log")
        validation.yaxis.set_major_formatter("{x:g}")
        validation.yaxis.set_minor_formatter("{x:g}")
    validation.set(title=kind)
    rate.plot(times, [record["lr"] for record in train.values()], color="C2")
    rate.set(title="learning rate", ylim=(0, None))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    for axes in (loss, validation, rate):
        axes.set_xlabel("epoch" if iters_per_epoch else "iteration")
        axes.grid(alpha=0.3)
        for index, iteration in enumerate(growth):
            label = "_growth" if index or axes is not loss else "model grew"
            axes.axvline(iteration / scale, color="0.6", linestyle=":", label=label)
    loss.legend()
    figure.suptitle(": ".join(part for part in (title, ", ".join(last)) if part))
    write_figure(path, figure, dpi=120)


@HOOKS.register_module()
class ExportHook(Hook):
    """At the end, write the validated weights as a folder that timm loads.

    The work directory gets ``model.safetensors``, ``config.json`` and the model card ``README.md``.
    ``timm.create_model("local-dir:WORK_DIR", pretrained=True)`` then gives the trained model with
    class names and preprocessing. Validation uses the same weights: the EMA, or the model's own
    weights without an ``EMAHook`` or with ``validated=False``.

    Attributes:
        purpose: Purpose of the files, for the last line of the command.
    """

    priority = BEFORE_RECORD
    purpose = "for timm and `tokenformer-vit predict`"

    def before_train(self, runner) -> None:
        """Check that timm can express preprocessing, neck and head; warn of another resizing."""
        preprocessing(runner.cfg)
        if resizes_with_opencv(runner.cfg):
            runner.logger.warning(
                "The test pipeline resizes with OpenCV, but predictions with the exported model "
                "resize with Pillow, which smooths images that it shrinks: for the same numbers "
                'set backend="pillow" in ResizeEdge.'
            )
        model = unwrap(runner.model)
        check_exportable(model)
        if not num_classes(model):  # of a masked autoencoder
            self.purpose = "for timm and fine-tuning by model.backbone.checkpoint_path"

    @master_only
    def after_train(self, runner) -> None:
        """Write the files."""
        metainfo = runner.train_dataloader.dataset.metainfo
        export_classifier(
            validated_model(runner), runner.cfg, metainfo, runner.work_dir, run_facts(runner)
        )


def validated_model(runner) -> Any:
    """Return the model that is validated: the averaged one, if there is an ``EMAHook`` for it."""
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and getattr(hook, "validated", True):
            return hook.ema_model.module
    return unwrap(runner.model)
