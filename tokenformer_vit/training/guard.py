"""Checks that stop a run early, with a one-line error; mmengine would continue or fail later."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.segments import fuse_state_dict
from tokenformer_vit.models.checkpoints import model_faults

from .mmengine_internals import accumulation, is_resuming
from .storage import secure_files


@HOOKS.register_module()
class GuardHook(Hook):
    """Stop on data that do not fit the head, weights of another model, or an infinite loss.

    The loss that is checked and logged is the mean over all processes. The loss of one process
    would show a part of the batch, and one process could stop without the others.
    """

    priority = 5  # after GrowthHook, and before mmengine's own hooks log the loss
    unit = "images"  # what a batch consists of

    _classes: list[str] | None = None  # of the checkpoint that is resumed or tested

    def __init__(self) -> None:
        secure_files()

    def before_train(self, runner) -> None:
        """Check the size of a batch, and the data."""
        scale = runner.auto_scale_lr or {}
        number = runner.train_dataloader.batch_size * runner.world_size * accumulation(runner)
        if not scale.get("enable") and number != scale.get("base_batch_size", number):
            runner.logger.warning(
                f"An optimiser step takes {number} {self.unit}, but the learning rate is for "
                f"{scale['base_batch_size']}: add --auto-scale-lr, or accumulate gradients "
                "(`--cfg-options optim_wrapper.accumulative_counts=...`)."
            )
        self.check_training(runner)

    def check_training(self, runner) -> None:
        """Check that training and validation data have the classes of the head."""
        check_dataset(runner.train_dataloader.dataset, "train", unwrap(runner.model))
        if runner.val_loop is not None:
            check_dataset(runner.val_dataloader.dataset, "val", unwrap(runner.model))
            train, val = (
                loader.dataset.metainfo.get("classes")
                for loader in (runner.train_dataloader, runner.val_dataloader)
            )
            if is_resuming(runner):
                self._check_classes(runner.train_dataloader.dataset)
            if train != val:
                odd = sorted(set(train) ^ set(val)) or ["their order"]
                raise InputError(
                    f"the classes of train and val differ in {', '.join(odd[:5])}: give both the "
                    "same classes"
                )

    def before_test(self, runner) -> None:
        """Check the data."""
        self.check_testing(runner)

    def check_testing(self, runner) -> None:
        """Check that the test data have the classes of the head."""
        check_dataset(runner.test_dataloader.dataset, "test", unwrap(runner.model))
        self._check_classes(runner.test_dataloader.dataset)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Refuse weights of another model; mmengine would load the tensors that fit."""
        check_weights(unwrap(runner.model), checkpoint)
        self._classes = classes_of(checkpoint)

    def _check_classes(self, dataset: Any) -> None:
        """Refuse data whose labels mean other classes than in training."""
        own = list(dataset.metainfo.get("classes") or ())
        if self._classes and list(self._classes) != own:
            index, (there, here) = next(
                (index, pair)
                for index, pair in enumerate(zip_longest(self._classes, own))
                if pair[0] != pair[1]
            )
            raise InputError(
                f"the checkpoint was trained on other classes: label {index} is {there!r} there "
                f"and {here!r} in these data; use data with the classes of the training"
            )

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Average the loss over the processes, and stop if it is not finite."""
        if not outputs:
            return
        for name, value in outputs.items():
            outputs[name] = value.detach().clone()
            all_reduce(outputs[name], op="mean")
        loss = float(outputs["loss"])
        if not math.isfinite(loss):
            raise diverged(runner, f"the loss is {loss}")


def classes_of(checkpoint: Mapping[str, Any]) -> list[str] | None:
    """Return the class names of a checkpoint, or None if it has none."""
    found: Any = checkpoint
    for key in ("meta", "dataset_meta", "classes"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return [str(name) for name in found] if isinstance(found, list | tuple) and found else None


def unwrap(model: nn.Module) -> Any:
    """Return the model inside a data-parallel wrapper, or the model itself."""
    return model.module if is_model_wrapper(model) else model


def diverged(runner, what: str) -> InputError:
    """Make the error for a training that diverged.

    Args:
        runner: The runner; the message gives its iteration, learning rate and last checkpoint.
        what: Name of what is not finite.
    """
    lr = runner.optim_wrapper.get_lr()["lr"][0]
    last = runner.message_hub.runtime_info.get("last_ckpt")
    kept = f"the last good checkpoint is kept: {last}" if last else "no checkpoint was written yet"
    start = f"from its weights, `--cfg-options load_from={last}`, " if last else ""
    epoch = (
        "" if isinstance(runner.train_loop, IterBasedTrainLoop) else f"epoch {runner.epoch + 1}, "
    )
    return InputError(
        f"{what} at iteration {runner.iter + 1} ({epoch}learning rate "
        f"{lr:.3g}); {kept}. Start again {start}in another --work-dir, with a lower learning rate "
        "(`optim_wrapper.optimizer.lr=...`), a longer warm-up, or without --amp"
    )


def check_dataset(dataset: Any, split: str, model: Any) -> None:
    """Check that a data set has as many classes as the head, and images of each.

    Raises:
        InputError: If it does not; the message gives both numbers, or the empty classes.
    """
    classes = dataset.metainfo.get("classes") or ()
    heads = {
        "model.head.num_classes": model.head.num_classes,
        "data_preprocessor.num_classes": model.data_preprocessor.num_classes,
    }
    for name, number in heads.items():
        if number is not None and number != len(classes):
            raise InputError(
                f"the {split} data have {len(classes)} classes, but "
                f"{name} is {number}: set `--cfg-options "
                + " ".join(f"{key}={len(classes)}" for key in heads)
                + "`, or give another --data-root"
            )
    if not hasattr(dataset, "get_gt_labels"):
        return  # a wrapper; mmpretrain has scanned its data set
    counts = Counter(dataset.get_gt_labels().tolist())
    empty = [name for index, name in enumerate(classes) if not counts[index]]
    if empty:
        raise InputError(
            f"there are no images in {len(empty)} classes of {dataset.img_prefix}: "
            f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}; fill or remove them"
        )


def check_weights(model: nn.Module, checkpoint: dict) -> None:
    """Check that a checkpoint holds exactly the tensors of ``model``.

    Raises:
        InputError: If a tensor is missing, unknown or of another shape; the message gives the
            first three.
    """
    state_dict = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else {}
    if not state_dict or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise InputError("the checkpoint holds no state dict: save `model.state_dict()`")
    loaded = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    own, loaded = fuse_state_dict(model.state_dict()), fuse_state_dict(loaded)
    faults = model_faults(own, loaded)
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError(
            f"the checkpoint is of another model: {'; '.join(faults[:3])}{more}. Use the config of "
            "its training"
        )
