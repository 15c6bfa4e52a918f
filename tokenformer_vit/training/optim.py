"""Optimisers: autocast, merged groups of parameters, weight averaging."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from timm.optim import Muon
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tokenformer_vit.benchmarking.benchmark import seconds_of
from tokenformer_vit.models.compilation import BLOCKS

from .engine import (
    CONSTRUCTORS,
    HOOKS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    DefaultOptimWrapperConstructor,
    EMAHook,
    ExponentialMovingAverage,
    LearningRateDecayOptimWrapperConstructor,
    OptimWrapper,
    ReduceOnPlateauParamScheduler,
    get_device,
)
from .models.backbone import unwrap

# What a group says about its parameter, or what has become its rate and decay.
_NO_SETTINGS = ("params", "param_name", "layer_id", "lr_mult", "decay_mult")
_UNSET = (("foreach", None), ("fused", None))  # as if the config did not name them


@OPTIM_WRAPPERS.register_module()
class LazyOptimWrapper(OptimWrapper):
    """mmengine's ``OptimWrapper``; ``norms`` of clipped gradients stay on their device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: dict[str, Tensor] = {}
        if self.clip_grad_kwargs:
            clip = self.clip_func

            def clip_and_keep(*args: Any, **kwargs: Any) -> None:
                norm = clip(*args, **kwargs)
                if norm is not None:  # clip_grad_value_ returns None
                    self.norms[self.grad_name] = norm

            self.clip_func = clip_and_keep


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(LazyOptimWrapper):
    """Forward passes under bfloat16 autocast, on any device.

    bfloat16 needs no loss scaling; mmengine's ``AmpOptimWrapper`` has a scaler and needs a GPU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if get_device() == "cpu" and (times := bfloat16_slowdown()) > 4:
            warnings.warn(
                f"this CPU multiplies {times:.0f} times as slowly in bfloat16 as in float32: train "
                "without --amp and with --cfg-options optim_wrapper.type=LazyOptimWrapper",
                stacklevel=2,
            )

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Enter autocast, and skip gradient synchronisation while gradients accumulate."""
        device = torch.device(get_device()).type
        with super().optim_context(model), torch.autocast(device, torch.bfloat16):
            yield


@cache
def bfloat16_slowdown() -> float:
    """Return the time of a small product in bfloat16 on this CPU, divided by that in float32."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(256, 256, dtype=dtype)
        return min(seconds_of(lambda: matrix @ matrix, matrix.device) for _ in range(5))

    return seconds(torch.bfloat16) / seconds(torch.float32)


@CONSTRUCTORS.register_module()
class MergedOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """mmengine's constructor, with one group for each setting and the fused implementation.

    mmengine makes a group for each parameter, and PyTorch's optimisers update one group at a time.
    ``fused`` or ``foreach`` in the optimiser's config overrides the implementation, unless it is
    None. With timm's ``Muon``, the matrices of the blocks have ``use_muon=True``. What the model's
    ``no_weight_decay()`` names does not decay, unless a key of the config speaks of it.
    """

    def add_params(self, params: list, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Add the parameters of a module; when the model is complete, merge the groups."""
        super().add_params(params, module, *args, **kwargs)
        if not kwargs.get("prefix"):
            if self.optimizer_cfg["type"] is Muon:
                _choose_matrices(params, module)
            defaults = {"lr": self.base_lr, "weight_decay": self.base_wd}
            given = {key: value for key, value in defaults.items() if value is not None}
            params[:] = _merge({**given, **group} for group in params)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimiser of a model, and its wrapper."""
        cfg = {key: v for key, v in self.optimizer_cfg.items() if (key, v) not in _UNSET}
        if isinstance(cfg["type"], str):
            with OPTIMIZERS.switch_scope_and_registry(None) as registry:
                cfg["type"] = registry.get(cfg["type"])  # imports timm.optim.Lamb
        has_fused = "fused" in inspect.signature(cfg["type"]).parameters
        if has_fused and "foreach" not in cfg:
            cfg.setdefault("fused", True)
        self.optimizer_cfg = cfg
        keys = (self.paramwise_cfg or {}).get("custom_keys") or {}
        names = [name for name in _undecayed(unwrap(model)) if not any(key in name for key in keys)]
        # Without any key, mmengine would make one group without add_params().
        keys = {**keys, **{name: {"decay_mult": 0.0} for name in names}}
        self.paramwise_cfg = {**self.paramwise_cfg, "custom_keys": keys}
        return super().__call__(model)


@CONSTRUCTORS.register_module()
class MergedLayerDecayConstructor(
    MergedOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor
):
    """mmpretrain's constructor of layer-wise learning rates, with one group for each setting."""


def _undecayed(model: nn.Module) -> Iterator[str]:
    """Yield the parameters that the modules of timm in a model would not let decay."""
    modules: Any = model.named_modules()
    for prefix, module in modules:
        if hasattr(module, "no_weight_decay"):
            yield from (f"{prefix}.{name}".lstrip(".") for name in module.no_weight_decay())


def _choose_matrices(groups: Iterable[dict[str, Any]], model: nn.Module) -> None:
    """Mark what Muon updates: the matrices in the blocks, each by itself.

    timm would choose by shape, and so take the head and the patch embedding too
    (https://kellerjordan.github.io/posts/muon). By its factor 0.2 √max(m, n) of an update
    (arXiv:2502.16982), the rate and the weight decay of AdamW can be kept.
    """
    matrices = {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and set(BLOCKS) & set(name.split("."))
        and not name.startswith("head.")  # some heads of mmpretrain have `layers`
    }
    for group in groups:
        group.setdefault("use_muon", matrices.issuperset(group["params"]))


def _merge(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups of equal settings, in the order in which they first appear."""
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        same = merged.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
        same["params"] += group["params"]
    return list(merged.values())


def scheduled_names(runner: Any) -> set[str]:
    """Return what the schedules of a run change in its groups of parameters; the rate is one."""
    return {"lr", *(each.param_name for each in runner.param_schedulers or ())}


def keep_settings(runner: Any, saved: Iterable[dict[str, Any]]) -> None:
    """Put the settings of a run's optimiser into saved groups, which PyTorch would take over."""
    optimizer = runner.optim_wrapper.optimizer
    for group, before in zip(optimizer.param_groups, saved, strict=False):
        own = (optimizer.defaults.keys() & group.keys()) - scheduled_names(runner)
        before.update({key: group[key] for key in own})


def unscheduled(runner: Any) -> list[dict[str, Any]]:
    """Return what the config sets of what schedules change, for each group of parameters."""
    groups = runner.optim_wrapper.optimizer.param_groups
    names = scheduled_names(runner)
    return [{name: each.get(f"initial_{name}", each[name]) for name in names} for each in groups]


def follow_config(runner: Any, settings: Iterable[Mapping[str, Any]]) -> None:
    """Bring the schedules of a resumed run from where its checkpoint has them to its config's.

    ``settings`` are those that :func:`unscheduled` returned before the checkpoint was loaded.
    """
    schedules = runner.param_schedulers or []
    if any(isinstance(each, ReduceOnPlateauParamScheduler) for each in schedules):
        return  # what it does depends on validations
    for group, own in zip(runner.optim_wrapper.optimizer.param_groups, settings, strict=True):
        group.update({**own, **{f"initial_{name}": value for name, value in own.items()}})
    if not schedules:
        return
    schedules = runner.build_param_scheduler(runner.cfg.param_scheduler)
    in_order = sorted(schedules, key=lambda each: each.by_epoch)  # as in a run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no step precedes
        for iteration in range(1, runner.iter + 1):
            epoch, within = divmod(iteration, len(runner.train_dataloader))
            ended = not within and epoch <= runner.epoch  # it ends after its last iteration
            for each in in_order:
                if ended or not each.by_epoch:
                    each.step()
    runner.param_schedulers = schedules


def align_schedulers(runner: Any) -> None:
    """Give the schedules of a run the parameter groups that its optimiser has since growth."""
    for scheduler in runner.param_schedulers or ():
        name = scheduler.param_name
        groups = scheduler.optimizer.param_groups  # and mmengine's base_lr, for the log
        for group in groups:
            group.setdefault(f"initial_{name}", group[name])
        scheduler.base_values = [group[f"initial_{name}"] for group in groups]
        state = {"_last_value": [group[name] for group in groups]}
        if least := getattr(scheduler, "min_values", None):  # a plateau would skip new groups
            state["min_values"] = least + least[-1:] * (len(groups) - len(least))
        scheduler.load_state_dict(state)


def averaging_hooks(runner: Any) -> list[Any]:
    """Return the hooks of a run that average its weights: none or one, ours or mmengine's."""
    return [hook for hook in runner.hooks if isinstance(hook, EMAHook)]


@MODELS.register_module()
class ForeachMovingAverage(ExponentialMovingAverage):
    """mmengine's ``ExponentialMovingAverage``, by PyTorch's update of all tensors at a time.

    The tensors are listed once: to walk through a model takes longer than to average it. Growth
    replaces ``avg_parameters``, so that they are listed again.
    """

    _listed: Any = None  # the averages that were listed

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the weights of a model; the first call copies the weights."""
        steps: Any = self.steps
        if self.update_buffers or steps == 0 or steps % self.interval:
            super().update_parameters(model)
            return
        if self._listed is not self.avg_parameters:
            self._listed = self.avg_parameters
            self._averages = [*self._listed.values()]
            self._weights: list[Tensor] = [*model.parameters()]
            self._copies = [*zip(self.module.buffers(), model.buffers(), strict=True)]
        average = get_ema_multi_avg_fn(1 - self.momentum)
        average(self._averages, self._weights, steps)
        for own, other in self._copies:
            own.copy_(other)
        steps.add_(1)


@HOOKS.register_module()
class AccumulationEMAHook(EMAHook):
    """mmengine's ``EMAHook``, but it averages once for each optimiser step, not each iteration.

    With ``validated=False``, validation and export take the model itself, and checkpoints have the
    average as ``ema_state_dict``.
    """

    def __init__(self, validated: bool = True, **kwargs: Any) -> None:
        super().__init__(**{"ema_type": "ForeachMovingAverage", **kwargs})
        self.validated = validated

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Add both models, and say which one ``state_dict`` is."""
        average, model = self.ema_model.module.state_dict(), checkpoint["state_dict"]
        first, second = (average, model) if self.validated else (model, average)
        checkpoint["meta"]["averaged"], checkpoint["state_dict"] = self.validated, first
        second = {f"module.{name}": tensor for name, tensor in second.items()}
        checkpoint["ema_state_dict"] = {"steps": self.ema_model.steps, **second}

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Take the average of a run that resumes; else it starts from the loaded weights."""
        average = checkpoint["state_dict"]
        if runner._resume and "ema_state_dict" in checkpoint:
            saved = checkpoint["ema_state_dict"]
            self.ema_model.steps.copy_(saved.pop("steps"))
            other = {name.removeprefix("module."): tensor for name, tensor in saved.items()}
            if checkpoint["meta"].get("averaged", True):  # now it may be otherwise
                checkpoint["state_dict"] = other
            else:
                average = other
        self.ema_model.module.load_state_dict(average)

    def _swap_ema_parameters(self) -> None:
        if self.validated:
            super()._swap_ema_parameters()

    def after_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Average, if this iteration ended with an optimiser step."""
        if runner.optim_wrapper.should_update():
            super().after_train_iter(runner, *args, **kwargs)
