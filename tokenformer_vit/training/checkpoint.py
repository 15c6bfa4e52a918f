"""Checkpoints for an exact resume: a killed run continues as if it had not been killed.

They are read without running code, and have tensors and plain values only.
"""

import hashlib
import os
import random
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from timm.models._hub import download_cached_file  # it has no public name

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import write_whole
from tokenformer_vit.mmpretrain_names import classifier_state_dict
from tokenformer_vit.models.checkpoints import (
    DESCRIPTION,
    description_of,
    model_computation,
    read_checkpoint,
    state_dict_in,
)

from .data.sampler import ResumableSampler
from .engine import (
    HOOKS,
    WEIGHT_INITIALIZERS,
    CheckpointHook,
    CheckpointLoader,
    EarlyStoppingHook,
    HistoryBuffer,
    PretrainedInit,
    all_gather_object,
    barrier,
    get_rank,
    get_world_size,
    is_main_process,
    set_random_seed,
)
from .export import IMPOSSIBLE, describe_classifier
from .hooks import check_finite
from .loop import ResumableEpochLoop, by_iteration, validation_is_due
from .models.backbone import unwrap
from .optim import averaging_hooks, follow_config, keep_settings, scheduled_names, unscheduled
from .reports import facts

STOPPED = "stopped.pth"  # written at a signal; the next checkpoint replaces it
# State of PyTorch's optimisers that a fused step reads and writes as it does the parameter.
_MOMENTS = ("exp_avg", "max_exp_avg", "momentum_buffer", "sum")
# What a config may change without a word: places of files, and how the same is computed.
_FREE = re.compile(
    r"(work_dir|experiment_name|load_from|resume|launcher|log_\w+|vis\w+|custom_imports|env_cfg)\b"
    r"|(val|test)_\w+\b"
    r"|default_hooks\.(?!ema)|.*\.(num_workers|pin_memory|prefetch_factor|persistent_workers)$"
    r"|.*\.(data_root|data_prefix|ann_file|checkpoint_path|pretrained)$|.*\.init_cfg\b"
)
# A change of one of these changes the rate from then on.
_RATE = re.compile(
    r"param_scheduler|train_cfg\.max_|auto_scale_lr|optim_wrapper\.(optimizer\.lr|paramwise_cfg"
    r"|accumulative_counts)|train_dataloader\.batch_size|processes|iterations an epoch"
)


@HOOKS.register_module()
class ExactCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, which also saves what an exact resume needs.

    That is the random state of every process, the seeds of the data, the config, and a description
    of the model. An old checkpoint is deleted only after the next one is on the disk. While
    gradients are accumulated, a checkpoint waits for the step.

    A resumed run may have another config; the log and ``record.json`` tell the difference. Else its
    losses equal those of an uninterrupted run, bit for bit, if the operations are deterministic. A
    validation that was due at the checkpoint runs again, as the run may have been killed during it.

    SIGTERM, USR1 and HUP end a run, soon after a step, with the checkpoint ``stopped.pth``.
    """

    _resumed: dict[str, Any] | None = None
    _progress: dict[str, Any] | None = None
    _waiting: int | None = None  # number of the checkpoint that waits for a step
    _stopping = False
    out_dir: Any

    def before_train(self, runner) -> None:
        """Restore the state of the checkpoint, if the run resumes from one."""
        work_dir, info = Path(runner.work_dir), runner.message_hub.runtime_info
        folder = Path(self.out_dir, work_dir.name) if self.out_dir else work_dir
        for key in [key for key in info if key.startswith("best_ckpt")]:
            # mmengine deletes the best checkpoint when there is a better one, whatever path a
            # resumed checkpoint names: only this run's own may be deleted.
            own = folder / Path(str(info[key])).name
            info[key] = str(own) if own.name.startswith("best_") and own.is_file() else None
        if "keep_ckpt_ids" in info:  # it also deletes what has these numbers
            info["keep_ckpt_ids"] = [n for n in info["keep_ckpt_ids"] if isinstance(n, int)]
        super().before_train(runner)
        loader = runner.train_dataloader
        for each in [loader] if runner.val_loop is None else [loader, runner.val_dataloader]:
            # Iterators draw a seed for their workers. From the global generator, that would shift
            # all later random numbers at each start of an epoch, a validation, or a resume.
            each.generator = torch.Generator()
            each.worker_init_fn = runner.termination.patient(each.worker_init_fn)
        if self._resumed is None:
            return
        info["last_ckpt"] = runner.cfg.load_from  # its folder may have moved
        if (before := self._resumed["samples"]) != len(loader.dataset):
            raise InputError(
                f"the checkpoint is of a run on {before} training samples, and there are "
                f"{len(loader.dataset)} now: give the same data, or another --work-dir"
            )
        self._move(runner, self._resumed)
        loader.sampler.seed = self._resumed["sampler_seed"]
        if hasattr(loader.dataset, "seed"):
            loader.dataset.seed = self._resumed["data_seed"]
        counts = self._resumed["early_stopping"]
        for hook, count in zip(_early_stopping_hooks(runner), counts, strict=False):
            hook.wait_count, hook.best_score = count
        if runner.val_loop is not None and validation_is_due(runner.train_loop):
            runner.val_loop.run()

    def _move(self, runner, resumed: dict[str, Any]) -> None:
        """Bring place and schedules to where the run is, and tell what changed."""
        loop, sampler = runner.train_loop, runner.train_dataloader.sampler
        before, now = resumed["iters_per_epoch"], len(runner.train_dataloader)
        changes = changed(resumed["config"], flat_config(runner.cfg))
        if not by_iteration(runner):
            if before != now:
                changes["iterations an epoch"] = (before, now)
            here = isinstance(loop, ResumableEpochLoop) and isinstance(sampler, ResumableSampler)
            if runner.iter % now and not here:
                raise InputError(
                    f"the checkpoint is within an epoch, which {type(loop).__name__} with "
                    f"{type(sampler).__name__} starts again: resume from the end of an epoch"
                )
        if len(resumed["rng"]) != get_world_size():
            changes["processes"] = (len(resumed["rng"]), get_world_size())
        scheduled = {f"optim_wrapper.optimizer.{name}" for name in scheduled_names(runner)}
        if any(map(_RATE.match, changes)) or scheduled & changes.keys():
            follow_config(runner, self._settings)
        if changes:
            told = [f"  {name}: {old!r} -> {new!r}" for name, (old, new) in changes.items()]
            title = "The resumed run differs from its checkpoint:"
            runner.logger.warning("\n".join([title, *told]))
            history = runner.message_hub.runtime_info.get("config_changes") or []
            entry = plain_values({"iteration": runner.iter, "changes": changes})
            runner.message_hub.update_info("config_changes", [*history, entry])

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Restore the random generators after a resume."""
        if self._resumed is None:
            return
        states, seed = self._resumed["rng"], self._resumed["sampler_seed"]
        self._resumed = None
        if len(states) == get_world_size():
            set_rng_state(states[get_rank()])
            return
        # Not the seed of the run, which would repeat the numbers of its start.
        seeds = np.random.SeedSequence([seed, runner.iter, get_rank()])
        set_random_seed(int(seeds.generate_state(1)[0]))

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Save, if a checkpoint is due or a signal came."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        self._stopping |= runner.termination.agreed()
        if not runner.optim_wrapper.should_update():
            return
        meta = {"epoch": runner.epoch, "iter": runner.iter + 1}
        if self._waiting is not None:
            self._save_step(runner, self._waiting, meta)
        if self._stopping:
            path = self._save(runner, STOPPED, meta)
            runner.logger.info(
                f"Stopped by a signal after iteration {runner.iter + 1}. The checkpoint {path} is "
                "complete: run the same command with --resume to continue."
            )
            barrier()  # a launcher stops all processes as soon as one of them ends
            raise SystemExit(128 + signal.SIGTERM)  # as shells report a process that it ended

    def after_train(self, runner) -> None:
        """Save what still waits for a step: early stopping ends a run within one."""
        if self._waiting is not None:
            self._save_step(runner, self._waiting, {"epoch": runner.epoch, "iter": runner.iter})
        super().after_train(runner)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Read our part of a checkpoint, and convert the rest for mmengine."""
        if not runner.cfg.resume:
            return
        if "optimizer" not in checkpoint or "exact_resume" not in checkpoint:
            raise InputError(
                "the checkpoint has only weights, not the state of a run: resume from epoch_*.pth, "
                "or start a new run from its weights with `--cfg-options load_from=CHECKPOINT`"
            )
        averaged = checkpoint["meta"].get("averaged", True)
        if "ema_state_dict" in checkpoint and averaged and not averaging_hooks(runner):
            raise InputError(  # an EMAHook would exchange the two models of the checkpoint
                "the checkpoint is of a run that averages its weights, but this run has no EMAHook "
                "and would train the average: give it default_hooks.ema again"
            )
        resumed = self._resumed = checkpoint.pop("exact_resume")
        if fault := state_fault(runner, checkpoint, resumed):
            raise InputError(f"the checkpoint does not fit this run: {fault}; resume another one")
        copy_state(runner.optim_wrapper.optimizer, checkpoint["optimizer"])
        meta, now = checkpoint["meta"], len(runner.train_dataloader)
        if not by_iteration(runner):  # the same place in an epoch of another length
            epochs, within = divmod(meta["iter"], resumed["iters_per_epoch"])
            meta["iter"] = epochs * now + within * now // resumed["iters_per_epoch"]
        self._settings = unscheduled(runner)
        keep_settings(runner, checkpoint["optimizer"]["param_groups"])
        own = runner.train_dataloader.dataset.metainfo
        if meta.get("dataset_meta") == plain_values(own):
            meta["dataset_meta"] = own  # mmengine compares pickles; ours has lists for tuples
        checkpoint["message_hub"]["log_scalars"] = {
            name: HistoryBuffer(buffer["log"].numpy(), buffer["count"].numpy())
            for name, buffer in checkpoint["message_hub"]["log_scalars"].items()
        }

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Add our part, and turn all other content into tensors and plain values."""
        hub = checkpoint["message_hub"]
        scalars = {
            name: dict(zip(("log", "count"), map(torch.from_numpy, buffer.data), strict=True))
            for name, buffer in hub["log_scalars"].items()
        }
        checkpoint["message_hub"] = {**plain_values(hub), "log_scalars": scalars}
        # A language model has no description, and its config is no part of a checkpoint.
        checkpoint["meta"]["computation"] = model_computation(unwrap(runner.model))
        meta = checkpoint["meta"] = plain_values(checkpoint["meta"])
        if self._progress is not None:
            checkpoint["exact_resume"] = self._progress
        model = unwrap(runner.model)
        if hasattr(getattr(model, "backbone", None), "exported"):
            return  # the weights are not timm's, as those of LoRA
        metainfo = runner.train_dataloader.dataset.metainfo
        with suppress(*IMPOSSIBLE):
            description = describe_classifier(model, runner.cfg, metainfo)
            known = facts(runner) | {"epochs": meta["epoch"], "iterations": meta["iter"]}
            checkpoint[DESCRIPTION] = {**description, "card": {"Training": known}}

    def _save_checkpoint_with_step(self, runner, step: int, meta: dict) -> None:
        if runner.optim_wrapper.should_update():
            self._save_step(runner, step, meta)
        else:
            self._waiting = step

    def _save_step(self, runner, step: int, meta: dict) -> None:
        """Save the checkpoint of an epoch or iteration, and delete the expired one."""
        self._waiting, expired = None, []
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            kept = [*self.keep_ckpt_ids, step]
            expired = kept[: -self.max_keep_ckpts]
            self.keep_ckpt_ids.append(step)
            # If this run is killed before it deletes the expired one, a resumed run does.
            runner.message_hub.update_info("keep_ckpt_ids", kept)
        self.last_ckpt = self._save(runner, self.filename_tmpl.format(step), meta)
        if is_main_process():
            for name in (STOPPED, *map(self.filename_tmpl.format, expired)):
                Path(self.out_dir, name).unlink(missing_ok=True)

    def _save(self, runner, name: str, meta: dict) -> str:
        """Save a checkpoint under a name."""
        runner.call_hook("read_losses")  # a resumed run could not log them
        check_finite(runner, meta["iter"])
        path = str(Path(self.out_dir, name))
        runner.message_hub.update_info("last_ckpt", path)
        self._progress = self._collect(runner)
        runner.save_checkpoint(
            self.out_dir,
            name,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
        )
        self._progress = None
        if is_main_process():
            write_whole(Path(runner.work_dir, "last_checkpoint"), path.encode())
        return path

    def _collect(self, runner) -> dict[str, Any]:
        """Gather from all processes what an exact resume needs."""
        # A run that resumes after the last iteration of an epoch saves that epoch before it trains.
        self.before_train_iter(runner)
        loader = runner.train_dataloader
        return {
            "rng": all_gather_object(rng_state()),
            "sampler_seed": loader.sampler.seed,
            "data_seed": getattr(loader.dataset, "seed", None),
            "samples": len(loader.dataset),
            "iters_per_epoch": len(loader),
            "states": len(runner.optim_wrapper.optimizer.state),
            "config": flat_config(runner.cfg),
            "early_stopping": [
                (hook.wait_count, float(hook.best_score)) for hook in _early_stopping_hooks(runner)
            ],
        }


def _early_stopping_hooks(runner) -> list[EarlyStoppingHook]:
    return [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs in two flat configs, by name: the old value and the new one."""
    names = sorted(old.keys() | new.keys())
    pairs = {name: (old.get(name), new.get(name)) for name in names if not _FREE.match(name)}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def flat_config(cfg: Any) -> dict[str, Any]:
    """Return the values of a config by their dotted keys."""
    return dict(_flat("", plain_values(cfg.to_dict())))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = enumerate(value)
    for key, item in items:
        yield from _flat(f"{name}.{key}".lstrip("."), item)
    if not items and value not in (None, {}, []):
        yield name, value


def rng_state() -> dict[str, Any]:
    """Return the state of all global random generators, in plain values and tensors."""
    return {
        "python": random.getstate(),
        "numpy": plain_values(cast(tuple, np.random.get_state())[1:]),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that :func:`rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(("MT19937", *state["numpy"]))  # noqa: NPY002
    for name, generators in (("torch", torch), ("cuda", torch.cuda)):
        if state[name] is not None and (name == "torch" or torch.cuda.is_available()):
            generators.set_rng_state(torch.empty_like(state[name]).copy_(state[name]))


def state_fault(runner: Any, checkpoint: dict[str, Any], resumed: dict[str, Any]) -> str | None:
    """Find what does not fit in the state of a run, before any of it is loaded.

    PyTorch compares only the sizes of groups, and NumPy does not check the place of its generator.
    """
    done, end = checkpoint["meta"]["iter"], runner.max_iters
    if not by_iteration(runner):
        end = runner.max_epochs * resumed["iters_per_epoch"]
    if done > end:
        return f"it is of iteration {done}, and the run has {end} iterations"
    for state in resumed["rng"]:
        words, place, *_ = state["numpy"]
        if len(words) != 624 or not 0 <= place <= 624:
            return f"NumPy's generator is at {place} of {len(words)} words"
    optimizer, saved = runner.optim_wrapper.optimizer, checkpoint["optimizer"]
    if [len(group["params"]) for group in saved["param_groups"]] != [
        len(group["params"]) for group in optimizer.param_groups
    ]:
        return "the optimiser's groups have other sizes"
    states, parameters = saved["state"], _parameters(optimizer, saved)
    if not states.keys() <= parameters.keys():
        return "the optimiser's state is not that of these parameters"
    if len(states) != resumed["states"]:
        return f"it has the optimiser's state of {len(states)} of {resumed['states']} parameters"
    schedules = checkpoint.get("param_schedulers", ())
    if len(schedules) != len(runner.param_schedulers or ()):
        return f"it has the state of {len(schedules)} schedules"
    if "factor" in type(optimizer).__name__.lower():  # as Adafactor, whose states are smaller
        return None
    exact = type(optimizer).__module__.startswith("torch.optim")  # others may keep halves
    for number, state in states.items():
        own = parameters[number]
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            moment = name.startswith(_MOMENTS)
            if value.dim() == 0 and not (exact and moment):
                continue  # a number of steps
            if not (exact or moment):
                continue  # what only its own optimiser knows
            if value.shape != own.shape or (exact and value.dtype != own.dtype):
                found = f"{tuple(value.shape)} {value.dtype}"
                return f"{name} of parameter {number} is {found}, the parameter {tuple(own.shape)}"
    return None


def _parameters(optimizer: Any, saved: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Return the parameters of an optimiser by their numbers in its saved state."""
    numbers, parameters = (
        [each for group in kind["param_groups"] for each in group["params"]]
        for kind in (saved, {"param_groups": optimizer.param_groups})
    )
    return dict(zip(numbers, parameters, strict=True))


def copy_state(optimizer: Any, saved: dict[str, Any]) -> None:
    """Copy the tensors of a saved state into memory of their own, laid out as the parameters are.

    PyTorch would use those of the file, and a fused step writes through their strides.
    """
    parameters = _parameters(optimizer, saved)
    for number, state in saved["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                own = parameters[number]
                like = own if value.shape == own.shape else torch.empty(value.shape)
                state[name] = torch.empty_like(like, dtype=value.dtype, device="cpu")
                state[name].copy_(value.to_dense())


class _Skipped:
    """Stands for the log in a checkpoint of mmengine, whose own class would call what it reads."""

    def __init__(self, *args: Any) -> None:
        pass

    __setstate__ = __init__


# mmengine's own hook also saves its log and numbers of NumPy, which only a resumed run needs.
_SKIPPED: list[Any] = [
    (_Skipped, "builtins.getattr"),
    (_Skipped, "mmengine.logging.history_buffer.HistoryBuffer"),
    *((_Skipped, f"numpy.{name}") for name in ("dtype", "ndarray")),
    *((_Skipped, f"numpy._core.multiarray.{name}") for name in ("_reconstruct", "scalar")),
]


@contextmanager
def safe_loading() -> Iterator[None]:
    """Let no file run code inside the block, whoever loads it by PyTorch; mmengine may ask to."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def load_from_file(filename: str, *_: Any) -> dict[str, Any]:
    """Read a file, or one at ``https://``, without running code, also for all of mmengine.

    mmengine's own readers would run code, and those of its fork allow ``getattr`` in files.
    """
    if filename.startswith("https://"):  # one folder each: names are not unique
        digest = hashlib.sha256(filename.encode()).hexdigest()
        try:
            filename = download_cached_file(filename, cache_dir=f"{torch.hub.get_dir()}/{digest}")
        except OSError as error:
            raise InputError(f"cannot download {filename}: {one_line(error)}") from error
    elif "://" in filename:
        raise InputError(f"{filename} is no file, and not at https://: download it first")
    with torch.serialization.safe_globals(_SKIPPED):
        return read_checkpoint(filename)


# How the addresses begin that mmengine reads by itself; its names of published models stay.
_ADDRESSES = ("", "http://", "https://", "pavi://", r"(\S+\:)?s3://", r"(\S+\:)?petrel://")
CheckpointLoader.register_scheme(_ADDRESSES, load_from_file, force=True)


def load_plain_checkpoint(filename: str) -> dict[str, Any]:
    """Load a file or URL of tensors and plain values, or of mmengine, without running code.

    A checkpoint of timm gives ``state_dict`` with mmpretrain's names, ``meta`` with the class names
    of its export, and its description under ``DESCRIPTION``.
    """
    path = Path(filename).expanduser()
    checkpoint: dict[str, Any] = load_from_file(filename)
    weights = checkpoint.get("state_dict", checkpoint)
    # A tensor of each of timm's ViTs. In a classifier of mmpretrain it is in `backbone.`, but for
    # TimmClassifier, whose runs have a log.
    of_timm = isinstance(weights, dict) and "patch_embed.proj.weight" in weights
    if path.suffix == ".safetensors" or (of_timm and "message_hub" not in checkpoint):
        description = description_of(path, checkpoint)
        checkpoint = {"state_dict": classifier_state_dict(state_dict_in(checkpoint, path))}
        if names := description.get("label_names"):
            checkpoint["meta"] = {"dataset_meta": {"classes": names}}
        if description:
            checkpoint[DESCRIPTION] = description
    meta = checkpoint.get("meta")
    if isinstance(meta, dict):
        meta.pop("config", None)  # mmengine's resume would run this text as Python
    return checkpoint


@WEIGHT_INITIALIZERS.register_module()
class PlainPretrained(PretrainedInit):
    """mmengine's ``Pretrained``, for the checkpoints that ``load_plain_checkpoint`` reads."""

    def __call__(self, module: torch.nn.Module) -> None:
        """Load the weights of a module."""
        weights, prefix = load_plain_checkpoint(self.checkpoint)["state_dict"], self.prefix or ""
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        module.load_state_dict(own)


def plain_values(value: Any) -> Any:
    """Convert NumPy values to Python's, and all other objects to text."""
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    return getattr(value, "__qualname__", None) or str(value)
