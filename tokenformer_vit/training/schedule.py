"""The schedule of a run: whether it fits into the run, and whether a resumed run keeps it.

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


def check_schedule(cfg: Config) -> None:
    """Check that the learning rate schedule has room in the epochs, or iterations, of the run.

    Raises:
        InputError: If a part of the schedule begins or ends after the end of the run
            (``train_cfg.max_epochs`` or ``max_iters``), or would never step; the message gives
            options that fit.
    """
    length = "max_iters" if "max_iters" in cfg.train_cfg else "max_epochs"
    number = cfg.train_cfg[length]
    parts = {}
    for index, part in enumerate(_parts(cfg)):
        by_epoch, begin = part.get("by_epoch", True), part.get("begin", 0)
        if by_epoch and length == "max_iters" and not part.get("convert_to_iter_based"):
            raise InputError(
                f"param_scheduler.{index} counts epochs, but the run counts iterations: set "
                f"`--cfg-options param_scheduler.{index}.by_epoch=False`, and its begin and end in "
                "iterations"
            )
        if part.get("end", begin + 1) <= begin:
            raise InputError(
                f"param_scheduler.{index} has end={part['end']}, but it begins at {begin}: give an "
                "end after that"
            )
        if by_epoch == (length == "max_epochs"):
            parts[index] = part
    for index, part in parts.items():
        for key, room in (("begin", number - 1), ("end", number)):
            if part.get(key, 0) > room:
                raise InputError(
                    f"param_scheduler.{index} has {key}={part[key]}, but train_cfg.{length} is "
                    f"{number}: {_shorter(parts, number)}"
                )


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


def _shorter(parts: Mapping[int, Any], number: int) -> str:
    """Return options with which a schedule fits into a run.

    Args:
        parts: Parts of the schedule, by their place in the config's list.
        number: Length of the run, in epochs or iterations.
    """
    begins = sorted({part.get("begin", 0) for part in parts.values()} - {0})
    # Each part needs at least one epoch before the next.
    moved = {begin: min(begin, number - len(begins) + n) for n, begin in enumerate(begins)}
    if all(moved.values()):
        said = "also shorten the schedule"
        fitting = {
            index: {
                key: moved.get(part[key], min(part[key], number))
                for key in ("begin", "end")
                if key in part
            }
            for index, part in parts.items()
        }
    else:
        first, *others = parts.values()
        if len(others) != 1 or not {"start_factor", "end"} <= first.keys():
            return "keep the rate constant by `--cfg-options param_scheduler=[]`"
        said = "there is no room for a warm-up, remove it"
        last = {"begin": 0, "end": number} if "end" in others[0] else {"begin": 0}
        fitting = dict(zip(parts, ({"start_factor": 1, "end": number}, last), strict=True))
    options = " ".join(
        f"param_scheduler.{index}.{key}={value}"
        for index, new in fitting.items()
        for key, value in new.items()
        if parts[index][key] != value
    )
    return f"{said} by `--cfg-options {options}`"


def _recipe(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimiser, without the implementation that computes them."""
    return {key: value for key, value in optimizer.items() if key not in ("foreach", "fused")}
