"""What an optimiser step of a run consists of."""

from typing import Any

from .mmengine_internals import accumulation


def samples_per_step(runner: Any) -> int:
    """Count the images or sequences of one optimiser step, over all processes."""
    return runner.train_dataloader.batch_size * runner.world_size * accumulation(runner)


def sample_noun(runner: Any) -> str:
    """Return what the training data consists of: ``images`` or ``sequences``."""
    return "sequences" if "context_length" in runner.train_dataloader.dataset.metainfo else "images"


def units_per_step(runner: Any) -> tuple[int, str]:
    """Count the images or tokens of one optimiser step; return also which, as a singular noun."""
    samples = samples_per_step(runner)
    length = runner.train_dataloader.dataset.metainfo.get("context_length")
    return (samples * length, "token") if length else (samples, "image")


def highest_rate(runner: Any) -> float:
    """Return the highest learning rate of all groups of parameters, before any schedule."""
    return max(group.get("initial_lr", group["lr"]) for group in runner.optim_wrapper.param_groups)
