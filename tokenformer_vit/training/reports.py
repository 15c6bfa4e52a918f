"""What a run tells: facts, progress, curves, weights for timm, and a record."""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tokenformer_vit.errors import one_line
from tokenformer_vit.files import whole_file
from tokenformer_vit.records import environment, write_record
from tokenformer_vit.vision.datasets import HUB

from .config import datasets, listed, name_of
from .engine import HOOKS, Hook, is_main_process, master_only
from .export import IMPOSSIBLE, describe_classifier, export_classifier, resizes_with_opencv
from .hooks import losses_are_due
from .loop import by_iteration, validation_is_due
from .metrics import RECONSTRUCTION, VAL_LOSS
from .models.backbone import unwrap
from .optim import AutocastOptimWrapper, averaging_hooks

# Figures of a validation in the card, and their units.
_RESULTS = {
    "accuracy/top1": ("Top-1 accuracy", " %"),
    "accuracy/top5": ("Top-5 accuracy", " %"),
    VAL_LOSS: ("Cross-entropy", ""),
    RECONSTRUCTION: ("Reconstruction loss of masked patches", ""),
}


def accumulation(runner: Any) -> int:
    """Return the number of batches that make one optimiser step."""
    return runner.optim_wrapper._accumulative_counts


def validated_model(runner: Any) -> Any:
    """Return the model that is validated: the averaged one, if there is an ``EMAHook`` for it."""
    for hook in averaging_hooks(runner):
        if getattr(hook, "validated", True):
            return hook.ema_model.module
    return unwrap(runner.model)


def facts(runner: Any) -> dict[str, Any]:
    """Return what is trained so far, on what and how: for terminal, card, checkpoint and record.

    There are no paths in it, which may be private.
    """
    cfg, loader, wrapper = runner.cfg, runner.train_dataloader, runner.optim_wrapper
    unit = "sequences" if "context_length" in loader.dataset.metainfo else "images"
    data = next(datasets(cfg.train_dataloader.dataset))
    part = cfg.model.get("backbone") or cfg.model
    averaged = validated_model(runner) is not unwrap(runner.model)
    dtype = getattr(wrapper, "cast_dtype", None)  # of mmengine's AmpOptimWrapper
    if isinstance(wrapper, AutocastOptimWrapper):
        dtype = torch.bfloat16
    found = {
        "config": PurePath(cfg.filename or "").name,
        "model": part.get("model_name") or name_of(part.get("type")),
        "data": ", ".join(PurePath(root).name for root in listed(data.get("data_root"))),
        f"train_{unit}": len(loader.dataset),
        f"val_{unit}": None if runner.val_loop is None else len(runner.val_dataloader.dataset),
        "processes": runner.world_size,
        "dtype": f"{dtype} autocast".removeprefix("torch.") if dtype else "float32",
        f"{unit}_per_step": loader.batch_size * runner.world_size * accumulation(runner),
        "optimizer": type(wrapper.optimizer).__name__,
        "learning_rate": max(each.get("initial_lr", each["lr"]) for each in wrapper.param_groups),
        "weights": "exponential moving average" if averaged else "those of the last step",
        "seed": runner.seed,
        "epochs": None if by_iteration(runner) else runner.epoch,
        "iterations": runner.iter,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def card_of(runner: Any) -> dict[str, Any]:
    """Return the sections of a model card; results only if the present weights were validated."""
    data, scalars = runner.cfg.train_dataloader.dataset, runner.message_hub.log_scalars
    sections: dict[str, Any] = {"Training": facts(runner)}
    if runner.val_loop is not None and validation_is_due(runner.train_loop):
        sections["Validation"] = {
            title: f"{scalars[f'val/{key}'].current():.4g}{unit}"
            for key, (title, unit) in _RESULTS.items()
            if f"val/{key}" in scalars
        }
    inner, classes = next(datasets(data)), runner.train_dataloader.dataset.metainfo["classes"]
    found = [HUB.fullmatch(str(root)) for root in listed(inner.get("data_root"))]
    names = [each[1] for each in found if each]
    if name_of(inner.type) == "ImageNet" and len(classes) == 1000:
        names = ["imagenet-1k"]
    return {**sections, "Dataset": names} if names else sections  # also into the front matter


def _announce(runner: Any) -> None:
    """Tell the log what will be trained, where and how long, and whether the rate fits the step."""
    known, parameters = facts(runner), [*runner.model.parameters()]
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    length = f"{runner.max_iters:,} steps"
    if not by_iteration(runner):
        steps = runner.max_iters // accumulation(runner)
        length = f"{steps:,} steps in {runner.max_epochs} epochs"
    if runner.iter >= runner.max_iters:
        length += "; finished, so nothing is trained"
    elif runner.iter:
        length += f"; continues after iteration {runner.iter:,}"
    lines = {
        **known,
        "config": runner.cfg.filename,
        "parameters": f"{sum(map(torch.numel, parameters)):,}, {trained:,} of them trained",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "length": length,
        "results": f"{runner.work_dir} (log: {Path(runner.log_dir).name}/)",
        "to resume": "the same command with --resume",
    }
    told = [f"  {name:<18}  {text}" for name, text in lines.items()]
    runner.logger.info("\n".join(["Training:", *told]))
    scale = runner.auto_scale_lr or {}
    unit, number = next(each for each in known.items() if each[0].endswith("_per_step"))
    if not scale.get("enable") and number != scale.get("base_batch_size", number):
        runner.logger.warning(
            f"An optimiser step takes {number} {unit.partition('_')[0]}, but the learning rate is "
            f"for {scale['base_batch_size']}: set optim_wrapper.accumulative_counts, or add "
            "--auto-scale-lr if the recipe scales its rate."
        )


@HOOKS.register_module()
class ProgressHook(Hook):
    """Describe the run at its start, then show its speed, of all processes together, and its ETA.

    On a terminal, a bar shows the whole run; its ETA includes validations.
    """

    def before_train(self, runner) -> None:
        """Describe the run, and open the bar at the iteration where it continues."""
        length = runner.train_dataloader.dataset.metainfo.get("context_length")
        self._unit = "tokens/s" if length else "images/s"
        # In a run by epochs, an iteration is one batch.
        batches = accumulation(runner) if by_iteration(runner) else 1
        size = runner.train_dataloader.batch_size * runner.world_size * batches
        self._number = size * (length or 1)
        self._done, self._open = 0, ExitStack()
        _announce(runner)
        self._bar = tqdm(
            total=runner.max_iters,
            initial=runner.iter,
            disable=not is_main_process() or None,  # None: where standard error is no terminal
            dynamic_ncols=True,
            desc="training",
            smoothing=0,  # the mean since the start, so that it includes validations
        )
        self._open.enter_context(self._bar)
        if not self._bar.disable:
            self._open.enter_context(logging_redirect_tqdm([runner.logger]))

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Advance the bar; where the losses are read, log the speed."""
        self._done += 1
        self._bar.update()
        if not losses_are_due(runner, batch_idx):
            return
        hub = runner.message_hub
        seconds = hub.get_scalar("train/time").mean(self._done)  # without validations
        hub.update_scalar(f"train/{self._unit}", self._number / max(seconds, 1e-9))
        self._done = 0

    def after_train(self, runner) -> None:
        """Close the bar."""
        self._open.close()


@HOOKS.register_module()
class ResultsHook(Hook):
    """At the end of a run, draw its curves, export its model, and write its record.

    The curves are those of the whole run; the export is the model that is validated. A run that
    timm cannot express says so at its start, and has ``not_exported`` in its record. The record is
    the last file: a run with it is finished. Its ``seconds`` count from ``resumed_at_iteration``.
    """

    priority = "LOWEST"

    @master_only
    def before_train(self, runner) -> None:
        """Start the clock, note the commit before it can change, and try the export."""
        self._start, self._first = time.monotonic(), runner.iter
        self._environment = environment()
        self.not_exported = self.prepare_export(runner)
        if self.not_exported:
            runner.logger.warning(f"This run exports no model: {self.not_exported}")

    def prepare_export(self, runner) -> str | None:
        """Describe the model as the export will; return why that is impossible, or None."""
        metainfo = runner.train_dataloader.dataset.metainfo
        try:
            describe_classifier(unwrap(runner.model), runner.cfg, metainfo)
        except IMPOSSIBLE as error:
            return f"{one_line(error)} ({type(error).__name__})"
        if resizes_with_opencv(runner.cfg):
            runner.logger.warning(
                "The test pipeline resizes with OpenCV, the exported model's with Pillow, which "
                'smooths: for the same numbers use EvalTransform, or set backend="pillow"'
            )
        return None

    def export(self, runner) -> None:
        """Write the validated model into the work directory."""
        metainfo, card = runner.train_dataloader.dataset.metainfo, card_of(runner)
        export_classifier(validated_model(runner), runner.cfg, metainfo, runner.work_dir, card)

    @master_only
    def after_train(self, runner) -> None:
        """Write curves, export and record, in this order."""
        work_dir = Path(runner.work_dir)
        train, val = read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))
        grown = runner.message_hub.runtime_info.get("growth") or ()
        draw_curves(
            train,
            val,
            work_dir / "curves.png",
            growth=[growth["iteration"] for growth in grown],
            iters_per_epoch=None if by_iteration(runner) else len(runner.train_dataloader),
            title=Path(runner.cfg.filename or "").stem,
        )
        if self.not_exported is None:
            self.export(runner)
        path = work_dir / "record.json"
        if runner.iter > self._first or not path.is_file():  # else nothing was trained
            memory = (line.get("memory", 0) for line in [*train.values(), *val.values()])
            write_record(path, self._record(runner, max(memory, default=0)))

    def _record(self, runner, logged_mib: int) -> dict[str, Any]:
        """Return the content of ``record.json``; ``logged_mib`` is the peak memory in the log."""
        hub = runner.message_hub
        loss = hub.log_scalars["train/loss"].data[0]
        noted = ("growth", "flops", "teacher", "config_changes")  # by other hooks
        figures = {
            name.removeprefix("val/"): round(float(scalar.current()), 3)
            for name, scalar in sorted(hub.log_scalars.items())
            if name.startswith("val/") and name not in ("val/time", "val/data_time")
        }
        record = {
            **self._environment,
            **facts(runner),
            "n": 1,
            **{key: hub.runtime_info[key] for key in noted if key in hub.runtime_info},
            "resumed_at_iteration": self._first,
            "seconds": round(time.monotonic() - self._start, 1),
            "peak_mib": _peak_mib(logged_mib),
            "loss_first": round(float(loss[0]), 4),
            "loss_last_20_mean": round(float(loss[-20:].mean()), 4),
            **({"not_exported": self.not_exported} if self.not_exported else {}),
        }
        # Validation also logs the FLOPs so far.
        return {**record, **{key: v for key, v in figures.items() if key not in record}}


def _peak_mib(logged: int) -> int | None:
    """Return the peak memory of tensors on the GPU, or of this process on the CPU, if known."""
    if torch.cuda.is_available():  # mmengine's logger starts a new peak at each of its lines
        return max(logged, round(torch.cuda.max_memory_allocated() / 2**20))
    try:
        import resource
    except ImportError:  # Windows does not have it
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))  # bytes on macOS, else KiB


def read_scalars(logs: Iterable[Path]) -> tuple[dict[int, dict], dict[int, dict]]:
    """Merge scalar logs, oldest first, into records of training and of validation by step."""
    train: dict[int, dict] = {}
    val: dict[int, dict] = {}
    for log in logs:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(json.JSONDecodeError):  # the line that a killed run was writing
                record = json.loads(line)
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
    """Draw loss, figures of validation, and learning rate, from :func:`read_scalars`, into a PNG.

    The x axis is epochs, or iterations with ``iters_per_epoch=None``; ``growth`` are iterations.
    """
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = loss, validation, rate = figure.subplots(1, 3, sharex=True)
    scale, last = iters_per_epoch or 1, []
    times = [iteration / scale for iteration in train]
    loss.plot(times, [record["loss"] for record in train.values()], label="training")
    rate.plot(times, [record["lr"] for record in train.values()], color="C2")
    for name in dict.fromkeys(name for record in val.values() for name in record):
        curve = {step: record[name] for step, record in val.items() if name in record}
        if name.startswith(("accuracy/", "perplexity", RECONSTRUCTION)):
            validation.plot([*curve], [*curve.values()], marker=".", label=name)
            validation.legend()
            last.append(f"{name} {[*curve.values()][-1]:.2f}")
        if name == "perplexity":
            curve = {step: math.log(value) for step, value in curve.items()}
            validation.set(yscale="log")
            validation.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        if name in ("perplexity", VAL_LOSS):
            loss.plot([*curve], [*curve.values()], marker=".", label="validation")
    for axes, name in zip(panels, ("loss", "validation", "learning rate"), strict=True):
        for index, iteration in enumerate(growth):
            label = "model grew" if axes is loss and not index else "_"  # once in the legend
            axes.axvline(iteration / scale, color="0.6", linestyle=":", label=label)
        axes.set(title=name, xlabel="epoch" if iters_per_epoch else "iteration")
        axes.grid(alpha=0.3)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    rate.set(ylim=(0, None))
    loss.legend()
    figure.suptitle(": ".join(part for part in (title, ", ".join(last[:3])) if part))
    with whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
