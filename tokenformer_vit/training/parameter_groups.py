"""An optimiser with one parameter group for each setting, so that a step is a few operations.

mmengine makes a group for each parameter, and PyTorch's optimisers update one group at a time.
"""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from mmpretrain.engine import LearningRateDecayOptimWrapperConstructor
from timm.optim import Muon
from torch import nn, optim
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.compilation import BLOCKS

from .adamw import AdamW
from .mmengine_internals import set_last_values

__all__ = [
    "MergedLayerDecayConstructor",
    "MergedOptimWrapperConstructor",
    "align_schedulers",
    "check_start",
    "fit_groups",
]

# What a group says about its parameter, or what has become its rate and decay.
_NO_SETTINGS = ("params", "param_name", "layer_id", "lr_mult", "decay_mult")


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MergedOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """mmengine's constructor, with one group for each setting and the fastest implementation.

    It builds the fused form of an optimiser, if PyTorch has one, and :class:`AdamW` of this
    package for PyTorch's; ``fused`` or ``foreach`` in the optimiser's config overrides this, unless
    it is None. The type of an optimiser of timm has its module: ``timm.optim.Lamb``.

    With timm's ``Muon``, the parameter tokens and the other matrices of the blocks have
    ``use_muon=True``. Its AdamW updates the rest, with the same learning rate.

    Raises:
        InputError: If there is no optimiser of that type.
    """

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = "", *args: Any, **kwargs: Any
    ) -> None:
        """Add the parameters of a module; when the model is complete, merge the groups."""
        super().add_params(params, module, prefix, *args, **kwargs)
        if not prefix:
            if self.optimizer_cfg["type"] is Muon:
                _choose_matrices(params, module)
            defaults = {"lr": self.base_lr, "weight_decay": self.base_wd}
            given = {key: value for key, value in defaults.items() if value is not None}
            params[:] = _merge({**given, **group} for group in params)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimiser of a model, and its wrapper."""
        given = {
            key: value
            for key, value in self.optimizer_cfg.items()
            if value is not None or key not in ("foreach", "fused")
        }
        self.optimizer_cfg = {**given, **_fastest(given)}
        if self.optimizer_cfg["type"] is Muon:
            # Without any key, mmengine would make one group without add_params().
            self.paramwise_cfg = {"custom_keys": {}, **self.paramwise_cfg}
        return super().__call__(model)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MergedLayerDecayConstructor(
    MergedOptimWrapperConstructor, LearningRateDecayOptimWrapperConstructor
):
    """mmpretrain's constructor of layer-wise learning rates, with one group for each setting."""


def check_start(cfg: Mapping[str, Any], path: str) -> None:
    """Check that the optimiser of a config can train the head.

    Args:
        cfg: The config; its values have the right types.
        path: File of the config, for messages.

    Raises:
        InputError: If the head starts at zero with LAMB or LARS, whose steps of a matrix are in
            proportion to its norm.
    """
    kind = str((cfg["optim_wrapper"].get("optimizer") or {}).get("type"))
    starts = (cfg["model"].get("head") or {}).get("init_cfg") or []
    zero = any(
        start.get("type") == "Constant" and not start.get("val")
        for start in (starts if isinstance(starts, list | tuple) else [starts])
        if isinstance(start, Mapping)  # mmengine refuses others
    )
    if zero and kind.rpartition(".")[2] in ("Lamb", "Lars", "LARS"):
        raise InputError(
            f"{path}: optim_wrapper.optimizer.type is {kind}, but model.head.init_cfg starts the "
            "head at 0, and such steps hardly move it from there: set "
            "model.head.init_cfg=dict(_delete_=True, type='TruncNormal', layer='Linear', std=0.02)"
        )


def _choose_matrices(groups: Iterable[dict[str, Any]], model: nn.Module) -> None:
    """Mark what Muon updates: the matrices in the blocks, each by itself.

    timm would choose by shape, and so take the head and the patch embedding too. The parameter
    tokens of query, key and value are three layers, also where one product computes them.

    timm's Muon multiplies the orthogonal update of an (m, n) matrix by 0.2 √max(m, n)
    (``match_rms_adamw``). The root mean square of an update is then 0.2 times the learning rate,
    about as with AdamW, so the learning rate and the weight decay of AdamW can be kept.

    Source:
        Which parameters: https://kellerjordan.github.io/posts/muon. Factor: arXiv:2502.16982.
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


def _fastest(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of an optimiser, and the options that make it fused.

    There are no such options if the config says how it works.
    """
    kind = cfg["type"]
    if isinstance(kind, str):
        with OPTIMIZERS.switch_scope_and_registry(None) as registry, suppress(RuntimeError):
            kind = registry.get(kind)
    if not callable(kind):
        raise InputError(
            f"optim_wrapper.optimizer.type is {cfg['type']}, which is no optimiser: give one of "
            "PyTorch's, such as AdamW, or one of timm's with its module, such as timm.optim.Lamb"
        )
    if kind is optim.Muon:
        raise InputError(
            "optim_wrapper.optimizer.type is PyTorch's Muon, which takes only matrices: give "
            "timm.optim.Muon, which also has AdamW for the other parameters"
        )
    if "fused" not in inspect.signature(kind).parameters or "foreach" in cfg:
        return {"type": kind}
    fused = cfg.get("fused", True)
    return {"type": AdamW if kind is optim.AdamW and fused else kind, "fused": fused}


def _merge(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups of equal settings, in the order in which they first appear."""
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        same = merged.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
        same["params"] += group["params"]
    return list(merged.values())


def fit_groups(optimizer: Optimizer, saved: Iterable[dict[str, Any]]) -> None:
    """Keep how this optimiser steps: PyTorch would take over what another device or version had.

    Args:
        optimizer: Optimiser that will load the groups.
        saved: ``param_groups`` of a checkpoint; changed in place.
    """
    how = {
        key: optimizer.defaults[key] for key in ("foreach", "fused") if key in optimizer.defaults
    }
    for group in saved:
        group.update(how)


def align_schedulers(runner: Any) -> None:
    """Give the schedules of a run the parameter groups that its optimiser has now."""
    for scheduler in runner.param_schedulers or ():
        name = scheduler.param_name
        groups = scheduler.optimizer.param_groups  # and mmengine's base_lr, for the log
        for group in groups:
            group.setdefault(f"initial_{name}", group[name])
        scheduler.base_values = [group[f"initial_{name}"] for group in groups]
        set_last_values(scheduler, [group[name] for group in groups])
        if least := getattr(scheduler, "min_values", None):  # a plateau would skip new groups
            least += least[-1:] * (len(groups) - len(least))
