"""What a run shows while it trains: a summary at its start, then speed and ETA."""

import time
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tokenformer_vit.layers import Pattention

from .distributed import unwrap
from .guard import losses_are_due
from .loop import validations_left
from .mmengine_internals import accumulation
from .optim import AutocastOptimWrapper
from .steps import highest_rate, sample_noun, samples_per_step, units_per_step


def dtype_of(runner: Any) -> str:
    """Name the precision of a run."""
    wrapper = runner.optim_wrapper
    if isinstance(wrapper, AutocastOptimWrapper):
        return "bfloat16 autocast"
    if isinstance(wrapper, AmpOptimWrapper):  # mmengine's, for float16
        return f"{wrapper.cast_dtype or torch.float16} autocast".removeprefix("torch.")
    return "float32"


def _units_per_iteration(runner: Any) -> tuple[int, str]:
    number, unit = units_per_step(runner)
    if not isinstance(runner.train_loop, IterBasedTrainLoop):
        number //= accumulation(runner)  # there, an iteration is one batch
    return number, f"{unit}s"


def describe_run(runner: Any) -> str:
    """Describe a run before it starts, in about ten lines.

    Args:
        runner: The runner, with everything built.

    Returns:
        What is trained, on which data and device, how long, and where the results go.
    """
    cfg, model = runner.cfg, unwrap(runner.model)
    by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
    loader, step = runner.train_dataloader, samples_per_step(runner)
    steps = runner.max_iters if by_iteration else runner.max_iters // accumulation(runner)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    device = torch.device(next(model.parameters()).device)
    threads = torch.get_num_threads()
    machine = f"CPU ({threads} thread{'s' * (threads > 1)})"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    parts = [f"{loader.batch_size} a process"]
    if runner.world_size > 1:
        parts.append(f"{runner.world_size} processes")
    if accumulation(runner) > 1:
        parts.append(f"{accumulation(runner)} batches accumulated")
    optimizer = type(runner.optim_wrapper.optimizer).__name__
    lines = {
        "config": cfg.filename,
        "model": _describe_model(model, cfg),
        "parameters": f"{total:,}" + (f", {trained:,} of them trained" * (trained < total)),
        "data": _describe_data(runner),
        "device": f"{machine}, {runner.world_size} process{'es' * (runner.world_size > 1)}, "
        f"{dtype_of(runner)}",
        "step": f"{step:,} {sample_noun(runner)} ({' x '.join(parts)}); {optimizer}, "
        f"learning rate {highest_rate(runner):.3g}",
        "length": f"{steps:,} steps" + (f" in {runner.max_epochs} epochs" * (not by_iteration)),
        "results": f"{Path(runner.work_dir)} (log: {Path(runner.log_dir).name}/)",
        "to resume": "the same command with --resume",
    }
    if runner.iter >= runner.max_iters:
        lines["length"] += "; finished, so nothing is trained"
    elif runner.iter:
        epoch = "" if by_iteration else f" (epoch {runner.epoch + 1})"
        lines["length"] += f"; continues after iteration {runner.iter:,}{epoch}"
    return "\n".join(["Training:", *(f"  {name:<11} {text}" for name, text in lines.items())])


def _describe_model(model: Any, cfg: Any) -> str:
    part = cfg.model.get("backbone") or cfg.model
    part = part.get("module") or part  # LoRA's
    words = [str(part.get("model_name") or part.get("architecture") or part.get("type"))]
    layers = [each for each in model.modules() if isinstance(each, Pattention)]
    if layers:
        thetas = dict.fromkeys(layer.theta for layer in layers)
        words += [
            f"Θ {', '.join(thetas)}",
            f"{sum(each.num_param_tokens for each in layers):,} pairs",
        ]
    return "; ".join(words)


def _describe_data(runner: Any) -> str:
    loaders = {"training": runner.train_dataloader}
    if runner.val_loop is not None:
        loaders["validation"] = runner.val_dataloader
    info = runner.train_dataloader.dataset.metainfo
    classes = f", {len(info['classes'])} classes" if info.get("classes") else ""
    length = f" of {info['context_length']:,} tokens" if "context_length" in info else ""
    root = runner.cfg.train_dataloader.dataset.get("data_root", "")
    folders = [root] if isinstance(root, str) else list(root)
    numbers = " and ".join(f"{len(loader.dataset):,} {split}" for split, loader in loaders.items())
    return f"{numbers} {sample_noun(runner)}{length}{classes} in {', '.join(folders)}"


class _Bar(tqdm):
    """A bar whose ETA includes the remaining validations.

    Attributes:
        validating: Seconds that all validations so far took.
        validated: Number of validations so far.
        validations_left: Number of remaining validations.
        units: Images or tokens of one iteration, and their name.
    """

    validating = 0.0
    validated = validations_left = 0
    units: tuple[int, str] = (1, "it")

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """Add ``eta`` and ``speed``; tqdm's clock stands still during validation."""
        state = super().format_dict
        if "initial" not in state:  # the bar is not shown
            return state
        done = state["n"] - state["initial"]
        state["rate"] = state["rate"] or (done / state["elapsed"] if state["elapsed"] else None)
        rate, (number, unit) = state["rate"], self.units
        seconds = (state["total"] - state["n"]) / rate if rate else None
        state["elapsed"] += self.validating
        state["speed"] = f"{rate * number:,.0f} {unit}/s" if rate else f"? {unit}/s"
        state["eta"] = "?"
        if seconds is not None:
            each = self.validating / self.validated if self.validated else 0
            state["eta"] = self.format_interval(seconds + self.validations_left * each)
        return state


@HOOKS.register_module()
class ProgressHook(Hook):
    """Describe the run at its start, then show speed and ETA.

    The log lines get ``images/s`` or, for text, ``tokens/s``: the mean since the losses were read
    the last time, of all processes together. At these times the processor waits for the GPU; the
    time of an iteration between them is not the time of the GPU. Where standard error is a
    terminal, a bar shows the same for the whole run. The bar's ETA includes the remaining
    validations, each as long as the average one so far; before the first validation it counts only
    training.
    """

    _bar: _Bar | None = None

    def before_train(self, runner) -> None:
        """Describe the run, and open the bar at the iteration where it continues."""
        self._open = ExitStack()
        self._units = _units_per_iteration(runner)
        self._first, self._steps = runner.iter, 0
        if not is_main_process():
            return
        runner.logger.info(describe_run(runner))
        self._bar = self._open.enter_context(
            _Bar(
                total=runner.max_iters,
                initial=runner.iter,
                disable=None,
                dynamic_ncols=True,
                desc="training",
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{eta}, {speed}{postfix}]",
            )
        )
        self._bar.units = self._units
        if not self._bar.disable:
            self._open.enter_context(logging_redirect_tqdm([runner.logger]))

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Advance the bar; where the losses are read, log the speed."""
        if self._bar is not None:
            self._bar.update()
        self._steps += 1
        if runner.iter != self._first and not losses_are_due(runner, batch_idx):
            return
        scalars, (number, unit) = runner.message_hub.log_scalars, self._units
        for name in ("train/time", "train/data_time"):  # from mmengine's IterTimerHook
            if name in scalars:  # which copies the history in each iteration: keep the end of it
                scalars[name].max_length = 1000
        if "train/time" in scalars:
            seconds = scalars["train/time"].mean(self._steps)
            runner.message_hub.update_scalar(f"train/{unit}/s", number / seconds)
        self._steps = 0
        if self._bar is not None and "train/loss" in scalars:
            epoch = {"epoch": f"{runner.epoch + 1}/{runner.max_epochs}"}
            if isinstance(runner.train_loop, IterBasedTrainLoop):
                epoch = {}
            loss = f"{scalars['train/loss'].current():.4f}"
            self._bar.set_postfix({**epoch, "loss": loss}, refresh=False)

    def before_val(self, runner) -> None:
        """Note when a validation begins."""
        self._since = time.monotonic()

    def after_val(self, runner) -> None:
        """Keep the duration of a validation out of the speed of training."""
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
