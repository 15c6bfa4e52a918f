"""Checks that stop a run early, with a one-line error; mmengine would continue or fail later."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import all_reduce
from mmengine.hooks import EMAHook, Hook, LoggerHook, RuntimeInfoHook
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import check_computation, description_of, model_faults

from .distributed import unwrap
from .mmengine_internals import is_resuming
from .models.backbone import num_classes
from .models.distillation import DistilledClassifier
from .steps import samples_per_step
from .storage import secure_files


@HOOKS.register_module()
class GuardHook(Hook):
    """Stop on data that do not fit the head, weights of another model, or an infinite loss.

    The loss that is checked and logged is the mean over all processes. The loss of one process
    would show a part of the batch, and one process could stop without the others.

    Losses, and the norms of clipped gradients, stay on the GPU until the logger needs them, because
    reading one lets the GPU run idle. They are also read before every validation and checkpoint:
    weights that diverged are never saved.
    """

    priority = 5  # after GrowthHook, and before mmengine's hooks use the loss
    unit = "images"  # what a batch consists of

    _classes: list[str] | None = None  # of the checkpoint that is resumed or tested

    def __init__(self) -> None:
        secure_files()
        # Iteration, learning rate and values.
        self._unread: list[tuple[int, float, dict[str, Tensor]]] = []
        self._norms: dict[str, Tensor] = {}  # of this iteration's gradients, where they are clipped

    def before_train(self, runner) -> None:
        """Check the hooks, the size of a batch, and the data."""
        averages = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
        if len(averages) > 1:  # each exchanges the model in training for its own average, and back
            raise InputError(
                f"the run has {len(averages)} hooks that average its weights "
                f"({', '.join(type(hook).__name__ for hook in averages)}), and after a validation "
                "one of the averages would be trained: keep one, in default_hooks.ema, or set "
                "default_hooks.ema=None"
            )
        # mmpretrain's hook; what the run would measure is not what its checkpoints would hold.
        if not all(getattr(hook, "evaluate_on_ema", True) for hook in averages):
            raise InputError(
                "EMAHook with evaluate_on_ema=False validates the model itself, but its "
                "checkpoints and the exported model are the average: set "
                "default_hooks.ema=dict(type='AccumulationEMAHook', validated=False)"
            )
        self._first = runner.iter
        self._leave_on_device(runner)
        scale = runner.auto_scale_lr or {}
        number = samples_per_step(runner)
        if not scale.get("enable") and number != scale.get("base_batch_size", number):
            runner.logger.warning(
                f"An optimiser step takes {number} {self.unit}, but the learning rate is for "
                f"{scale['base_batch_size']}: accumulate gradients (`--cfg-options "
                "optim_wrapper.accumulative_counts=...`), or add --auto-scale-lr if the recipe "
                "scales its rate."
            )
        self.check_training(runner)

    def check_training(self, runner) -> None:
        """Check that training and validation data have the classes of the head and the teacher."""
        dataset, model = runner.train_dataloader.dataset, unwrap(runner.model)
        check_dataset(dataset, "train", model)
        if isinstance(model, DistilledClassifier):
            check_same_classes("teacher", model.teacher.classes, dataset)
            runner.message_hub.update_info("teacher", model.distillation["teacher"])
        if runner.val_loop is not None:
            check_dataset(runner.val_dataloader.dataset, "val", model)
            train, val = (
                loader.dataset.metainfo.get("classes")
                for loader in (runner.train_dataloader, runner.val_dataloader)
            )
            if is_resuming(runner):
                check_same_classes("checkpoint", self._classes, dataset)
            if num_classes(model) and train != val:  # MAE may have labels in one of them
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
        check_same_classes("checkpoint", self._classes, runner.test_dataloader.dataset)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Refuse weights of another model; mmengine would load the tensors that fit."""
        check_weights(unwrap(runner.model), checkpoint)
        self._classes = classes_of(checkpoint)

    def _leave_on_device(self, runner) -> None:
        """Replace what reads losses and norms in each iteration, and so waits for the GPU.

        Learning rates are logged with the losses, too, because a longer history takes longer.
        """

        def count(runner, *args: Any, **kwargs: Any) -> None:
            runner.message_hub.update_info("iter", runner.iter)

        for hook in runner.hooks:
            if isinstance(hook, RuntimeInfoHook):
                hook.before_train_iter = count
                hook.after_train_iter = lambda *args, **kwargs: None
        wrapper = runner.optim_wrapper
        if not wrapper.clip_grad_kwargs:
            return
        clip = wrapper.clip_func

        def clip_gradients(*args: Any, **kwargs: Any) -> None:
            norm = clip(*args, **kwargs)
            if norm is not None:  # clip_grad_value_ returns None
                self._norms[wrapper.grad_name] = norm

        wrapper.clip_func = clip_gradients

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Keep the losses, or read them if it is time."""
        values = {name: value.detach() for name, value in (outputs or {}).items()}
        self._unread.append((runner.iter + 1, _learning_rate(runner), {**self._norms, **values}))
        self._norms.clear()
        if runner.iter == self._first or losses_are_due(runner, batch_idx):
            for name, rates in runner.optim_wrapper.get_lr().items():
                runner.message_hub.update_scalar(f"train/{name}", rates[0])
            self.read_losses(runner)

    def after_train_epoch(self, runner) -> None:
        """Read the last losses of a run that counts iterations."""
        self.read_losses(runner)

    def before_val(self, runner) -> None:
        """Stop rather than validate a model that diverged; it could be saved as the best."""
        check_finite(runner)

    def read_losses(self, runner) -> None:
        """Log the losses since the last time, averaged over the processes.

        All processes must call this at the same iteration.

        Raises:
            InputError: If a loss is not finite; the message gives its iteration.
        """
        unread, self._unread = self._unread, []
        tensors = [tensor for *_, values in unread for tensor in values.values()]
        if not tensors:
            return
        stacked = torch.stack(tensors)
        all_reduce(stacked, op="mean")
        numbers = iter(stacked.tolist())
        found: dict[str, list[float]] = {}
        for iteration, lr, values in unread:
            for name in values:
                number = next(numbers)
                found.setdefault(f"train/{name}", []).append(number)
                if name == "loss" and not math.isfinite(number):
                    raise diverged(runner, f"the loss is {number}", iteration, lr)
        for name, column in found.items():
            _log(runner.message_hub, name, column)


def _log(hub: MessageHub, name: str, numbers: Sequence[float]) -> None:
    """Add numbers to a history at once; mmengine would copy the history for each of them."""
    hub.update_scalar(name, numbers[0])
    log, counts = hub.get_scalar(name).data
    ones = np.ones(len(numbers) - 1, counts.dtype)
    longer: Any = np.append(log, numbers[1:]), np.append(counts, ones)
    hub.log_scalars[name] = HistoryBuffer(*longer)


def losses_are_due(runner: Any, batch_idx: int) -> bool:
    """Tell whether the losses are read after an iteration.

    They are when the logger needs them, at the end of an epoch, and after every 100 iterations.
    """
    intervals = {hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)} | {100}
    done = batch_idx + 1
    return done == len(runner.train_dataloader) or any(done % n == 0 for n in intervals)


def classes_of(checkpoint: Mapping[str, Any]) -> list[str] | None:
    """Return the class names of a checkpoint, or None if it has none."""
    found: Any = checkpoint
    for key in ("meta", "dataset_meta", "classes"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return [str(name) for name in found] if isinstance(found, list | tuple) and found else None


def check_finite(runner) -> None:
    """Check losses and weights before the weights are saved.

    Raises:
        InputError: If a loss or a weight is not finite.
    """
    for hook in runner.hooks:
        if isinstance(hook, GuardHook):
            hook.read_losses(runner)
    # A finite loss can have an infinite gradient, and infinite weights after the next step.
    finite = torch.stack([tensor.isfinite().all() for tensor in runner.model.parameters()])
    if not finite.all():
        lr = _learning_rate(runner)
        raise diverged(runner, "the weights are not finite", runner.iter + 1, lr)


def _learning_rate(runner) -> float:
    return runner.optim_wrapper.get_lr()["lr"][0]


def diverged(runner, what: str, iteration: int, lr: float) -> InputError:
    """Make the error for a training that diverged.

    Args:
        runner: The runner; the message gives its last checkpoint.
        what: Name of what is not finite.
        iteration: Number of the iteration, from 1 on.
        lr: Learning rate of the iteration.
    """
    last = runner.message_hub.runtime_info.get("last_ckpt")
    kept = f"the last good checkpoint is kept: {last}" if last else "no checkpoint was written yet"
    start = f"from its weights, `--cfg-options load_from={last}`, " if last else ""
    epoch = (
        "" if isinstance(runner.train_loop, IterBasedTrainLoop) else f"epoch {runner.epoch + 1}, "
    )
    return InputError(
        f"{what} at iteration {iteration} ({epoch}learning rate "
        f"{lr:.3g}); {kept}. Start again {start}in another --work-dir, with a lower learning rate "
        "(`optim_wrapper.optimizer.lr=...`), a longer warm-up, or without --amp"
    )


def check_dataset(dataset: Any, split: str, model: Any) -> None:
    """Check that a data set has as many classes as the head, if any.

    Raises:
        InputError: If it does not; the message gives both numbers.
    """
    classes = dataset.metainfo.get("classes") or ()
    heads = {
        "model.head.num_classes": getattr(model.head, "num_classes", None),  # MAE's has none
        "data_preprocessor.num_classes": getattr(model.data_preprocessor, "num_classes", None),
    }
    for name, number in heads.items():
        if number is not None and number != len(classes):
            raise InputError(
                f"the {split} data have {len(classes)} classes, but "
                f"{name} is {number}: set `--cfg-options "
                + " ".join(f"{key}={len(classes)}" for key in heads)
                + "`, or give another --data-root"
            )


def check_same_classes(owner: str, classes: Sequence[str] | None, dataset: Any) -> None:
    """Check that labels mean the same classes in data as in the training of a model.

    Args:
        owner: Name of the model, for the message.
        classes: Names of the classes of the model, in order; None if they are unknown.
        dataset: The data.

    Raises:
        InputError: If a class differs; the message gives the first one.
    """
    own = list(dataset.metainfo.get("classes") or ())
    if classes and list(classes) != own:
        index, (there, here) = next(
            (index, pair)
            for index, pair in enumerate(zip_longest(classes, own))
            if pair[0] != pair[1]
        )
        raise InputError(
            f"the {owner} was trained on other classes: label {index} is {there!r} there and "
            f"{here!r} in these data; use data with the classes of the {owner}"
        )


def check_weights(model: nn.Module, checkpoint: dict) -> None:
    """Check that a checkpoint holds exactly the tensors of ``model``, trained for its arguments.

    Raises:
        InputError: If a tensor is missing, unknown or of another shape; the message gives the
            first three. Also if the checkpoint names another Θ or number of heads.
    """
    state_dict = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else {}
    if not state_dict or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise InputError("the checkpoint holds no state dict: save `model.state_dict()`")
    loaded = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    if faults := model_faults(model.state_dict(), loaded):
        raise InputError(
            f"the checkpoint is of another model: {faults}. Use the config of its training"
        )
    source, meta = Path("the checkpoint"), checkpoint.get("meta")
    named = meta.get("computation") if isinstance(meta, dict) else None
    described = description_of(source, checkpoint).get("model_args")
    check_computation(model, described or named or {}, source)
