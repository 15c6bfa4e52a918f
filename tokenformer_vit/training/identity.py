"""The identity of a run's data, which a resumed run compares."""

import hashlib
from pathlib import PurePath
from typing import Any

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


def check_identity(before: dict[str, Any] | None, now: dict[str, Any], logger: Any) -> None:
    """Compare the data of a checkpoint with the data of the run that resumes from it.

    Args:
        before: Identity in the checkpoint; None for one of an older version.
        now: Identity of this run.
        logger: Logger, for a warning if ``before`` is None.

    Raises:
        InputError: If a value differs; the message gives both.
    """
    if before is None:
        logger.warning(
            "The checkpoint does not name its training data (an older version wrote it): check "
            "that this run has the same data."
        )
        return
    for key, words in _WORDS.items():
        if before.get(key) != now[key]:
            raise InputError(
                f"{words} was {_short(before.get(key))} in the checkpoint and is "
                f"{_short(now[key])} now: use the old value, or start a new run from the weights "
                "(`--cfg-options load_from=CHECKPOINT`) in another --work-dir"
            )


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
