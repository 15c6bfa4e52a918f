"""The schedule of a run: whether a resumed run keeps it.

A resumed run also keeps what it trains: model, augmentation, order of the data and averaging.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.runner import IterBasedTrainLoop

from tokenformer_vit.errors import InputError

from .storage import plain_values

# What a resumed run may change of model and data: places of files, and how the same is computed.
_FREE = {
    *("ann_file", "backend", "checkpoint", "compile", "data_prefix", "data_root"),
    *("grad_checkpointing", "init_cfg", "pretrained", "teacher", "validated", "with_cp"),
}
_EMA = "default_hooks.ema"
_DATASET = "train_dataloader.dataset"
_SEED = "randomness.seed"


def schedule_settings(runner) -> dict[str, Any]:
    """Return all settings that decide the steps of the optimiser, in plain values."""
    cfg, steps = runner.cfg, runner.cfg.optim_wrapper
    length = "max_iters" if isinstance(runner.train_loop, IterBasedTrainLoop) else "max_epochs"
    return plain_values(
        {
            f"train_cfg.{length}": getattr(runner, length),
            "auto_scale_lr": dict(cfg.get("auto_scale_lr") or {}),
            "optim_wrapper.accumulative_counts": steps.get("accumulative_counts", 1),
            "optim_wrapper.optimizer": _recipe(steps.optimizer),
            "optim_wrapper.type (--amp)": steps.get("type", "OptimWrapper"),
            "optim_wrapper.clip_grad": dict(steps.get("clip_grad") or {}),
            "optim_wrapper.paramwise_cfg": dict(steps.get("paramwise_cfg") or {}),
            "param_scheduler": [dict(scheduler) for scheduler in _parts(cfg)],
            "custom_hooks: GrowthHook": growth_hooks(cfg),
        }
    )


def check_schedule_is_kept(runner, resumed: Mapping[str, Any]) -> None:
    """Check that a resumed run keeps its schedule.

    Args:
        runner: The runner.
        resumed: Content of the checkpoint under ``exact_resume``.

    Raises:
        InputError: If a setting of the schedule changed; the message names it.
    """
    for name, value in schedule_settings(runner).items():
        before = resumed["schedule"].get(name)
        if name == "optim_wrapper.optimizer":
            before = _recipe(before)
        if value != before:
            raise InputError(_not_kept(name, before, value))


def training_settings(cfg: Any) -> dict[str, Any]:
    """Return the settings that decide what a run trains, by their names in ``--cfg-options``."""
    parts = {
        "model": cfg.get("model"),
        "data_preprocessor": cfg.get("data_preprocessor"),
        **_data_settings(cfg.get("train_dataloader") or {}),
        _EMA: (cfg.get("default_hooks") or {}).get("ema"),
        _SEED: (cfg.get("randomness") or {}).get("seed"),
    }
    return plain_values({name: value for part in parts.items() for name, value in _flat(*part)})


def _data_settings(loader: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides which samples a run takes, in which order, and what batches they make."""
    sampler = dict(loader.get("sampler") or {})
    # The number of samples changes with the number of processes, that of batches does not.
    samples = sampler.pop("num_samples", None)
    batches = samples / loader.get("batch_size", 1) if samples else None
    if batches and batches.is_integer():
        batches = int(batches)
    return {
        _DATASET: loader.get("dataset"),
        "train_dataloader.sampler": {"shuffle": True, "repeats": 1, **sampler},
        "train_dataloader.batch_sampler": loader.get("batch_sampler"),
        "train_dataloader.collate_fn": loader.get("collate_fn") or {"type": "pseudo_collate"},
        "train_dataloader.drop_last": loader.get("drop_last", False),
        "train_dataloader.num_batch_per_epoch": batches,
    }


def check_training_is_kept(cfg: Any, before: Mapping[str, Any]) -> None:
    """Check that a resumed run trains what it trained before.

    Args:
        cfg: Config of the run.
        before: :func:`training_settings` in the checkpoint.

    Raises:
        InputError: If a setting changed; the message names it.
    """
    now = training_settings(cfg)
    averages = [any(name.startswith(_EMA) for name in each) for each in (before, now)]
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        # A run without a seed takes that of its checkpoint, and another check is about averages.
        free = None in (old, new) if name == _SEED else name.startswith(_EMA) and not all(averages)
        if old != new and not free:
            raise InputError(_not_kept(name, old, new))


def _not_kept(name: str, before: Any, now: Any) -> str:
    before, now = ("not set" if each is None else each for each in (before, now))
    return (
        f"{name} was {before} in the checkpoint and is {now} now, but a resumed run must stay the "
        "same: give the old value, or start a new run from the weights with `--cfg-options "
        "load_from=CHECKPOINT` in another --work-dir"
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _FREE:
                yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{name}.{index}", item)
    elif value is not None:
        # The text of a function has an address, which differs between processes.
        yield name, getattr(value, "__qualname__", value)


def growth_hooks(cfg: Any) -> list[dict[str, Any]]:
    """Return the growth hooks of a config."""
    return [dict(hook) for hook in cfg.get("custom_hooks") or () if hook["type"] == "GrowthHook"]


def _parts(cfg: Config) -> Sequence[Any]:
    """List the parts of the schedule; a config may have a single one without a list."""
    parts = cfg.param_scheduler or ()
    return [parts] if isinstance(parts, dict) else parts


def _recipe(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimiser, without the implementation that computes them."""
    return {key: value for key, value in optimizer.items() if key not in ("foreach", "fused")}
