"""Checkpoints for an exact resume: a killed run continues as if it had not been killed."""

import math
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import (
    all_gather_object,
    all_reduce,
    barrier,
    get_rank,
    get_world_size,
    is_main_process,
)
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, EMAHook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop, set_random_seed

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import DESCRIPTION, model_computation

from .background import BackgroundWriter
from .data.sampler import ResumableSampler, Seeded
from .distributed import unwrap
from .export import describe_classifier, run_facts
from .guard import check_finite
from .identity import check_identity, check_processes, run_identity, say_identity
from .loop import ResumableEpochLoop, validation_is_due
from .metrics import SumMetric
from .mmengine_internals import is_resuming
from .parameter_groups import fit_groups
from .processes import check_alike
from .random_state import rng_state, set_rng_state
from .schedule import (
    check_schedule_is_kept,
    check_training_is_kept,
    schedule_settings,
    training_settings,
)
from .storage import plain_values, secure_files
from .termination import STATUS, Agreement, PatientWorker, Termination

# Checkpoints written at a SIGTERM and after some minutes; the next checkpoint replaces them.
STOPPED, TIMED = "stopped.pth", "timed.pth"
# What a checkpoint has under "exact_resume".
_PARTS = {
    *(
        "rng",
        "sampler_seed",
        "data_seed",
        "iters_per_epoch",
        "schedule",
        "training",
        "run",
        "gradients",
    ),
    *("early_stopping", "without_state"),
}


@HOOKS.register_module()
class ExactCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, which also saves what an exact resume needs.

    A checkpoint also holds the random state of every process, the seed of the sampler, the
    gradients that are still being accumulated, the identity of the data, and a description of the
    model and its preprocessing. It has tensors and plain values only, so it loads with
    ``torch.load(..., weights_only=True)``. An old checkpoint is deleted only after the next one is
    on the disk. mmengine deletes the old best one first; after a kill in between, the resumed run
    validates again and writes it.

    In a :class:`~tokenformer_vit.training.launch.TrainingRunner` a checkpoint is copied, and the
    copy is written while the run continues. A run ends only after its last checkpoint is complete.
    If a checkpoint cannot be written, the run stops at the next iteration.

    Within an epoch, a run by epochs resumes only with this package's loop and sampler.

    On resume, the validation that was due at the checkpoint runs again, because the run may have
    been killed during it. A SIGTERM ends the run after the present iteration, or after the next one
    if there are several processes; its checkpoint is ``stopped.pth``.

    Args:
        minutes: Also write the checkpoint ``timed.pth`` whenever so many minutes have passed since
            the last checkpoint. The first process decides for all.
        background: Whether the run continues while a checkpoint is written.
        elastic: Whether a run may resume with another number of processes, if each step still takes
            as many images. Dropout and mixup then draw other numbers, the same at each resume.
        **kwargs: As for ``CheckpointHook``.

    Note:
        After a resume the losses equal the losses of an uninterrupted run, bit for bit, if the
        number of processes and the batch size are the same and the operations are deterministic.
        With several processes and pending gradients they agree to rounding, because the checkpoint
        has the mean of these gradients.
    """

    _progress: dict[str, Any] | None = None
    _resumed: dict[str, Any] | None = None
    _identity: dict[str, Any] | None = None
    _termination: Termination | None = None

    def __init__(
        self,
        *args: Any,
        minutes: float | None = None,
        background: bool = True,
        elastic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        secure_files()
        self._minutes, self._background, self._elastic = minutes, background, elastic
        self._writer = BackgroundWriter()

    def before_train(self, runner) -> None:
        """Restore the state of the checkpoint, if the run resumes from one."""
        super().before_train(runner)
        self._keep_best_within(runner)
        metrics = [] if runner.val_loop is None else runner.val_loop.evaluator.metrics
        known = [metric for metric in metrics if isinstance(metric, SumMetric)]
        if self.save_best and known and len(known) == len(metrics):
            # The first validation finds the sizes of a nested model.
            self._check_best({name for each in known for name in each.figures()}, "_at_")
        loader = runner.train_dataloader
        self._identity = run_identity(runner)
        check_alike({**say_identity(self._identity), **schedule_settings(runner)})
        # mmengine's own runner has no writer: it returns when a checkpoint is on the disk.
        self._writer = getattr(runner, "writer", self._writer)
        self._writer.background = self._background
        self._saved, self._saved_at = time.monotonic(), runner.iter
        self._agreement = Agreement()
        self._termination = Termination()
        self._termination.begin()
        # Iterators draw a seed for their workers. From the global generator, that would shift all
        # later random numbers at each start of an epoch, a validation, or a resume.
        loaders = [loader] if runner.val_loop is None else [loader, runner.val_dataloader]
        for each in loaders:
            each.generator = torch.Generator()
            each.worker_init_fn = PatientWorker(each.worker_init_fn, self._termination.running)
        if not isinstance(loader.dataset, Seeded):
            runner.logger.warning(
                f"With {type(loader.sampler).__name__}, the augmentation after a resume differs "
                "from that of an uninterrupted run: train_dataloader.sampler.type="
                "'ResumableSampler' repeats it exactly."
            )
        if self._resumed is None:
            return
        if not self._elastic:
            check_processes(self._resumed)
        if self._resumed["iters_per_epoch"] != len(loader):
            raise InputError(
                f"the checkpoint is of a run with {self._resumed['iters_per_epoch']} iterations an "
                f"epoch, this run has {len(loader)}: resume with the same data and the same batch "
                "size times number of processes, or start a new run from its weights with "
                "`--cfg-options load_from=CHECKPOINT`"
            )
        _check_resumable_here(runner)
        check_identity(self._resumed["run"], self._identity)
        loader.sampler.seed = self._resumed["sampler_seed"]
        if isinstance(loader.dataset, Seeded):
            loader.dataset.seed = self._resumed["data_seed"]
        parameters = dict(unwrap(runner.model).named_parameters())
        for name, gradient in self._resumed["gradients"].items():
            parameters[name].grad = gradient.to(parameters[name])
        counts = self._resumed["early_stopping"]
        for hook, count in zip(_early_stopping_hooks(runner), counts, strict=False):
            hook.wait_count, hook.best_score = count
        if runner.val_loop is not None and validation_is_due(runner.train_loop):
            runner.val_loop.run()

    def _check_best(self, figures: Collection[str], end: str | None = None) -> None:
        """Check that validation measures what chooses the best checkpoint.

        Args:
            figures: Names of what it measures.
            end: What begins a part of a name that ``figures`` do not have.
        """
        for name in self.key_indicators if self.save_best else ():
            measured = name if end is None else name.partition(end)[0]
            if name != "auto" and measured not in figures:
                raise InputError(
                    f"default_hooks.checkpoint.save_best is {name!r}, but validation measures "
                    f"{', '.join(sorted(figures))}: give one of them, or None to keep no best "
                    "checkpoint"
                )

    def _keep_best_within(self, runner) -> None:
        """Forget a best checkpoint that is not a file of this run.

        mmengine removes the best checkpoint when there is a better one, whatever path or folder a
        resumed checkpoint names.
        """
        info = runner.message_hub.runtime_info
        for key in [key for key in info if key.startswith("best_ckpt")]:
            info[key] = self._own_best(info[key])
        self.best_ckpt_path = self._own_best(getattr(self, "best_ckpt_path", None))
        paths = getattr(self, "best_ckpt_path_dict", {})
        self.best_ckpt_path_dict = {key: self._own_best(path) for key, path in paths.items()}

    def _own_best(self, path: Any) -> str | None:
        name = Path(path).name if isinstance(path, str) else ""
        own = Path(self.out_dir, name)
        is_best = name.startswith("best_") and name.endswith(".pth")
        return str(own) if is_best and own.is_file() and not own.is_symlink() else None

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
        runner.logger.warning(
            f"The checkpoint was written by {len(states)} processes, this run has "
            f"{get_world_size()}: each step takes the same samples, but dropout, drop path and "
            "mixup draw other random numbers."
        )

    def after_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Save, if a checkpoint is due or a SIGTERM came."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)  # type: ignore[arg-type]
        if self._termination is None:
            return
        self._writer.check()
        passed = (time.monotonic() - self._saved) / 60
        due = self._minutes is not None and is_main_process() and passed >= self._minutes
        stopped, due = self._agreement.any(self._termination.noted, due)
        if stopped:
            self._stop(runner)
        elif due and self._saved_at < runner.iter:  # else it was due before the last checkpoint
            self._save_between(runner, TIMED)

    def _stop(self, runner) -> None:
        """Write a checkpoint and end the process."""
        path = self._save_between(runner, STOPPED)
        self._writer.wait()
        if is_main_process():
            runner.logger.info(
                f"Stopped by SIGTERM after iteration {runner.iter + 1}. The checkpoint {path} is "
                "complete: run the same command with --resume to continue."
            )
        barrier()  # a launcher stops all processes as soon as one of them ends
        raise SystemExit(STATUS)

    def after_val_epoch(self, runner, metrics: dict[str, Any]) -> None:  # type: ignore[override]
        """Save the best checkpoint."""
        if metrics:
            self._check_best(metrics)
        self._writer.wait()  # mmengine deletes the former best one, which may not be written yet
        super().after_val_epoch(runner, metrics)

    def after_train(self, runner) -> None:
        """Wait for the last checkpoint; the files of a finished run are written after it."""
        self._writer.wait()
        super().after_train(runner)

    def release(self) -> None:
        """Let a SIGTERM end the process again."""
        if self._termination is not None:
            self._termination.end()

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Read our part of a checkpoint, and convert the rest for mmengine."""
        if not is_resuming(runner):
            return
        if "optimizer" not in checkpoint or "exact_resume" not in checkpoint:
            raise InputError(
                "the checkpoint has only weights, not the state of a run: resume from the file "
                "that `last_checkpoint` names, or start a new run from its weights with "
                "`--cfg-options load_from=CHECKPOINT`"
            )
        averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
        averaged = checkpoint.get("meta", {}).get("averaged", True)
        if "ema_state_dict" in checkpoint and averaged and not averages:
            raise InputError(  # an EMAHook would exchange the two models of the checkpoint
                "the checkpoint is of a run that averages its weights, but this run has no "
                "EMAHook and would train the average: give the run its default_hooks.ema again, or "
                "start a new run from the average with `--cfg-options load_from=CHECKPOINT`"
            )
        try:
            self._take(runner, checkpoint)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the checkpoint's state of the run cannot be read by this version "
                f"({type(error).__name__}: {error}): resume from another checkpoint, or start a "
                "new run from its weights with `--cfg-options load_from=CHECKPOINT`"
            ) from error
        assert self._resumed is not None
        check_schedule_is_kept(runner, self._resumed)  # PyTorch refuses other groups without a name
        check_training_is_kept(runner.cfg, self._resumed["training"])
        fault = state_fault(runner, checkpoint, self._resumed["without_state"])
        if fault is not None:
            raise InputError(
                f"the checkpoint's state of the run is damaged: {fault}; resume from another "
                "checkpoint, or start a new run from its weights with `--cfg-options "
                "load_from=CHECKPOINT`"
            )

    def _take(self, runner, checkpoint: dict) -> None:
        resumed: dict[str, Any] = checkpoint.pop("exact_resume")
        self._resumed = resumed
        absent = _PARTS - {*resumed}
        if absent:
            raise KeyError(*sorted(absent))
        optimizer = runner.optim_wrapper.optimizer
        fit_groups(optimizer, checkpoint["optimizer"]["param_groups"])
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
        name = self.filename_tmpl.format
        check_finite(runner)
        expired = []
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                expired = [name(self.keep_ckpt_ids.popleft())]
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info("keep_ckpt_ids", list(self.keep_ckpt_ids))
        self.last_ckpt = self._save(runner, name(step), meta, expired)

    def _save_between(self, runner, name: str) -> str:
        """Save a checkpoint that the next one replaces, and return its path."""
        check_finite(runner)
        return self._save(runner, name, {"epoch": runner.epoch, "iter": runner.iter + 1})

    def _save(self, runner, name: str, meta: dict, expired: Sequence[str] = ()) -> str:
        """Save a checkpoint under a name, and delete expired ones once it is complete."""
        path = self.file_backend.join_path(self.out_dir, name)
        runner.message_hub.update_info("last_ckpt", path)
        self._progress = self._collect(runner)
        runner.save_checkpoint(
            self.out_dir,
            name,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        self._progress = None
        self._saved, self._saved_at = time.monotonic(), meta["iter"]
        if is_main_process():
            replaced = {*expired, STOPPED, TIMED} - {name}
            self._writer.then(partial(self._replace, runner, path, replaced))
        return path

    def _replace(self, runner, path: str, names: Iterable[str]) -> None:
        """Name a complete checkpoint as the one to resume from, and delete others."""
        self._point_to(runner, path)
        for other in (self.file_backend.join_path(self.out_dir, name) for name in names):
            if self.file_backend.isfile(other):
                self.file_backend.remove(other)

    def _point_to(self, runner, path: str) -> None:
        """Name the checkpoint to resume from."""
        last = self.file_backend.join_path(runner.work_dir, "last_checkpoint")
        self.file_backend.put_text(path, last)

    def _collect(self, runner) -> dict[str, Any]:
        """Gather from all processes what an exact resume needs."""
        # A run that resumes after the last iteration of an epoch saves that epoch before it trains.
        self._restore_rng(runner)
        gradients = {}
        if not runner.optim_wrapper.should_update():
            for name, parameter in unwrap(runner.model).named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.clone()
                    all_reduce(gradients[name], op="mean")
        return {
            "rng": all_gather_object(rng_state()),
            "sampler_seed": runner.train_dataloader.sampler.seed,
            "data_seed": getattr(runner.train_dataloader.dataset, "seed", None),
            "iters_per_epoch": len(runner.train_dataloader),
            "schedule": schedule_settings(runner),
            "training": training_settings(runner.cfg),
            "run": self._identity,
            "gradients": gradients,
            "without_state": len(_without_state(runner.optim_wrapper.optimizer)),
            "early_stopping": [
                (hook.wait_count, float(hook.best_score)) for hook in _early_stopping_hooks(runner)
            ],
        }


def state_fault(runner: Any, checkpoint: dict[str, Any], without_state: int) -> str | None:
    """Find what does not fit in the state of a run, before any of it is loaded.

    PyTorch compares only the sizes of groups, and a fused optimiser writes outside moments of
    another shape.

    Args:
        runner: The runner that resumes.
        checkpoint: Checkpoint with the state.
        without_state: Number of trained parameters that had no state when it was saved.
    """
    done, end = checkpoint["meta"]["iter"], runner.max_iters
    if not 0 <= done <= end:
        return f"it is of iteration {done} of {end}"
    schedules = runner.param_schedulers or []
    if len(checkpoint.get("param_schedulers", ())) != len(schedules):
        return f"it has {len(checkpoint.get('param_schedulers', ()))} of {len(schedules)} schedules"
    own = {"state_dict": unwrap(runner.model).state_dict()}
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and "ema_state_dict" in checkpoint:
            own["ema_state_dict"] = hook.ema_model.state_dict()
    for part, tensors in own.items():
        if fault := _tensor_fault(tensors, checkpoint[part]):
            return f"{part}: {fault}"
    return _optimizer_fault(runner.optim_wrapper.optimizer, checkpoint["optimizer"], without_state)


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
    for number, state in states.items():
        own = parameters[number]
        expected = {name: _like(name, value, own) for name, value in state.items()}
        if fault := _tensor_fault(expected, state):
            return f"state {number} of the optimiser: {fault}"
    return None


# State of PyTorch's optimisers that is one number for a parameter.
_SCALARS = ("step", "mu_product", "eta", "mu")


def _like(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """Return what has the form of a parameter's state; of other kinds, the state itself."""
    if not isinstance(value, torch.Tensor) or name.endswith(("_row", "_col")):  # Adafactor's
        return value
    return torch.empty((), dtype=value.dtype) if name in _SCALARS else parameter


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


def _without_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [each for each in every if each.requires_grad and each not in optimizer.state]


def _early_stopping_hooks(runner) -> list[EarlyStoppingHook]:
    return [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]


def _check_resumable_here(runner) -> None:
    """Check that loop and sampler can start where the checkpoint is.

    Raises:
        InputError: If it is within an epoch, and one of them would start the epoch again.
    """
    loop, loader = runner.train_loop, runner.train_dataloader
    if isinstance(loop, IterBasedTrainLoop):
        return  # mmengine's reads the data before its start again, ours skips them
    ours = isinstance(loop, ResumableEpochLoop)
    if runner.iter % len(loader) and not (ours and isinstance(loader.sampler, ResumableSampler)):
        raise InputError(
            f"the checkpoint is of iteration {runner.iter}, within an epoch of {len(loader)}, but "
            f"{type(loop).__name__} with {type(loader.sampler).__name__} resumes only between "
            "epochs: resume from a checkpoint of the end of an epoch, or start a new run from its "
            "weights with `--cfg-options load_from=CHECKPOINT`, train_cfg.type="
            "'ResumableEpochLoop' and train_dataloader.sampler.type='ResumableSampler'"
        )


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
