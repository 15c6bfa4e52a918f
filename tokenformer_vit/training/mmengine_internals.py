"""Every private name of mmengine and mmpretrain that this package relies on.

mmengine may change these names in any release. ``tests/training/test_mmengine_internals.py`` checks
each against the installed version, so an upgrade fails there first and says which name is gone.

:func:`tokenformer_vit.training.storage.secure_files` replaces parts of mmengine.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mmengine.dataset import BaseDataset
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.model import BaseDataPreprocessor
from mmengine.optim import OptimWrapper
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler
from mmengine.runner import CheckpointLoader, EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from mmpretrain.datasets.transforms import ColorJitter
from mmpretrain.models.heads import ClsHead
from mmpretrain.models.peft import LoRAModel


class Internal(NamedTuple):
    """A private name.

    Args:
        owner: Class that has it.
        name: The name.
        why: Why this package needs it.
        parameters: Names of a method's parameters; None for an attribute.
    """

    owner: type
    name: str
    why: str
    parameters: tuple[str, ...] | None = None


INTERNALS = (
    # Read or written through a function of this module.
    Internal(Runner, "_resume", "Whether the run resumes; there is no public property."),
    Internal(OptimWrapper, "_accumulative_counts", "Batches of one optimiser step."),
    Internal(_ParamScheduler, "_last_value", "Growth adds groups of parameters to a schedule."),
    Internal(CheckpointLoader, "_schemes", "Lists the prefixes whose loaders unpickle."),
    # Used by a subclass of its owner.
    Internal(
        BaseDataPreprocessor, "_non_blocking", "mmpretrain's preprocessor has no argument for it."
    ),
    Internal(BaseDataset, "_metainfo", "Class names are known when the data set is opened."),
    Internal(EpochBasedTrainLoop, "_iter", "The loop starts in the middle of an epoch."),
    Internal(EpochBasedTrainLoop, "_epoch", "The loop counts the epochs itself."),
    Internal(IterBasedTrainLoop, "_iter", "The loop counts optimiser steps."),
    Internal(IterBasedTrainLoop, "_max_iters", "The length of the run."),
    Internal(
        IterBasedTrainLoop,
        "_decide_current_val_interval",
        "Applies the config's dynamic validation intervals.",
        ("self",),
    ),
    Internal(
        ColorJitter,
        "_rand_params",
        "A faster transform draws the same numbers.",
        ("self",),
    ),
    # Overridden by a subclass of its owner.
    Internal(EMAHook, "_swap_ema_parameters", "mmengine always validates the average.", ("self",)),
    Internal(
        EMAHook,
        "_swap_ema_state_dict",
        "mmengine always saves the average as the model.",
        ("self", "checkpoint"),
    ),
    Internal(
        CheckpointHook,
        "_save_checkpoint_with_step",
        "mmengine deletes the old checkpoint before the new one is on the disk.",
        ("self", "runner", "step", "meta"),
    ),
    Internal(
        ClsHead,
        "_get_loss",
        "Computes the loss of scores; `loss` would need features.",
        ("self", "cls_score", "data_samples", "kwargs"),
    ),
    Internal(
        LoRAModel,
        "_register_state_dict_hooks",
        "mmpretrain removes all but LoRA's weights from the state dict.",
        ("self",),
    ),
)


def is_resuming(runner: Any) -> bool:
    """Tell whether a runner resumes a run, rather than starting from weights or from scratch."""
    return runner._resume


def accumulation(runner: Any) -> int:
    """Return the number of batches that make one optimiser step."""
    return runner.optim_wrapper._accumulative_counts


def set_last_values(scheduler: Any, values: Sequence[float]) -> None:
    """Set the present values of a schedule, one for each group of parameters."""
    scheduler._last_value = list(values)


def checkpoint_schemes() -> dict[str, Callable[..., Any]]:
    """Return mmengine's loader for each prefix of a checkpoint address, such as ``https://``."""
    return dict(CheckpointLoader._schemes)
