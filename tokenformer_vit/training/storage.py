"""Files of mmengine: a written file is complete or absent, and a read runs no code."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
import yaml
from mmengine.fileio import (
    LocalBackend,
    PickleHandler,
    YamlHandler,
    get_file_backend,
    register_backend,
    register_handler,
)
from mmengine.runner import CheckpointLoader, save_checkpoint

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.mmpretrain_names import classifier_state_dict
from tokenformer_vit.models.checkpoints import (
    DESCRIPTION,
    description_of,
    read_checkpoint,
    state_dict_in,
)

from .mmengine_internals import checkpoint_schemes
from .processes import from_first

# A tensor of each of timm's ViTs. In a classifier of mmpretrain its name begins with `backbone.`.
_TIMM_STEM = "patch_embed.proj.weight"


class _Skipped:
    """Stands for the log in a checkpoint of mmengine, whose own class would call what it reads."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Forget the content."""


def _number(kind: _Skipped, raw: bytes) -> Any:
    """Read a number of NumPy, whose own types would take flags from the file."""
    return np.frombuffer(raw, kind.args[0])[0].item()


# What mmengine's own CheckpointHook writes: its log, and numbers of NumPy.
_SKIPPED: list[Any] = [
    (_Skipped, "builtins.getattr"),
    (_Skipped, "mmengine.logging.history_buffer.HistoryBuffer"),
    *((_Skipped, f"numpy.{name}") for name in ("dtype", "ndarray")),
    (_Skipped, "numpy._core.multiarray._reconstruct"),
    (_number, "numpy._core.multiarray.scalar"),
]


class AtomicLocalBackend(LocalBackend):
    """mmengine's local files; a new file gets its name only when it is complete."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write ``obj`` to a temporary file, flush it to the disk, then rename it.

        Raises:
            InputError: If the disk is full or cannot be written; an earlier file stays.
        """
        with _complete(Path(filepath)) as file:
            file.write(obj)

    def save(self, checkpoint: Mapping[str, Any], filepath: str | Path) -> None:
        """Write a checkpoint as :meth:`put` writes bytes, without a copy of it in memory."""
        with _complete(Path(filepath)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # PyTorch hides the error of the disk
                    raise error.__context__ from error
                raise

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write text as :meth:`put` writes bytes."""
        self.put(obj.encode(encoding), filepath)


@contextmanager
def _complete(path: Path) -> Iterator[BinaryIO]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}); earlier files are intact: free some "
            "space, then run the same command with --resume"
        ) from error


def write_checkpoint(
    checkpoint: dict[str, Any], path: str, backend_args: dict | None = None
) -> None:
    """Write a checkpoint to a disk, or to another storage of mmengine.

    Raises:
        InputError: If the disk is full or cannot be written; an earlier file stays.
    """
    backend = get_file_backend(path, backend_args=backend_args)
    if isinstance(backend, AtomicLocalBackend):
        backend.save(checkpoint, path)
    else:
        save_checkpoint(checkpoint, path, backend_args=backend_args)


def load_plain_checkpoint(filename: str, map_location: Any = None) -> dict[str, Any]:
    """Load a checkpoint of tensors and plain values, without running code.

    Args:
        filename: ``.pth`` file, or ``.safetensors`` file of a timm model.
        map_location: As in ``torch.load``.

    Returns:
        The checkpoint, also one of mmengine's own ``CheckpointHook``. A safetensors file, and a
        checkpoint of timm, gives ``state_dict`` with mmpretrain's names, ``meta`` with the class
        names of its export, and its description under ``DESCRIPTION``.

    Raises:
        InputError: If the file is damaged or holds more than tensors and plain values, or
            ``filename`` is a URL or a name from a model zoo.
    """
    path = Path(filename).expanduser()
    if not path.exists() and re.match(r"[A-Za-z][\w+.-]+:", filename):
        raise InputError(f"{filename} is not a local file: download it first, and give its path")
    with torch.serialization.safe_globals(_SKIPPED):
        checkpoint: dict[str, Any] = read_checkpoint(path, map_location or "cpu")
    weights = checkpoint.get("state_dict", checkpoint)
    if path.suffix == ".safetensors" or (isinstance(weights, dict) and _TIMM_STEM in weights):
        description = description_of(path, checkpoint)
        checkpoint = {"state_dict": classifier_state_dict(state_dict_in(checkpoint, path))}
        if names := description.get("label_names"):
            checkpoint["meta"] = {"dataset_meta": {"classes": names}}
        if description:
            checkpoint[DESCRIPTION] = description
    meta = checkpoint.get("meta")
    if isinstance(meta, dict):
        # mmengine's resume would run this text as Python. Its own checkpoints have it under `cfg`.
        meta.pop("config", None)
    hub = checkpoint.get("message_hub")
    if isinstance(hub, dict):  # what mmengine's own hook logs is not read; ours are dicts
        logged = hub.get("log_scalars", {}).items()
        hub["log_scalars"] = {name: each for name, each in logged if isinstance(each, dict)}
    return checkpoint


def load_checkpoint_together(filename: str, map_location: Any = None) -> dict[str, Any]:
    """Load a checkpoint in all processes of a run; only the first one reads the file.

    Arguments, result and errors are those of :func:`load_plain_checkpoint`.
    """
    return from_first(lambda: load_plain_checkpoint(filename, map_location))


class SafeYamlHandler(YamlHandler):
    """Read YAML as plain values; mmengine's own handler builds any object that a file names."""

    def load_from_fileobj(self, file, **kwargs: Any) -> Any:
        """Read a file."""
        return super().load_from_fileobj(file, Loader=yaml.SafeLoader)


class RefusedPickleHandler(PickleHandler):
    """Write pickles, but refuse to read them, because a pickle can run code."""

    def load_from_fileobj(self, file: Any, **kwargs: Any) -> NoReturn:
        """Refuse a file, such as the annotations of a data set.

        Raises:
            InputError: Always.
        """
        self.load_from_path(getattr(file, "name", None) or "a .pkl file")

    def load_from_path(self, filepath: str | Path, **kwargs: Any) -> NoReturn:
        """Refuse a file, as :meth:`load_from_fileobj` does."""
        raise InputError(f"{filepath} is not read, because a pickle can run code: save it as .json")


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
    return str(value)


def secure_files() -> None:
    """Replace how mmengine reads and writes files, in this whole process.

    A read then runs no code, and a written file is complete or absent:

    - Checkpoints: :func:`load_checkpoint_together` replaces the loaders of all prefixes. mmengine's
      own loaders unpickle any object in the file.
    - Local files: :class:`AtomicLocalBackend` replaces ``LocalBackend``.
    - ``mmengine.load`` of YAML and of pickles: :class:`SafeYamlHandler`,
      :class:`RefusedPickleHandler`.

    Importing this package replaces nothing. Python imports a package before each of its modules, so
    code in ``tokenformer_vit/training/__init__.py`` would also act on a program that only reads a
    log by :func:`tokenformer_vit.training.reports.read_scalars`. Instead, the commands call this
    function, and each part of this package that writes or receives a checkpoint calls it when it is
    built: the guard and checkpoint hooks, the backbones, ``CausalLM``. A runner builds its model
    and its hooks before it opens a checkpoint, so a config with
    ``custom_imports=["tokenformer_vit.training"]`` is also safe in mmengine's own ``Runner`` and in
    mmpretrain's inferencers. A program that uses none of these parts must call this function.

    Note:
        A second call changes nothing. The change cannot be undone, because another run in the same
        process may rely on it.
    """
    register_backend("local", AtomicLocalBackend, force=True, prefixes="")
    load, schemes = load_checkpoint_together, ["", *checkpoint_schemes()]
    CheckpointLoader.register_scheme(prefixes=schemes, loader=load, force=True)
    register_handler(["yaml", "yml"])(SafeYamlHandler)
    register_handler(["pickle", "pkl"])(RefusedPickleHandler)
