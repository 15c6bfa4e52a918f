"""Checks and losses of a run.

Losses stay on the GPU until the logger needs them: reading one in each step lets the GPU run idle.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.pattention import join_state_dict
from tokenformer_vit.models.checkpoints import check_computation, description_of, model_faults
from tokenformer_vit.vision.datasets import folder_names

from .data.sampler import Seeded
from .engine import HOOKS, Hook, RuntimeInfoHook, all_reduce
from .loop import by_iteration
from .models.backbone import num_classes, unwrap
from .models.distillation import DistilledClassifier, DistilledHead
from .optim import averaging_hooks


def check_run(runner: Any, classes: Sequence[str] | None = None) -> None:
    """Check what would give wrong numbers; ``classes`` are those of a resumed checkpoint."""
    loader = runner.train_dataloader
    if not len(loader):
        raise InputError(
            f"an epoch has {len(loader.sampler)} samples for each process, fewer than a batch of "
            f"{loader.batch_size}: give a smaller --batch-size"
        )
    averages = averaging_hooks(runner)
    if len(averages) > 1:  # each exchanges the model in training for its own average, and back
        raise InputError("several hooks average the weights: keep one, in default_hooks.ema")
    if not all(getattr(hook, "evaluate_on_ema", True) for hook in averages):
        raise InputError(
            "EMAHook with evaluate_on_ema=False measures the model, but its checkpoints are the "
            "average: set default_hooks.ema=dict(type='AccumulationEMAHook', validated=False)"
        )
    model = unwrap(runner.model)
    check_dataset(loader.dataset, "train", model)
    if runner.val_loop is not None:
        dataset = runner.val_dataloader.dataset
        check_dataset(dataset, "val", model)
        if num_classes(model):  # a masked autoencoder may have labels in one of them
            check_same_classes("val set", dataset.metainfo.get("classes"), loader.dataset)
    if num_classes(model):
        check_same_classes("checkpoint", classes, loader.dataset)
        tokens = getattr(model.backbone, "has_distillation_token", False)
        if tokens and not isinstance(model.head, DistilledHead):
            raise InputError(
                "the model has a distillation token, which alone would reach this head: set "
                "model.head.type='DistilledHead'"
            )
    if isinstance(model, DistilledClassifier):
        check_same_classes("teacher", model.teacher.classes, loader.dataset)
        runner.message_hub.update_info("teacher", model.distillation["teacher"])  # for the record


def check_dataset(dataset: Any, split: str, model: Any) -> None:
    """Check that a data set has as many classes as the head, if any."""
    classes = dataset.metainfo.get("classes") or ()
    heads = {
        "model.head.num_classes": num_classes(model) or None,  # a masked autoencoder has none
        "data_preprocessor.num_classes": getattr(model.data_preprocessor, "num_classes", None),
    }
    for name, number in heads.items():
        if number is not None and number != len(classes):
            raise InputError(
                f"the {split} data have {len(classes)} classes, but {name} is {number}: set "
                f"`--cfg-options {' '.join(f'{key}={len(classes)}' for key in heads)}`, or give "
                "another --data-root"
            )


def check_same_classes(owner: str, classes: Sequence[str] | None, dataset: Any) -> None:
    """Check that labels mean the same classes in data as in a model; None if unknown there."""
    # Folders that prepare-data made are the classes of the data that it unpacked.
    known, own = (folder_names(each or ()) for each in (classes, dataset.metainfo.get("classes")))
    if known and known != own:
        pairs = enumerate(zip_longest(known, own))
        index, (there, here) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise InputError(
            f"the {owner} has other classes than these data: label {index} is {there!r} there and "
            f"{here!r} here; use data with the same classes"
        )


def check_weights(model: nn.Module, checkpoint: dict, resumes: bool = False) -> None:
    """Check that a checkpoint has exactly the tensors of a model, trained for its arguments.

    If a run ``resumes`` from it, the average of the weights also has the types of the model.
    """
    weights = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else {}
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError("the checkpoint holds no state dict: save `model.state_dict()`")
    wanted = model.state_dict()
    found = {"checkpoint": {name.removeprefix("module."): t for name, t in weights.items()}}
    if resumes and "ema_state_dict" in checkpoint:
        saved = {n: t for n, t in checkpoint["ema_state_dict"].items() if n != "steps"}
        found["average in the checkpoint"] = {
            n.removeprefix("module."): t for n, t in saved.items()
        }
    for owner, loaded in found.items():
        if faults := model_faults(join_state_dict(wanted), join_state_dict(loaded)):
            raise InputError(f"the {owner} is of another model: {faults}. Use its config")
        if resumes and any(loaded[name].dtype != each.dtype for name, each in wanted.items()):
            raise InputError(f"the {owner} has other types than the model: resume another one")
    source, meta = Path("the checkpoint"), checkpoint.get("meta") or {}
    described = description_of(source, checkpoint).get("model_args")
    check_computation(model, described or meta.get("computation") or {}, source)


def check_finite(runner: Any, iteration: int | None = None) -> None:
    """Check weights and average after an iteration, before they are saved, validated or grown."""
    # A finite loss can have an infinite gradient, and infinite weights after the next step.
    models = [runner.model, *(hook.ema_model for hook in averaging_hooks(runner))]
    tensors = [tensor for model in models for tensor in model.parameters()]
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        raise diverged(runner, "the weights are not finite", iteration or runner.iter)


def diverged(runner: Any, what: str, iteration: int) -> InputError:
    """Make the error for a training that diverged at an iteration, counted from 1."""
    number = (iteration - 1) // len(runner.train_dataloader) + 1
    epoch = "" if by_iteration(runner) else f", epoch {number}"
    rate = runner.optim_wrapper.get_lr()["lr"][0]
    last = runner.message_hub.runtime_info.get("last_ckpt") or "not written yet"
    return InputError(
        f"{what} at iteration {iteration}{epoch}, learning rate {rate:.3g}; the last good "
        f"checkpoint is {last}. Resume with a lower rate (`--cfg-options "
        "optim_wrapper.optimizer.lr=...`), or start again with a longer warm-up or without --amp"
    )


@HOOKS.register_module()
class GuardHook(Hook):
    """Stop on data that do not fit the head, weights of another model, or infinite weights."""

    priority = 5  # after GrowthHook
    _classes: list[str] | None = None  # of the checkpoint that is resumed or tested

    def before_train(self, runner) -> None:
        """Check that all parts of the run fit each other."""
        check_run(runner, self._classes if runner.cfg.resume else None)

    def before_test(self, runner) -> None:
        """Check that the test data have the classes of the head."""
        dataset = runner.test_dataloader.dataset
        check_dataset(dataset, "test", unwrap(runner.model))
        check_same_classes("checkpoint", self._classes, dataset)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Refuse weights of another model."""
        check_weights(unwrap(runner.model), checkpoint, runner.cfg.resume)
        self._classes = ((checkpoint.get("meta") or {}).get("dataset_meta") or {}).get("classes")

    def before_val(self, runner) -> None:
        """Stop rather than validate a model that diverged; it could be saved as the best."""
        check_finite(runner)


def losses_are_due(runner: Any, batch_idx: int) -> bool:
    """Tell whether the losses are read: for the logger, each 100 iterations, and after an epoch."""
    logger = runner.cfg.default_hooks.get("logger") or {}
    done = batch_idx + 1
    due = done % logger.get("interval", 100) == 0 or done % 100 == 0
    return due or done == len(runner.train_dataloader)


@HOOKS.register_module()
class LazyRuntimeInfoHook(RuntimeInfoHook):
    """mmengine's ``RuntimeInfoHook``, which reads the losses when the logger needs them.

    They are means over all processes, so none stops without the others at one that is not finite.
    """

    def before_run(self, runner) -> None:
        """Note the seed of the first process, from which data and nested models draw everywhere."""
        super().before_run(runner)
        by_rank = (runner.cfg.get("randomness") or {}).get("diff_rank_seed", False)
        seed = runner.seed - (runner.rank if by_rank else 0)
        runner.message_hub.update_info("seed", seed)
        if isinstance(dataset := runner.train_dataloader.dataset, Seeded):
            dataset.seed = seed

    def before_train(self, runner) -> None:
        """Begin with nothing to read."""
        super().before_train(runner)
        self._first = runner.iter
        self._unread: list[tuple[int, dict[str, Tensor]]] = []

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Count the iterations."""
        runner.message_hub.update_info("iter", runner.iter)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Keep the losses, or read them if it is time."""
        norms = getattr(runner.optim_wrapper, "norms", {})
        values = {name: value.detach() for name, value in {**norms, **(outputs or {})}.items()}
        norms.clear()
        self._unread.append((runner.iter + 1, values))
        if runner.iter == self._first or losses_are_due(runner, batch_idx):
            for name, rates in runner.optim_wrapper.get_lr().items():
                runner.message_hub.update_scalar(f"train/{name}", rates[0])
            self.read_losses(runner)

    def after_train_epoch(self, runner) -> None:
        """Read the last losses of a run that counts iterations."""
        self.read_losses(runner)

    def read_losses(self, runner) -> None:
        """Log and check the losses since the last time, in all processes at the same iteration."""
        unread, self._unread = self._unread, []
        tensors = [tensor for _, values in unread for tensor in values.values()]
        if not tensors:
            return
        stacked = torch.stack(tensors)
        all_reduce(stacked, op="mean")
        numbers = iter(stacked.tolist())
        for iteration, values in unread:
            for name in values:
                number = next(numbers)
                runner.message_hub.update_scalar(f"train/{name}", number)
                if name == "loss" and not math.isfinite(number):
                    raise diverged(runner, f"the loss is {number}", iteration)
