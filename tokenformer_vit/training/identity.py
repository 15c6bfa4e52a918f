"""The identity of a run's data, which a resumed run compares."""

import hashlib
from pathlib import PurePath
from typing import Any

from mmengine.dist import get_world_size

from tokenformer_vit.errors import InputError

# What each entry is called in messages.
_WORDS = {
    "samples_per_iteration": "the batch size times the number of processes",
    "samples": "the number of training samples",
    "files": "the hash of training images (names or sizes) and labels",
}


def run_identity(runner) -> dict[str, Any]:
    """Return the facts that must stay the same for an exact resume.

    Returns:
        ``samples_per_iteration``, the batch size times the number of processes; ``samples``, the
        number of training samples; ``files``, a SHA-256 of file names and labels or the data set's
        own ``fingerprint()``, or None if there is neither. The folder of the data may change.
    """
    loader = runner.train_dataloader
    return {
        "samples_per_iteration": loader.batch_size * runner.world_size,
        "samples": len(loader.dataset),
        "files": _hash_files(loader.dataset),
    }


def check_identity(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the data of a checkpoint with the data of the run that resumes from it.

    Args:
        before: Identity in the checkpoint.
        now: Identity of this run.

    Raises:
        InputError: If a value differs; the message gives both.
    """
    for key, words in _WORDS.items():
        if before.get(key) != now[key]:
            raise InputError(
                f"{words} was {_short(before.get(key))} in the checkpoint and is "
                f"{_short(now[key])} now: use the old value, or start a new run from the weights "
                "(`--cfg-options load_from=CHECKPOINT`) in another --work-dir"
            )


def say_identity(identity: dict[str, Any]) -> dict[str, str]:
    """Return the values of an identity by what they are called in messages."""
    return {words: _short(identity[key]) for key, words in _WORDS.items()}


def check_processes(resumed: dict[str, Any]) -> None:
    """Check that a run resumes with as many processes as its checkpoint has.

    Args:
        resumed: Content of the checkpoint under ``exact_resume``.

    Raises:
        InputError: If the numbers differ; the message says how to resume all the same.
    """
    before, now = len(resumed["rng"]), get_world_size()
    if before != now:
        raise InputError(
            f"the checkpoint is of a run with {before} processes, and this run has {now}, which "
            f"would draw other random numbers: start {before} processes, or add --elastic to "
            "continue with as many samples a step"
        )


def keep_samples(checkpoint: dict[str, Any], batch_size: int) -> int:
    """Return the batch size with which a step takes as many samples as in a checkpoint.

    Args:
        checkpoint: Checkpoint of a run with any number of processes.
        batch_size: The result for a checkpoint without ``exact_resume``.

    Raises:
        InputError: If the processes cannot take equal parts of a step.
    """
    run = (checkpoint.get("exact_resume") or {}).get("run")
    if run is None:
        return batch_size
    samples, now = run["samples_per_iteration"], get_world_size()
    if samples % now:
        raise InputError(
            f"--elastic: {now} processes cannot share the {samples} samples of an iteration "
            f"equally: start a number of processes that divides {samples}"
        )
    return samples // now


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _hash_files(dataset: Any) -> str | None:
    if hasattr(dataset, "fingerprint"):
        return dataset.fingerprint()
    if not hasattr(dataset, "get_data_info"):
        return None
    digest = hashlib.sha256()
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        name = "/".join(PurePath(str(info.get("img_path"))).parts[-2:])  # class folder and file
        digest.update(f"{name}\t{info.get('gt_label')}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
