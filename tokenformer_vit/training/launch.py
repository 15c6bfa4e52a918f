"""Build a run from its config, and train."""

import logging
import time
from functools import cached_property
from typing import Any, cast

import mmengine
from mmengine.config import Config
from mmengine.dist import master_only
from mmengine.fileio import join_path
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmengine.utils import get_git_hash
from torch.utils.data import DataLoader

from tokenformer_vit.errors import InputError

from .background import BackgroundWriter
from .checkpoint import ExactCheckpointHook
from .data.sampler import seeded_loader
from .distributed import unwrap
from .mmengine_internals import accumulation
from .storage import secure_files

# Lines that tell a user nothing, at each epoch or about mmengine itself.
_NOISE = ("Exp name: ", '"FileClient" will be deprecated', '"HardDiskBackend" is the alias')
# The hooks that mmengine leaves out by itself where a config has None.
_STOCK_HOOKS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")


class TrainingRunner(Runner):
    """mmengine's runner, with checkpoints in the background and a short output.

    Config, environment and hooks are printed to the log file only.

    Attributes:
        writer: Writes the checkpoints.
    """

    def __init__(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self.writer = BackgroundWriter()
        seed = (kwargs.get("randomness") or {}).get("seed") or 0
        loader = seeded_loader(train_dataloader, seed)
        super().__init__(*args, train_dataloader=loader, **kwargs)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger, and keep the start of a run off the terminal."""
        logger = super().build_logger(*args, **kwargs)
        self.terminal = _Terminal()
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(self.terminal)
        return logger

    def register_default_hooks(self, hooks: dict[str, Any] | None = None) -> None:
        """Register the hooks of a config, without those that it sets to None."""
        named = (hooks or {}).items()
        kept: Any = {name: hook for name, hook in named if hook or name in _STOCK_HOOKS}
        super().register_default_hooks(kept)

    def dump_config(self) -> None:
        """Write no config: ``write_config`` has, and knows which files it may replace."""

    def scale_lr(self, optim_wrapper: OptimWrapper, auto_scale_lr: dict | None = None) -> None:
        """Scale the learning rate with the images of an optimiser step, not of an iteration."""
        if (auto_scale_lr or {}).get("enable"):
            for group in optim_wrapper.param_groups:
                group["lr"] *= accumulation(self)
        super().scale_lr(optim_wrapper, auto_scale_lr)

    def build_train_loop(self, loop: Any) -> Any:
        """Build the loop of the training.

        Raises:
            InputError: If an epoch has no whole batch, and ``drop_last`` drops the others.
        """
        built = super().build_train_loop(loop)
        loader: Any = built.dataloader
        if getattr(loader, "drop_last", False) and not len(loader):
            number = len(loader.sampler)
            raise InputError(
                f"the batch size is {loader.batch_size}, but an epoch has {number} samples for "
                "each process, and train_dataloader.drop_last=True drops a smaller batch: give a "
                f"--batch-size of at most {number}, or set train_dataloader.drop_last=False"
            )
        return built

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What mmengine notes in each checkpoint; to format a config takes it seconds."""
        return {
            "cfg": self.cfg.pretty_text,
            "seed": self.seed,
            "experiment_name": self.experiment_name,
            "mmengine_version": mmengine.__version__ + get_git_hash(),
        }

    @master_only
    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: dict | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: dict | None = None,
        by_epoch: bool = True,
        backend_args: dict | None = None,
    ) -> None:
        """Write a checkpoint in the background; arguments and content are mmengine's."""
        progress = {"epoch": self.epoch + by_epoch, "iter": self.iter + (not by_epoch)}
        noted = {"time": time.strftime("%Y%m%d_%H%M%S"), **self._facts}
        dataset: Any = self.train_dataloader.dataset
        optimizer, schedulers = cast(Any, self.optim_wrapper), cast(Any, self.param_schedulers)
        checkpoint: dict[str, Any] = {
            "meta": {**progress, **(meta or {}), **noted, "dataset_meta": dataset.metainfo},
            "state_dict": unwrap(self.model).state_dict(),
            "message_hub": self.message_hub.state_dict(),
        }
        if save_optimizer:
            checkpoint["optimizer"] = optimizer.state_dict()
        if save_param_scheduler:
            checkpoint["param_schedulers"] = [each.state_dict() for each in schedulers or ()]
        self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
        path = join_path(out_dir, filename, backend_args=backend_args)
        self.writer.write(checkpoint, str(path), backend_args)


class _Terminal(logging.Filter):
    """Shows only warnings until everything is built, then everything except noise."""

    built = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(_NOISE):
            return False
        return self.built or record.levelno >= logging.WARNING


class _Built(Hook):
    """Lets the log reach the terminal once everything a config names is built."""

    priority = "VERY_HIGH"  # another hook may validate before training

    def before_run(self, runner) -> None:
        runner.terminal.built = True


def _end_workers(*loops: Any) -> None:
    """End the processes that load data, now that nothing needs them.

    They persist between epochs. In a garbage collection PyTorch cannot tell them to end, and waits
    for five seconds each; a later run in the same process would wait so long.
    """
    for loop in loops:
        if isinstance(loader := getattr(loop, "dataloader", None), DataLoader):
            loader._iterator = None


def run_training(cfg: Config) -> Runner:
    """Build what a config names, train, and return the runner."""
    secure_files()
    runner: Any = TrainingRunner.from_cfg(cfg)
    runner.register_hook(_Built())
    try:
        runner.train()
        _end_workers(runner.train_loop, runner.val_loop)
    finally:
        try:
            runner.writer.wait()  # another run may start when the lock is released
        finally:
            for hook in runner.hooks:
                if isinstance(hook, ExactCheckpointHook):
                    hook.release()
    return runner
