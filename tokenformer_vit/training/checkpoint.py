"""Checkpoints for an exact resume: a killed run continues as if it had not been killed."""

import math
import random
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from mmengine.dist import all_gather_object, barrier, get_rank, get_world_size, is_main_process
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, EMAHook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS
from mmengine.runner import set_random_seed

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.models.checkpoints import DESCRIPTION, model_computation

from .data.sampler import ResumableSampler
from .distributed import unwrap
from .export import describe_classifier, run_facts
from .hooks import check_finite, is_resuming
from .loop import ResumableEpochLoop, by_iteration, validation_is_due
from .optim import follow_config, keep_settings
from .runner import STATUS
from .storage import plain_values

__all__ = ["ExactCheckpointHook"]

STOPPED = "stopped.pth"  # written at a signal; the next checkpoint replaces it
# What a config may change without a word: places of files, and how the same is computed.
_FREE = re.compile(
    r"(work_dir|experiment_name|load_from|resume|launcher|log_\w+|vis\w+|custom_imports|env_cfg)\b"
    r"|(val|test)_\w+\b"
    r"|default_hooks\.(?!ema)|.*\.(num_workers|pin_memory|prefetch_factor|persistent_workers)$"
    r"|.*\.(data_root|data_prefix|ann_file|checkpoint_path)$"
)
# A change of one of these changes the rate from then on.
_RATE = re.compile(
    r"param_scheduler|train_cfg\.max_|auto_scale_lr|optim_wrapper\.(optimizer\.lr|paramwise_cfg"
    r"|accumulative_counts)|iterations an epoch"
)
_MOMENTS = ("exp_avg", "max_exp_avg", "momentum_buffer")
_FACTORED = ("_row", "_col", "_r", "_c", "row_var", "col_var")  # of optimisers like Adafactor
# State of PyTorch's optimisers that is one number for a parameter.
_SCALARS = ("step", "mu_product", "eta", "mu")


@HOOKS.register_module()
class ExactCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, which also saves what an exact resume needs.

    A checkpoint also holds the random state of every process, the seeds of the data, the config,
    and a description of the model and its preprocessing. It has tensors and plain values only, so
    it loads with ``torch.load(..., weights_only=True)``. An old checkpoint is deleted only after
    the next one is on the disk. While gradients are accumulated, a checkpoint waits for the step.

    A resumed run may have another config, such as more epochs, a lower rate or another number of
    processes; the log and ``record.json`` tell the difference. On resume, the validation that was
    due at the checkpoint runs again, because the run may have been killed during it.

    SIGTERM, USR1 and HUP end a run of :class:`~tokenformer_vit.training.runner.TrainingRunner` with
    the checkpoint ``stopped.pth``: after the present step, or some seconds later if there are
    several processes.

    Args:
        **kwargs: As for ``CheckpointHook``.

    Note:
        After a resume the losses equal the losses of an uninterrupted run, bit for bit, if the
        config and the number of processes are the same and the operations are deterministic.
    """

    _resumed: dict[str, Any] | None = None
    _progress: dict[str, Any] | None = None
    _waiting: int | None = None  # number of the checkpoint that waits for a step
    _stopping = False

    def before_train(self, runner) -> None:
        """Restore the state of the checkpoint, if the run resumes from one."""
        super().before_train(runner)
        self._keep_own_files(runner)
        loader, termination = runner.train_dataloader, getattr(runner, "termination", None)
        for each in [loader] if runner.val_loop is None else [loader, runner.val_dataloader]:
            # Iterators draw a seed for their workers. From the global generator, that would shift
            # all later random numbers at each start of an epoch, a validation, or a resume.
            each.generator = torch.Generator()
            if termination is not None:
                each.worker_init_fn = termination.patient(each.worker_init_fn)
        if self._resumed is None:
            return
        if (before := self._resumed["samples"]) != len(loader.dataset):
            raise InputError(
                f"the checkpoint is of a run on {before} training samples, and there are "
                f"{len(loader.dataset)} now: give the same data, or another --work-dir"
            )
        self._move(runner)
        loader.sampler.seed = self._resumed["sampler_seed"]
        if hasattr(loader.dataset, "seed"):
            loader.dataset.seed = self._resumed["data_seed"]
        counts = self._resumed["early_stopping"]
        for hook, count in zip(_early_stopping_hooks(runner), counts, strict=False):
            hook.wait_count, hook.best_score = count
        if runner.val_loop is not None and validation_is_due(runner.train_loop):
            runner.val_loop.run()

    def _keep_own_files(self, runner) -> None:
        """Look for files that a checkpoint names in the folder of this run, and nowhere else.

        mmengine deletes the best checkpoint when there is a better one, whatever path a resumed
        checkpoint names. A run that was killed may not have deleted what it replaced.
        """
        info = runner.message_hub.runtime_info
        for key in [key for key in info if key.startswith("best_ckpt")]:
            name = Path(str(info[key])).name
            own = Path(cast(str, self.out_dir), name)
            info[key] = str(own) if name.startswith("best_") and own.is_file() else None
        if hasattr(self, "best_ckpt_path"):
            self.best_ckpt_path = info.get("best_ckpt")
        for key in getattr(self, "best_ckpt_path_dict", {}):
            self.best_ckpt_path_dict[key] = info.get(f"best_ckpt_{key}")
        if is_resuming(runner) and is_main_process():
            self._delete(info.get("replaced") or ())

    def _move(self, runner) -> None:
        """Bring place and schedules to where the run is, and tell what changed."""
        resumed, loop = cast(dict, self._resumed), runner.train_loop
        before, now = resumed["iters_per_epoch"], len(runner.train_dataloader)
        changes = changed(resumed["config"], _flat_config(runner))
        if before != now and not by_iteration(runner):
            changes["iterations an epoch"] = (before, now)
            within = runner.iter - runner.epoch * before
            loop._iter = runner.epoch * now + within * now // before
        here = isinstance(loop, ResumableEpochLoop) and isinstance(
            runner.train_dataloader.sampler, ResumableSampler
        )
        if not by_iteration(runner) and runner.iter % now and not here:
            raise InputError(
                f"the checkpoint is within an epoch, but {type(loop).__name__} with "
                f"{type(runner.train_dataloader.sampler).__name__} starts the epoch again: resume "
                "from the end of an epoch, or set train_cfg.type='ResumableEpochLoop' and "
                "train_dataloader.sampler.type='ResumableSampler'"
            )
        if any(map(_RATE.match, changes)):
            follow_config(runner, self._bases)
        if len(resumed["rng"]) != get_world_size():
            changes["processes"] = (len(resumed["rng"]), get_world_size())
        if changes:
            told = [f"  {name}: {old!r} -> {new!r}" for name, (old, new) in changes.items()]
            title = "The resumed run differs from its checkpoint:"
            runner.logger.warning("\n".join([title, *told]))
            history = list(runner.message_hub.runtime_info.get("config_changes") or ())
            entry = {"iteration": runner.iter, "changes": {k: [*v] for k, v in changes.items()}}
            runner.message_hub.update_info("config_changes", [*history, plain_values(entry)])

    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Restore the random generators after a resume."""
        self._restore_rng(runner)

    def _restore_rng(self, runner) -> None:
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

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Save, if a checkpoint is due or a signal came."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)  # type: ignore[arg-type]
        termination = getattr(runner, "termination", None)
        self._stopping |= termination is not None and termination.agreed()
        if not runner.optim_wrapper.should_update():
            return
        meta = {"epoch": runner.epoch, "iter": runner.iter + 1}
        if self._waiting is not None:
            self._save_checkpoint_with_step(runner, self._waiting, meta)
        if self._stopping:
            path = self._save(runner, STOPPED, meta)
            runner.logger.info(
                f"Stopped by a signal after iteration {runner.iter + 1}. The checkpoint {path} is "
                "complete: run the same command with --resume to continue."
            )
            barrier()  # a launcher stops all processes as soon as one of them ends
            raise SystemExit(STATUS)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Read our part of a checkpoint, and convert the rest for mmengine."""
        if not is_resuming(runner):
            return
        if "optimizer" not in checkpoint or "exact_resume" not in checkpoint:
            raise InputError(
                "the checkpoint has only weights, not the state of a run: resume from epoch_*.pth, "
                "or start a new run from its weights with `--cfg-options load_from=CHECKPOINT`"
            )
        averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
        averaged = checkpoint.get("meta", {}).get("averaged", True)
        if "ema_state_dict" in checkpoint and averaged and not averages:
            raise InputError(  # an EMAHook would exchange the two models of the checkpoint
                "the checkpoint is of a run that averages its weights, but this run has no EMAHook "
                "and would train the average: give it default_hooks.ema again"
            )
        resumed: dict[str, Any] = checkpoint.pop("exact_resume")
        self._resumed = resumed
        fault = state_fault(runner, checkpoint, resumed)
        if fault is not None:
            raise InputError(
                f"the checkpoint's state of the run is damaged: {fault}; resume from another one"
            )
        groups = runner.optim_wrapper.optimizer.param_groups
        self._bases = [group.get("initial_lr", group["lr"]) for group in groups]
        keep_settings(runner, checkpoint["optimizer"]["param_groups"])
        for state in checkpoint["optimizer"]["state"].values():
            # It is read for each parameter; on the CPU that costs no transfer. Some of timm's
            # optimisers have a number.
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].cpu()
        meta, own = checkpoint["meta"], runner.train_dataloader.dataset.metainfo
        if meta.get("dataset_meta") == plain_values(own):
            meta["dataset_meta"] = own  # mmengine compares pickles; ours has lists for tuples
        # mmengine makes file names from these numbers, and removes the files.
        info = checkpoint["message_hub"]["runtime_info"]
        if "keep_ckpt_ids" in info:
            info["keep_ckpt_ids"] = [n for n in info["keep_ckpt_ids"] if isinstance(n, int)]
        checkpoint["message_hub"]["log_scalars"] = {
            name: HistoryBuffer(buffer["log"].cpu().numpy(), buffer["count"].cpu().numpy())
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
        checkpoint["meta"] = plain_values(checkpoint["meta"])
        if self._progress is not None:
            checkpoint["exact_resume"] = self._progress
        description = describe_classifier(
            unwrap(runner.model), runner.cfg, runner.train_dataloader.dataset.metainfo
        )
        if description is not None:
            checkpoint[DESCRIPTION] = {**description, "card": _card(runner, checkpoint["meta"])}

    def _save_checkpoint_with_step(self, runner, step: int, meta: dict) -> None:
        self._waiting = None if runner.optim_wrapper.should_update() else step
        if self._waiting is not None:
            return
        expired = []
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                expired = [self.filename_tmpl.format(self.keep_ckpt_ids.popleft())]
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info("keep_ckpt_ids", list(self.keep_ckpt_ids))
        self.last_ckpt = self._save(runner, self.filename_tmpl.format(step), meta, expired)

    def _save(self, runner, name: str, meta: dict, expired: list[str] | None = None) -> str:
        """Save a checkpoint under a name, and delete expired ones once it is complete."""
        check_finite(runner)
        path = str(Path(cast(str, self.out_dir), name))
        replaced = [*(expired or ())]
        if name != STOPPED and Path(path).with_name(STOPPED).exists():
            replaced.append(STOPPED)
        runner.message_hub.update_info("last_ckpt", path)
        runner.message_hub.update_info("replaced", replaced)
        self._progress = self._collect(runner)
        runner.save_checkpoint(
            self.out_dir,
            name,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            **self.args,
        )
        self._progress = None
        if is_main_process():
            write_whole(Path(runner.work_dir, "last_checkpoint"), path.encode())
            self._delete(replaced)
        return path

    def _delete(self, names: Any) -> None:
        """Delete checkpoints of this run."""
        for name in map(str, names):
            numbers = re.findall(r"\d+", name)
            if name in (STOPPED, *(self.filename_tmpl.format(int(each)) for each in numbers)):
                Path(cast(str, self.out_dir), name).unlink(missing_ok=True)

    def _collect(self, runner) -> dict[str, Any]:
        """Gather from all processes what an exact resume needs."""
        # A run that resumes after the last iteration of an epoch saves that epoch before it trains.
        self._restore_rng(runner)
        loader = runner.train_dataloader
        optimizer = runner.optim_wrapper.optimizer
        trained = chain(*(group["params"] for group in optimizer.param_groups))
        return {
            "rng": all_gather_object(rng_state()),
            "sampler_seed": loader.sampler.seed,
            "data_seed": getattr(loader.dataset, "seed", None),
            "samples": len(loader.dataset),
            "iters_per_epoch": len(loader),
            "config": _flat_config(runner),
            "schedules": len(runner.param_schedulers or ()),
            "without_state": sum(p.requires_grad and p not in optimizer.state for p in trained),
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


def _flat_config(runner) -> dict[str, Any]:
    return dict(_flat("", plain_values(runner.cfg.to_dict())))


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
    _, keys, *rest = cast(tuple, np.random.get_state())  # noqa: NPY002  # mixup draws from it
    return {
        "python": random.getstate(),
        "numpy": [keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that :func:`rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(("MT19937", *state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def state_fault(runner: Any, checkpoint: dict[str, Any], resumed: dict[str, Any]) -> str | None:
    """Find what does not fit in the state of a run, before any of it is loaded.

    PyTorch compares only the sizes of groups, and a fused optimiser writes outside moments of
    another shape.
    """
    done, epoch = (checkpoint["meta"][key] for key in ("iter", "epoch"))
    length = resumed["iters_per_epoch"]
    first, last, end = 0, runner.max_iters, runner.max_iters
    if not by_iteration(runner):
        first, last, end = epoch * length, (epoch + 1) * length, runner.max_epochs * length
    if not first <= done <= min(last, end):
        return f"it is of iteration {done}, epoch {epoch}, and the run has {end} iterations"
    schedules = len(checkpoint.get("param_schedulers", ()))
    if schedules != resumed["schedules"]:
        return f"it has {schedules} of {resumed['schedules']} schedules"
    own = {"state_dict": unwrap(runner.model).state_dict()}
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and "ema_state_dict" in checkpoint:
            own["ema_state_dict"] = hook.ema_model.state_dict()
    for part, tensors in own.items():
        if fault := _tensor_fault(tensors, checkpoint[part]):
            return f"{part}: {fault}"
    return _optimizer_fault(
        runner.optim_wrapper.optimizer, checkpoint["optimizer"], resumed["without_state"]
    )


def _optimizer_fault(optimizer: Any, saved: dict[str, Any], without_state: int) -> str | None:
    states, kinds = saved["state"], (saved["param_groups"], optimizer.param_groups)
    numbers, groups = ([group["params"] for group in kind] for kind in kinds)
    if [*map(len, numbers)] != [*map(len, groups)]:
        return "the groups of parameters have other sizes"
    indices = [*chain(*numbers)]
    parameters = dict(zip(indices, chain(*groups), strict=True))
    if len(parameters) != len(indices) or not states.keys() <= parameters.keys():
        return "the optimiser's state is misnumbered"
    absent = [n for n, each in parameters.items() if each.requires_grad and n not in states]
    if len(absent) != without_state:
        return f"{len(absent)} parameters have no state of the optimiser, and {without_state} had"
    strict = type(optimizer).__module__.startswith("torch.optim")
    for number, state in states.items():
        own = parameters[number]
        expected = {name: _like(name, value, own, strict) for name, value in state.items()}
        if fault := _tensor_fault(expected, state):
            return f"state {number} of the optimiser: {fault}"
    return None


def _like(name: str, value: Any, parameter: torch.Tensor, strict: bool) -> Any:
    """Return what has the form of a parameter's state; of other kinds, the state itself.

    Optimisers of others (``strict=False``) may keep moments in half precision, and other state.
    """
    known = strict or name.startswith(_MOMENTS)
    if not isinstance(value, torch.Tensor) or name.endswith(_FACTORED) or not known:
        return value
    if name in _SCALARS:
        return torch.empty((), dtype=value.dtype)
    return parameter if strict else torch.empty_like(parameter, dtype=value.dtype, device="meta")


def _tensor_fault(own: dict[str, Any], saved: dict[str, Any]) -> str | None:
    """Return the first difference of names, shapes and types, or a value that is not finite."""
    if odd := sorted(own.keys() ^ saved.keys()):
        return f"{odd[0]} is missing or unknown"
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            expected = own[name]
            if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                return (
                    f"{name} is {tuple(value.shape)} {value.dtype} instead of "
                    f"{tuple(expected.shape)} {expected.dtype}"
                )
            if not value.isfinite().all():
                return f"{name} is not finite"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
    return None


def _card(runner, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the data and the recipe for the checkpoint's model card, without results.

    The last validation measured earlier weights.
    """
    facts = run_facts(runner)
    facts.pop("Validation", None)
    facts["Training"]["Iterations"] = f"{meta['iter']:,}"
    if "Epochs" in facts["Training"]:
        facts["Training"]["Epochs"] = meta["epoch"]
    return plain_values(facts)
