"""Growth during a run, and the cost of the training so far."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.layers.pattention import join_state_dict
from tokenformer_vit.models.compilation import BLOCKS
from tokenformer_vit.models.sizes import at_size

from ..engine import HOOKS, Hook, is_model_wrapper
from ..hooks import check_finite, losses_are_due
from ..loop import by_iteration
from ..optim import align_schedulers, averaging_hooks
from .backbone import unwrap
from .nested import NestedTraining

_UNITS = {"epoch", "iteration"}


@HOOKS.register_module()
class GrowthHook(Hook):
    """Enlarge the model at given times of a run, with its average, optimiser and schedules.

    The config describes the model at the start. A resumed run, and a test of a checkpoint, first
    grow to the size of the checkpoint.

    Args:
        schedule: Sizes from a given time on, as ``[dict(epoch=100, num_ffn_param_tokens=1536)]``:
            the ``epoch`` or ``iteration`` finished by then, and numbers of pairs.
        new_warmup_iters: Iterations in which the rate of the newest pairs rises to its value.
        train_head: Whether the classifier is trained although ``freeze`` is given.
        **how: Other arguments of :func:`tokenformer_vit.growth.grow`.
    """

    priority = "HIGHEST"  # before the hooks that check a checkpoint against the model

    def __init__(
        self,
        schedule: Sequence[Mapping[str, Any]],
        new_warmup_iters: int = 0,
        train_head: bool = True,
        **how: Any,
    ) -> None:
        self.schedule = [dict(event) for event in schedule]
        self.done = 0  # growths so far
        self.how = {"new_lr_scale": 1.0, **how} if new_warmup_iters else how
        self._warmup_iters = new_warmup_iters
        self._train_head = train_head
        self._rates: list[tuple[dict[str, Any], float]] = []  # groups that warm up; their own rates

    def before_train(self, runner) -> None:
        """Check that every growth of the schedule happens, and try all on a copy."""
        units = {"iteration"} if by_iteration(runner) else _UNITS
        if not self.schedule or any(len(units & event.keys()) != 1 for event in self.schedule):
            raise InputError(f"each entry of GrowthHook.schedule needs {' or '.join(units)}")
        times = [self._start(runner, event) for event in self.schedule]
        room = min(after - before for before, after in pairwise([*times, runner.max_iters]))
        if room < 1:
            raise InputError(
                f"GrowthHook grows before iterations {times} of {runner.max_iters}, which leaves "
                f"{room} iterations after one of them: correct its schedule, or train_cfg"
            )
        if getattr(unwrap(runner.model), "sandwich", False):
            raise InputError("a model that trains several sizes grows by `tokenformer-vit grow`")
        trial = deepcopy(unwrap(runner.model))
        for event in self.schedule[self.done :]:  # a wrong size or name ends the run now
            self.grow_model(trial, _sizes(event), 0, None)

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Grow, if a growth is due, and warm up the rate of new pairs."""
        coming = self.schedule[self.done :]
        for event in [each for each in coming if self._start(runner, each) <= runner.iter]:
            check_finite(runner)  # growth would hide which iteration diverged
            self._grow(runner, runner.optim_wrapper.optimizer)
            _rewrap(runner)
            grown = {"iteration": runner.iter, "parameters": _count(runner.model), **event}
            history = runner.message_hub.runtime_info.get("growth") or []
            runner.message_hub.update_info("growth", [*history, grown])
            when = f"iteration {runner.iter + 1} (epoch {runner.epoch + 1})"
            runner.logger.info(f"The model grew before {when}: {grown}")
        if not self.done:
            return
        since = runner.iter - self._start(runner, self.schedule[self.done - 1])
        if since < self._warmup_iters:
            model, optimizer = unwrap(runner.model), runner.optim_wrapper.optimizer
            new = {part for name, part in model.named_parameters() if ".new_" in name}
            groups = [group for group in optimizer.param_groups if new >= {*group["params"]}]
            self._rates = [(group, group["lr"]) for group in groups]
            for group, rate in self._rates:
                group["lr"] = rate * (since + 1) / (self._warmup_iters + 1)

    def after_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Give the groups that warm up their own rate again, which schedules compute with."""
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Grow to the size of the checkpoint, before its weights are loaded."""
        loaded = checkpoint["state_dict"]
        optimizer = getattr(runner.optim_wrapper, "optimizer", None)
        if not isinstance(optimizer, Optimizer):
            optimizer = None  # a test has none, or only its config
        started = self.done
        while self.done < len(self.schedule) and not _fits(runner.model, loaded):
            self._grow(runner, optimizer)
        if self.done > started:
            runner.logger.info(f"The checkpoint has the size after growth {self.done}.")
            _rewrap(runner)

    def grow_model(
        self, model: nn.Module, sizes: dict[str, Any], seed: int, optimizer: Optimizer | None
    ) -> None:
        """Grow the model in training with its optimiser, or the average, which has none."""
        grow(model, **sizes, **self.how, optimizer=optimizer, seed=seed)

    def _start(self, runner, event: Mapping[str, int]) -> int:
        """Return the iteration before which a growth is due."""
        if "iteration" in event:
            return event["iteration"]
        return event["epoch"] * len(runner.train_dataloader)

    def _grow(self, runner, optimizer: Optimizer | None) -> None:
        model, sizes = unwrap(runner.model), _sizes(self.schedule[self.done])
        # The same on all processes, unlike runner.seed.
        seed = runner.message_hub.runtime_info.get("seed") or 0
        self.grow_model(model, sizes, seed, optimizer)
        if self.how.get("freeze") and self._train_head and hasattr(model, "head"):
            model.head.requires_grad_()  # a language model keeps its frozen head
        for average in (hook.ema_model for hook in averaging_hooks(runner)):
            self.grow_model(average.module, sizes, seed, None)
            average.module.requires_grad_(False)
            parameters = dict(average.module.named_parameters())
            buffers_too = average.update_buffers
            average.avg_parameters = average.module.state_dict() if buffers_too else parameters
        if optimizer is not None:
            align_schedulers(runner)
        self.done += 1


def _sizes(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of an entry of a schedule."""
    return {key: value for key, value in event.items() if key not in _UNITS}


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _fits(model: nn.Module, loaded: Mapping[str, Tensor]) -> bool:
    """Tell whether the blocks have the shapes of the model's; growth does not change a head."""
    own, there = (
        {name: own.shape for name, own in tensors.items() if {*BLOCKS} & {*name.split(".")}}
        for tensors in map(join_state_dict, (unwrap(model).state_dict(), loaded))
    )
    return own == there


def _rewrap(runner) -> None:
    """Wrap the grown model again, and drop code that was compiled for the old shapes."""
    # Otherwise PyTorch compiles for variable sizes from the second shape on, which is slower.
    torch.compiler.reset()
    if is_model_wrapper(runner.model):
        runner.model = runner.wrap_model(runner.cfg.get("model_wrapper_cfg"), unwrap(runner.model))


@HOOKS.register_module()
class CostHook(Hook):
    """Log the cost of the training so far, with the loss and with every validation.

    ``parameters`` is the present number; ``flops`` the sum over all images or sequences so far,
    forward and backward, at the sizes that were computed, without the predictions of a teacher.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, float | None], int] = {}  # FLOPs of an example

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs=None
    ) -> None:
        """Add the cost of this iteration."""
        spent, model = runner.message_hub.runtime_info.get("flops") or 0, unwrap(runner.model)
        parameters = _count(model)
        for batch in data_batch if isinstance(data_batch, list) else [data_batch]:
            for size in model.drawn_sizes() if isinstance(model, NestedTraining) else (None,):
                key = (parameters, size)
                if key not in self._known:
                    self._known[key] = _flops_at(model, size, batch)
                spent += len(batch["inputs"]) * self._known[key] * runner.world_size
        runner.message_hub.update_info("flops", spent)
        if losses_are_due(runner, batch_idx):
            self.before_val_epoch(runner, "train")

    def before_val_epoch(self, runner, mode: str = "val") -> None:
        """Log the cost with the results."""
        spent = float(runner.message_hub.runtime_info.get("flops") or 0)
        runner.message_hub.update_scalar(f"{mode}/flops", spent)
        runner.message_hub.update_scalar(f"{mode}/parameters", _count(unwrap(runner.model)))


def _flops_at(model: Any, size: float | None, batch: Mapping[str, Any]) -> int:
    """Count the FLOPs of training on one example of a batch."""
    if hasattr(model, "training_flops"):  # a masked autoencoder is more than its backbone
        return model.training_flops()
    of_images = hasattr(model, "backbone")
    tokens = None if of_images else batch["inputs"].shape[1] - 1  # the last one is only predicted
    inner = model.backbone.model if of_images else model.model
    with at_size(inner, size) if size else nullcontext():
        return training_flops(inner, tokens)
