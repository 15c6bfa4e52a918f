"""Results of a run: curves, weights for timm, and a record."""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from tokenformer_vit.errors import one_line
from tokenformer_vit.models.checkpoints import describe_model
from tokenformer_vit.records import environment, write_record

from .distributed import unwrap
from .engine import HOOKS, Hook, master_only
from .export import (
    as_timm_model,
    export_classifier,
    preprocessing,
    resizes_with_opencv,
    run_facts,
    validated_model,
)
from .hooks import dtype_of, sample_noun, samples_per_step
from .loop import by_iteration
from .metrics import RECONSTRUCTION, VAL_LOSS
from .models.backbone import num_classes


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
        """Convert the model as the export will; return why that is impossible, or None."""
        model, cfg = unwrap(runner.model), runner.cfg
        try:
            describe_model(as_timm_model(model), num_classes(model), None, preprocessing(cfg))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"{one_line(error)} ({type(error).__name__})"
        if resizes_with_opencv(cfg):
            runner.logger.warning(
                "The test pipeline resizes with OpenCV, the exported model's with Pillow, which "
                'smooths: for the same numbers use EvalTransform, or set backend="pillow"'
            )
        return None

    def export(self, runner) -> None:
        """Write the validated model into the work directory."""
        metainfo, facts = runner.train_dataloader.dataset.metainfo, run_facts(runner)
        export_classifier(validated_model(runner), runner.cfg, metainfo, runner.work_dir, facts)

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
        unit, hub = sample_noun(runner), runner.message_hub
        loss = hub.log_scalars["train/loss"].data[0]
        noted = ("growth", "flops", "compression", "teacher", "config_changes")  # by other hooks
        figures = {
            name.removeprefix("val/"): round(float(scalar.current()), 3)
            for name, scalar in sorted(hub.log_scalars.items())
            if name.startswith("val/") and name not in ("val/time", "val/data_time")
        }
        record = {
            **self._environment,
            "config": Path(runner.cfg.filename or "").name,
            "processes": runner.world_size,
            "dtype": dtype_of(runner),
            f"{unit}_per_step": samples_per_step(runner),
            "seed": runner.seed,
            "n": 1,
            f"train_{unit}": len(runner.train_dataloader.dataset),
            **({} if by_iteration(runner) else {"epochs": runner.epoch}),
            "iterations": runner.iter,
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
    figure.savefig(path, dpi=120)
