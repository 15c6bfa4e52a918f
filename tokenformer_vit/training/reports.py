"""What a run shows and leaves behind: progress, curves, and weights for timm."""

import io
import json
import sys
import time
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mmengine.dist import is_main_process, master_only
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tokenformer_vit.command_line import typed_command
from tokenformer_vit.files import write_whole
from tokenformer_vit.records import TRAINING_PACKAGES, environment, write_record

from .export import export_classifier, preprocessing
from .guard import unwrap
from .loop import validations_left
from .optim import AutocastOptimWrapper

BEFORE_RECORD = 99  # RecordHook has 100, mmengine's lowest priority


class _Bar(tqdm):
    """A bar whose ETA counts the validations to come.

    Attributes:
        validating: Seconds that all validations so far took.
        validated: Number of these.
        validations_left: Number of those to come.
    """

    validating = 0.0
    validated = validations_left = 0

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """Add ``eta`` to what a bar can show; tqdm's clock stands still in validations."""
        state = super().format_dict
        if self.disable:
            return state
        done = state["n"] - state["initial"]
        state["rate"] = state["rate"] or (done / state["elapsed"] if state["elapsed"] else None)
        seconds = (state["total"] - state["n"]) / state["rate"] if state["rate"] else None
        state["elapsed"] += self.validating
        state["eta"] = "?"
        if seconds is not None:
            each = self.validating / self.validated if self.validated else 0
            state["eta"] = self.format_interval(seconds + self.validations_left * each)
        return state


@HOOKS.register_module()
class ProgressHook(Hook):
    """A progress bar over the whole run, with rate and ETA, where standard error is a terminal.

    The ETA counts the validations to come, each as long as those so far took on average; before the
    first it counts training alone.
    """

    _bar: _Bar | None = None

    def before_train(self, runner) -> None:
        """Open the bar at the iteration from which the run goes on."""
        self._open = ExitStack()
        if not is_main_process():
            return
        self._bar = self._open.enter_context(
            _Bar(
                total=runner.max_iters,
                initial=runner.iter,
                disable=None,
                unit="it",
                dynamic_ncols=True,
                desc="training",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{eta}, {rate_fmt}{postfix}]",
            )
        )
        if not self._bar.disable:
            self._open.enter_context(logging_redirect_tqdm([runner.logger]))

    @master_only
    def after_train_iter(
        self,
        runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Advance the bar."""
        bar = self._bar
        if bar is None:
            return
        bar.update()
        if outputs and not bar.disable:
            epoch = {"epoch": f"{runner.epoch + 1}/{runner.max_epochs}"}
            if isinstance(runner.train_loop, IterBasedTrainLoop):
                epoch = {}
            loss = f"{float(outputs['loss']):.4f}"
            bar.set_postfix({**epoch, "loss": loss}, refresh=False)

    def before_val(self, runner) -> None:
        """Note when a validation begins."""
        self._since = time.monotonic()

    def after_val(self, runner) -> None:
        """Note how long it took, and leave it out of the rate of training."""
        bar = self._bar
        if bar is None or bar.disable:
            return
        seconds = time.monotonic() - self._since
        bar.start_t += seconds
        bar.last_print_t += seconds
        bar.validating += seconds
        bar.validated += 1
        bar.validations_left = validations_left(runner.train_loop)

    def after_train(self, runner) -> None:
        """Close the bar."""
        self._open.close()


@HOOKS.register_module()
class RecordHook(Hook):
    """Record what was run, on what, and what came out, in ``record.json`` of the work directory.

    It is written after everything else: a run that has a record is finished. Times count from the
    start of the process that ends the run: a resumed run says from which iteration that was.

    Args:
        unit: Of what a batch consists.
        metrics: How the names of the validation figures begin that are recorded.
        packages: Whose versions are recorded besides those of every training.
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
        """Start the clock, and look at the source code that is running before it can change."""
        self._start, self._first = time.monotonic(), runner.iter
        self._environment = environment((*TRAINING_PACKAGES, *self._packages))

    @master_only
    def after_train(self, runner) -> None:
        """Write the record."""
        path = Path(runner.work_dir) / "record.json"
        if runner.iter == self._first and path.is_file():
            return  # nothing was trained; the record of the run that did stays
        seconds = time.monotonic() - self._start
        by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
        loader, steps = runner.train_dataloader, runner.optim_wrapper._accumulative_counts
        scalars = runner.message_hub.log_scalars
        loss = scalars["train/loss"].data[0]
        record = {
            "command": typed_command(),
            **self._environment,
            "config": Path(runner.cfg.filename).name,
            "processes": runner.world_size,
            "dtype": "bfloat16 autocast"
            if isinstance(runner.optim_wrapper, AutocastOptimWrapper)
            else "float32",
            f"{self._unit}_per_step": loader.batch_size * runner.world_size * steps,
            "seed": runner.seed,
            "n": 1,
            f"train_{self._unit}": len(loader.dataset),
            **({} if by_iteration else {"epochs": runner.epoch}),
            "iterations": runner.iter,
            **{
                key: runner.message_hub.runtime_info[key]
                for key in ("growth", "flops")
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
    """Return the most memory that tensors took on the GPU, or this process on the CPU.

    None: not known, on a CPU under Windows.
    """
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20)
    try:
        import resource
    except ImportError:  # Windows has none
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
        draw_curves(
            train,
            val,
            Path(runner.work_dir) / "curves.png",
            [growth["iteration"] for growth in grown],
            None
            if isinstance(runner.train_loop, IterBasedTrainLoop)
            else len(runner.train_dataloader),
        )


def read_scalars(logs: Iterable[Path]) -> tuple[dict[int, dict], dict[int, dict]]:
    """Merge the scalar logs of a run and its resumptions, given in the order they were written.

    Returns:
        Training records by iteration and validation records by epoch, or by iteration where the
        loop counts these. Where a resumption repeats
        what a killed run had logged, the later record counts.
    """
    train: dict[int, dict] = {}
    val: dict[int, dict] = {}
    for log in logs:
        for line in log.read_text().splitlines():
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
) -> None:
    """Draw the curves of :func:`read_scalars` into a PNG file.

    Args:
        train: Training records by iteration.
        val: Validation records by epoch, or by iteration.
        path: The file.
        growth: Iterations before which the model grew, to be marked.
        iters_per_epoch: What turns them into epochs; None where validation counts iterations.
    """
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    loss, rate, validation = figure.subplots(1, 3)
    loss.plot(list(train), [record["loss"] for record in train.values()])
    loss.set(title="training loss", xlabel="iteration")
    rate.plot(list(train), [record["lr"] for record in train.values()], color="C2")
    rate.set(title="learning rate", xlabel="iteration", ylim=(0, None))
    measured = dict.fromkeys(name for record in val.values() for name in record)
    texts = [name for name in measured if name.startswith("perplexity")]
    # Of several texts each by itself, without the one of all.
    names = {name: name.removeprefix("perplexity/") for name in texts[1:] or texts}
    title = "validation perplexity"
    if not names:
        names = {"accuracy/top1": "top-1", "accuracy/top5": "top-5"}
        title = "validation accuracy (%)"
    for name, label in names.items():
        points = {step: record[name] for step, record in val.items() if name in record}
        if points:
            validation.plot(list(points), list(points.values()), marker=".", label=label)
            validation.legend()
    if texts:
        validation.set(yscale="log")
        validation.yaxis.set_major_formatter("{x:g}")
        validation.yaxis.set_minor_formatter("{x:g}")
    validation.set(title=title, xlabel="epoch" if iters_per_epoch else "iteration")
    for axes, scale in ((loss, 1), (rate, 1), (validation, iters_per_epoch or 1)):
        for iteration in growth:
            axes.axvline(iteration / scale, color="0.6", linestyle=":", label="_growth")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())


@HOOKS.register_module()
class ExportHook(Hook):
    """At the end, write the averaged weights as a folder that timm loads.

    The work directory then holds ``model.safetensors`` and ``config.json``, so that
    ``timm.create_model("local-dir:WORK_DIR", pretrained=True)`` gives the trained model with its
    class names and preprocessing. The weights are those of the EMA, which validation used too;
    without an ``EMAHook`` they are the model's own.

    Attributes:
        purpose: What the files are for.
    """

    priority = BEFORE_RECORD
    purpose = "averaged weights, for timm and tools/predict.py"

    def before_train(self, runner) -> None:
        """See that the export will be able to say how images are prepared."""
        preprocessing(runner.cfg)

    @master_only
    def after_train(self, runner) -> None:
        """Write the two files."""
        metainfo = runner.train_dataloader.dataset.metainfo
        export_classifier(validated_model(runner), runner.cfg, metainfo, runner.work_dir)


def validated_model(runner) -> Any:
    """Return the averaged model, or without an ``EMAHook`` the one in training."""
    for hook in runner.hooks:
        if isinstance(hook, EMAHook):
            return hook.ema_model.module
    return unwrap(runner.model)
