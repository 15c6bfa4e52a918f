"""The runner of a training, and the signals that end it."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenformer_vit.files import whole_file
from tokenformer_vit.models.compilation import blocks_of, compile_blocks

from .checkpoint import load_plain_checkpoint, safe_loading
from .config import listed, name_of
from .data.sampler import seeded_loader
from .engine import (
    Config,
    Hook,
    MMLogger,
    Runner,
    all_reduce,
    get_comm_device,
    get_world_size,
    master_only,
)
from .models.backbone import unwrap
from .optim import AutocastOptimWrapper

# SIGTERM ends a job of Slurm and others, USR1 is for `sbatch --signal=USR1@60`, and HUP ends a
# terminal. Windows has only the first.
SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
]
_LOOK_SECONDS = 5  # between two agreements of processes, and two looks of a worker


class Termination:
    """Notes the signals that end a job, so that a checkpoint can be written first."""

    def __init__(self) -> None:
        self._noted = False
        self._running = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._every, self._left, self._asked = 1, 1, time.monotonic()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note signals inside the context."""
        before = {each: signal.signal(each, self._note) for each in SIGNALS}
        self._running[0] = 1
        try:
            yield
        finally:
            self._running[0] = 0  # Python now ends its workers, by SIGTERM
            for each, handler in before.items():
                signal.signal(each, handler)

    def _note(self, number: int, frame: Any) -> None:
        self._noted = True

    def agreed(self) -> bool:
        """Tell whether any process noted a signal; all must call this after each iteration.

        Several processes ask each other about every 5 seconds, and wait for that. How many
        iterations take so long is also agreed on.
        """
        if get_world_size() == 1:
            return self._noted
        self._left -= 1
        if self._left > 0:
            return False
        told = torch.tensor([self._noted, time.monotonic() - self._asked], device=get_comm_device())
        all_reduce(told, op="max")
        noted, seconds = told.tolist()
        # Three of the five seconds, and at most twice as many as before: iterations vary.
        fitting = int(self._every * 0.6 * _LOOK_SECONDS / max(seconds, 1e-3))
        self._left = self._every = max(1, min(2 * self._every, fitting))
        self._asked = time.monotonic()
        return bool(noted)

    def patient(self, start: Callable[[int], None] | None) -> Callable[[int], None]:
        """Return a ``worker_init_fn`` that calls the given one; its workers survive signals."""
        # These also reach the workers, and PyTorch stops a run as soon as one ends.
        return partial(_start_worker, start, self._running)


def _start_worker(start: Callable[[int], None] | None, running: Tensor, worker_id: int) -> None:
    """Start a worker that ends by a signal only when its run does not need it."""
    if start is not None:
        start(worker_id)
    for each in SIGNALS:
        signal.signal(each, lambda *_: None if running[0] else os._exit(0))


class TrainingRunner(Runner):
    """mmengine's runner: exact resume, files that run no code, and little on the terminal."""

    _built = False

    def __init__(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self.termination = Termination()
        super().__init__(*args, train_dataloader=seeded_loader(train_dataloader), **kwargs)

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build the schedules; each has an iteration at least, however short the run is."""
        batches = len(self.train_dataloader)
        for part in listed(scheduler):
            if isinstance(part, dict) and part.get("convert_to_iter_based") and "end" in part:
                part["end"] = max(part["end"], part.get("begin", 0) + 1.5 / batches)
        return super().build_param_scheduler(scheduler)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger, and keep the start of a run off the terminal."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(lambda record: self._built or record.levelno >= logging.WARNING)
        return logger

    def build_model(self, model: Any) -> nn.Module:
        """Build the model, and compile its blocks as the config says in ``compile_blocks``."""
        built: Any = super().build_model(model)
        if self.cfg.get("compile_blocks"):
            compiled: Any = getattr(built, "backbone", built)
            parts = (part for part in compiled.modules() if isinstance(blocks_of(part), nn.Module))
            compile_blocks(next(parts, compiled), self.cfg.compile_blocks)
        wrapper = name_of((self.cfg.get("optim_wrapper") or {}).get("type"))
        if wrapper == AutocastOptimWrapper.__name__ and not torch.cuda.is_available():
            # The backward pass of fused attention is slow on a CPU in bfloat16.
            for module in built.modules():
                if hasattr(module, "fused_attn"):
                    module.fused_attn = False
        return built

    def register_default_hooks(self, hooks: dict[str, Any] | None = None) -> None:
        """Register the hooks of a config; one that it sets to None does nothing."""
        given: Any = {name: hook or Hook() for name, hook in (hooks or {}).items()}
        super().register_default_hooks(given)

    def dump_config(self) -> None:
        """Write no config: the command has."""

    def train(self) -> nn.Module:
        """Train; the signals that end a job are noted meanwhile, and files run no code."""
        # Once such a block is freed, glibc keeps up to 64 MiB that an iteration frees for the next.
        torch.empty(2**25 - 2**16, dtype=torch.uint8)
        with self.termination.noting(), safe_loading():
            return super().train()

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file without running code; all tensors of the model must be there."""
        checkpoint = load_plain_checkpoint(filename)  # what needs the GPU is copied there
        weights = checkpoint.get("state_dict", checkpoint).items()
        checkpoint["state_dict"] = {name.removeprefix("module."): each for name, each in weights}
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        unwrap(self.model).load_state_dict(checkpoint["state_dict"])
        self.logger.info(f"Load checkpoint from {filename}")
        return checkpoint

    @master_only
    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **how: Any) -> None:
        """Write a checkpoint; its name appears when it is complete, and nothing is copied."""
        dataset, optimizer = cast(Any, self.train_dataloader.dataset), cast(Any, self.optim_wrapper)
        checkpoint: dict[str, Any] = {
            "meta": {**how["meta"], "seed": self.seed, "dataset_meta": dataset.metainfo},
            "state_dict": unwrap(self.model).state_dict(),
            "message_hub": self.message_hub.state_dict(),
        }
        if how["save_optimizer"]:
            checkpoint["optimizer"] = optimizer.state_dict()
        if how["save_param_scheduler"]:
            schedulers = cast(Any, self.param_schedulers) or ()
            checkpoint["param_schedulers"] = [each.state_dict() for each in schedulers]
        self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
        with whole_file(Path(out_dir, filename)) as file:
            torch.save(checkpoint, file)


def scale_rates(cfg: Config) -> None:
    """Scale the rates of a config with the images of an optimiser step, if it says so."""
    scale: Any = cfg.get("auto_scale_lr") or {}
    if not scale.get("enable"):
        return
    batches = get_world_size() * cfg.optim_wrapper.get("accumulative_counts", 1)
    images = cfg.train_dataloader.batch_size * batches
    ratio = images / scale["base_batch_size"]
    cfg.optim_wrapper.optimizer.lr *= ratio
    for part in listed(cfg.get("param_scheduler")):
        if part.get("eta_min"):
            part["eta_min"] *= ratio
    scale.update(enable=False, base_batch_size=images)  # mmengine would forget the accumulation


class _BeginHook(Hook):
    """Lets the log reach the terminal once all is built, and begins once all checks have passed."""

    priority = "LOWEST"

    def __init__(self, begin: Callable[[], None] | None) -> None:
        self._begin = begin

    def before_run(self, runner) -> None:
        runner._built = True

    def before_train(self, runner) -> None:
        if self._begin:
            self._begin()


def run_training(cfg: Config, begin: Callable[[], None] | None = None) -> None:
    """Train what a config names; ``begin`` is called once all checks of the training passed."""
    scale_rates(cfg)
    runner: Any = TrainingRunner.from_cfg(cfg)
    runner.register_hook(_BeginHook(begin))
    runner.train()
    # Its workers, which persist between epochs, end with the last reference to a loader. In a
    # garbage collection PyTorch would wait for each of them for five seconds.
    del runner.train_loop.dataloader
