"""Growth during a run, and the cost of the training so far."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, grow_state_dict, open_gates, pattention_layers
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.models.sizes import at_size

from .distributed import unwrap
from .guard import check_finite
from .mae import MaskedAutoencoder
from .mmengine_internals import is_resuming
from .nested import NestedTraining
from .net2net import stack_blocks, widen_mlp
from .parameter_groups import align_schedulers, fit_groups
from .schedule import check_schedule_is_kept

_PAIRS = tuple(COUNTS.values())
_UNITS = ("epoch", "iteration")


@HOOKS.register_module()
class GrowthHook(Hook):
    """Enlarge the model at given times of a run.

    ::

        custom_hooks = [
            dict(
                type="GrowthHook",
                schedule=[
                    dict(epoch=100, num_qkv_param_tokens=384, num_ffn_param_tokens=1536),
                    dict(epoch=200, num_qkv_param_tokens=768, num_ffn_param_tokens=3072),
                ],
            )
        ]

    The config describes the model at the start. The hook grows the model, its average, the
    optimiser and the schedule of the learning rate, on all processes alike. A resumed run, and a
    test of a checkpoint, first grow to the size of the checkpoint. Checkpoints, record and export
    describe the grown model. The curves mark each growth.

    Args:
        schedule: Sizes of the model from a given time on, in order. Each entry has ``epoch`` or
            ``iteration`` (the number finished by then; the same unit in all entries; 0 grows the
            weights that the run starts from), and any of ``num_qkv_param_tokens``,
            ``num_proj_param_tokens``, ``num_ffn_param_tokens``, each a number or a list with one
            for each block. A ViT of timm has ``hidden_features`` (Net2Net) or ``depth`` (stacking)
            instead.
        init: Start of new pairs, one of ``tokenformer_vit.growth.INITS``; see
            :func:`tokenformer_vit.growth.grow`.
        gate: Gate of new pairs for softmax; see :func:`tokenformer_vit.growth.grow`.
        nested: Whether each size becomes a nested size of the next; see
            :func:`tokenformer_vit.growth.grow`. A nested model always keeps its sizes.
        open_iters: Number of iterations in which ``fixed`` gates open evenly after each growth.
        moments: ``keep`` the optimiser's moments of old pairs, or ``reset`` them.
        new_lr_scale: Factor on the learning rate of the newest pairs.
        freeze: ``old`` trains only the newest pairs and the classifier after a growth.
        train_head: Whether the classifier is trained although ``freeze`` is given. Without it, the
            grown model contains the old one unchanged.
        seed: Seed of the new pairs; default: the seed of the run.

    Raises:
        InputError: If the schedule is empty, out of order, or longer than the run, or the model
            cannot grow to a size.

    Source:
        TokenFormer, arXiv:2410.23168, Section 3.3.
    """

    priority = "HIGHEST"  # before the hooks that check a checkpoint against the model

    def __init__(
        self,
        schedule: Sequence[Mapping[str, Any]],
        init: str = "zero_key",
        gate: str | None = None,
        nested: bool = False,
        open_iters: int = 0,
        moments: str = "keep",
        new_lr_scale: float = 1.0,
        freeze: str | None = None,
        train_head: bool = True,
        seed: int | None = None,
    ) -> None:
        self.schedule = [dict(event) for event in schedule]
        self._unit = _check_schedule(self.schedule)
        if (open_iters > 0) != (gate == "fixed"):
            raise InputError(
                f"gate is {gate!r} and open_iters is {open_iters}: set open_iters above 0 for "
                "gate='fixed', and to 0 for any other gate"
            )
        self._tokens: dict[str, Any] = {
            "init": init,
            "gate": gate,
            "nested": nested,
            "freeze": freeze,
        }
        self._new_lr_scale = new_lr_scale
        self._moments = moments
        self._open_iters = open_iters
        self._train_head = train_head
        self._seed = seed
        self._done = 0

    def before_train(self, runner) -> None:
        """Check that the run is long enough for the whole schedule."""
        if getattr(unwrap(runner.model), "size_rule", None) is not None:
            raise InputError(
                "GrowthHook cannot grow a model that trains with a size_rule: remove one of the "
                "two, or grow the trained model with `tokenformer-vit grow`"
            )
        ends, length = f"at iteration {runner.max_iters} (epoch {runner.max_epochs})", "max_epochs"
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            ends, length = f"at iteration {runner.max_iters}", "max_iters"
            if self._unit == "epoch":
                raise InputError(
                    "the schedule of GrowthHook is by `epoch`, but this run counts iterations: "
                    "give the time of each growth by `iteration`"
                )
        last, end = self._start(runner, self.schedule[-1]), runner.max_iters
        if last >= end:
            raise InputError(
                f"GrowthHook would grow the model at {self._unit} "
                f"{self.schedule[-1][self._unit]}, but the run ends {ends}: shorten its schedule, "
                f"or set train_cfg.{length}"
            )
        starts = [self._start(runner, event) for event in self.schedule]
        room = min(after - before for before, after in zip(starts, [*starts[1:], end], strict=True))
        if self._open_iters > room:
            raise InputError(
                f"open_iters of GrowthHook is {self._open_iters}, but the next growth or the end "
                f"of the run comes after {room} iterations: set open_iters to at most {room}"
            )
        if any(key in _PAIRS for key in self.schedule[0]):
            self._rehearse(unwrap(runner.model))

    def _rehearse(self, model: nn.Module) -> None:
        """Try the rest of the schedule on a model with the same pairs and width one."""
        layers = pattention_layers(model)
        theta = next(iter(layers.values())).theta
        thin = {}
        for name, layer in layers.items():
            ones = torch.ones(layer.num_param_tokens, 1)
            thin |= {f"{name}.key_param_tokens": ones, f"{name}.value_param_tokens": ones}
            thin[f"{name}.tau"] = torch.ones(())
            if layer.gate is not None:
                thin[f"{name}.gate"] = ones[:, 0]
            if layer.nested:
                thin[f"{name}.nested_sizes"] = torch.tensor(layer.nested)
                thin[f"{name}.nested_tau"] = torch.ones(len(layer.nested))
        how = {key: self._tokens[key] for key in ("init", "gate", "nested")}
        for event in self.schedule[self._done :]:
            sizes = {key: value for key, value in event.items() if key not in _UNITS}
            thin = grow_state_dict(thin, **sizes, **how, theta=theta)

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Grow, if a growth is due; open gates."""
        while self._done < len(self.schedule):
            event = self.schedule[self._done]
            if self._start(runner, event) > runner.iter:
                break
            check_finite(runner)  # growth would hide which iteration diverged
            before = _count(runner.model)
            self._grow(runner, runner.optim_wrapper.optimizer)
            _rewrap(runner)
            after = _count(runner.model)
            history: list[Any] = list(runner.message_hub.runtime_info.get("growth") or ())
            history.append({"iteration": runner.iter, "parameters": after, **event})
            runner.message_hub.update_info("growth", history)
            sizes = ", ".join(f"{key} {event[key]}" for key in event if key not in _UNITS)
            runner.logger.info(
                f"The model grew before iteration {runner.iter + 1} (epoch {runner.epoch + 1}): "
                f"{sizes}; {before:,} -> {after:,} parameters"
            )
        if self._open_iters and self._done:
            since = runner.iter - self._start(runner, self.schedule[self._done - 1])
            for model in _models(runner):
                open_gates(model, min(1.0, since / self._open_iters))

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Grow to the size of the checkpoint, before its weights are loaded."""
        if is_resuming(runner) and "exact_resume" in checkpoint:
            # First; otherwise an error would be about the shape of a tensor.
            check_schedule_is_kept(runner, checkpoint["exact_resume"])
        loaded = checkpoint.get("state_dict", checkpoint)
        loaded = {name.removeprefix("module."): tensor for name, tensor in loaded.items()}
        optimizer = getattr(runner.optim_wrapper, "optimizer", None)
        if not isinstance(optimizer, Optimizer):
            optimizer = None  # a test has none, or only its config
        elif is_resuming(runner) and "optimizer" in checkpoint:
            fit_groups(optimizer, checkpoint["optimizer"]["param_groups"])
        started = self._done
        while self._done < len(self.schedule) and not _fits(runner.model, loaded):
            self._grow(runner, optimizer)
        if self._done > started:
            _rewrap(runner)
            if not is_resuming(runner):
                runner.logger.info(
                    f"The checkpoint has the size after growth {self._done} of "
                    f"{len(self.schedule)}; the run continues with the rest of the schedule."
                )

    def _start(self, runner, event: Mapping[str, int]) -> int:
        """Return the iteration before which a growth is due."""
        per_epoch = len(runner.train_dataloader) if self._unit == "epoch" else 1
        return event[self._unit] * per_epoch

    def _grow(self, runner, optimizer: Optimizer | None) -> None:
        event = self.schedule[self._done]
        sizes = {key: value for key, value in event.items() if key not in _UNITS}
        seed = self._seed
        if seed is None:  # the same on all processes; their own seeds may differ by rank
            own_seed = runner.cfg.get("randomness", {}).get("diff_rank_seed", False)
            seed = (runner.seed or 0) - (runner.rank if own_seed else 0)
        for index, model in enumerate(_models(runner)):
            # The averaged model has no optimiser.
            own = optimizer if index == 0 else None
            common: dict[str, Any] = {"optimizer": own, "moments": self._moments}
            if "hidden_features" in sizes:
                widen_mlp(model, **sizes, seed=seed + self._done, **common)
            elif "depth" in sizes:
                stack_blocks(model, **sizes, **common)
            else:
                grow(
                    model,
                    **sizes,
                    **self._tokens,
                    **common,
                    seed=seed,
                    new_lr_scale=self._new_lr_scale,
                )
            trains = self._tokens["freeze"] and self._train_head
            if trains and index == 0 and hasattr(model, "head"):
                model.head.requires_grad_()  # a language model keeps its frozen head
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):
                average: Any = hook.ema_model
                average.module.requires_grad_(False)
                average.avg_parameters = (
                    average.module.state_dict()
                    if average.update_buffers
                    else dict(average.module.named_parameters())
                )
        if optimizer is not None:
            align_schedulers(runner)
        self._done += 1


def _check_schedule(schedule: list[dict[str, Any]]) -> str:
    """Check a schedule, and return its unit."""
    if not schedule:
        raise InputError(
            "the schedule of GrowthHook is empty: add the times of growth, or remove the hook"
        )
    units = {key for event in schedule for key in event if key in _UNITS}
    if len(units) != 1 or any(not units <= event.keys() for event in schedule):
        raise InputError(
            "schedule of GrowthHook: give every entry an `epoch`, or every entry an `iteration`, "
            f"but got {schedule}"
        )
    (unit,) = units
    kinds = [
        kind
        for event in schedule
        for kind in (_PAIRS, ("hidden_features",), ("depth",))
        if set(event) - {unit} and set(event) - {unit} <= set(kind)
    ]
    if len(kinds) != len(schedule) or len(set(kinds)) != 1:
        raise InputError(
            f"the schedule of GrowthHook may set {', '.join(_PAIRS)} of a TokenFormer (its depth "
            "and width stay), or either `hidden_features` or `depth` of a ViT, but it is "
            f"{schedule}"
        )
    for before, after in zip([{unit: -1}, *schedule], schedule, strict=False):
        sizes = [(before[key], after[key]) for key in before if key in after]
        # Lists are compared with the model's own numbers when the run starts.
        smaller = any(b < a for a, b in sizes if isinstance(a, int) and isinstance(b, int))
        if after[unit] <= before[unit] or smaller:
            raise InputError(
                f"the schedule of GrowthHook is out of order: {after} comes after {before}; times "
                "must increase from 0 on, and sizes must not shrink"
            )
    return unit


def _models(runner) -> list[Any]:
    """Return the model in training, and the averaged one if there is one."""
    averages = [hook.ema_model.module for hook in runner.hooks if isinstance(hook, EMAHook)]
    return [unwrap(runner.model), *averages]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _fits(model: nn.Module, loaded: Mapping[str, Tensor]) -> bool:
    """Tell whether the blocks have the shapes of the model's; growth does not change a head."""
    own, there = (
        {name: tensor.shape for name, tensor in tensors.items() if ".blocks." in name}
        for tensors in (unwrap(model).state_dict(), loaded)
    )
    return own == there


def _rewrap(runner) -> None:
    """Wrap the grown model again, and drop code that was compiled for the old shapes."""
    model = unwrap(runner.model)
    if any(getattr(module, "_compiled_call_impl", None) for module in model.modules()):
        # Otherwise PyTorch compiles for variable sizes from the second shape on, which is slower.
        torch.compiler.reset()
    if is_model_wrapper(runner.model):
        runner.model = runner.wrap_model(runner.cfg.get("model_wrapper_cfg"), model)


@HOOKS.register_module()
class CostHook(Hook):
    """Log the cost of the training so far, with the loss and with every validation.

    ``parameters`` is the present number. ``flops`` is the sum of the forward and backward passes of
    the backbone or language model over all images or sequences so far. Each is counted at the size
    that the model had then, or at all sizes that a step of a nested model computed. The predictions
    of a teacher are not counted.

    Raises:
        InputError: If the FLOPs of the model cannot be counted.
    """

    _parameters = 0

    def before_train_iter(self, runner, batch_idx: int, data_batch: Any = None) -> None:
        """Forget the FLOPs of the model, if its number of parameters changed."""
        parameters = _count(unwrap(runner.model))
        if parameters != self._parameters:
            self._parameters = parameters
            self._known: dict[float | None, int] = {}  # FLOPs of an example, by the size
            self._spent(runner, data_batch)  # an error comes before the iteration

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Add the cost of this iteration."""
        hub = runner.message_hub
        spent = (hub.runtime_info.get("flops") or 0) + self._spent(runner, data_batch)
        hub.update_info("flops", spent)
        for mode in ("train", "val"):
            for name, number in (("flops", float(spent)), ("parameters", self._parameters)):
                hub.update_scalar(f"{mode}/{name}", number)
                # mmengine copies the history at every update, and only the last number is read.
                hub.get_scalar(f"{mode}/{name}").max_length = 1

    def _spent(self, runner: Any, data_batch: Any) -> int:
        """Count the FLOPs of an iteration on all processes."""
        model, spent = unwrap(runner.model), 0
        for batch in data_batch if isinstance(data_batch, list) else [data_batch]:
            count = len(batch["inputs"])
            nested = isinstance(model, NestedTraining)
            for size, part in model.parts(count) if nested else [(None, slice(0, count))]:
                if size not in self._known:
                    self._known[size] = _flops_at(model, size, batch)
                spent += (part.stop - part.start) * self._known[size]
        return spent * runner.world_size


def _flops_at(model: Any, size: float | None, batch: Mapping[str, Any]) -> int:
    """Count the FLOPs of training on one example of a batch."""
    if isinstance(model, MaskedAutoencoder):
        raise InputError(
            "CostHook cannot count the FLOPs of a MaskedAutoencoder, whose encoder sees only a "
            "part of the patches: remove CostHook from custom_hooks"
        )
    tokens = None
    if not hasattr(model, "backbone"):
        tokens = batch["inputs"].shape[1] - 1  # the last token of a row is only predicted
    if size is None:
        return training_flops(model.backbone.model if tokens is None else model.model, tokens)
    with at_size(model.sized, size):
        return training_flops(model.sized, tokens)
