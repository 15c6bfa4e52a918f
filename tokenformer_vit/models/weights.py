"""The only reader of weight files: it runs no code and refuses damaged files and invalid tensors.

:func:`check_tensors` checks every tensor of a model that comes from a file. Files of this package
contain a SHA-256 of their tensors, which :func:`read_checkpoint` verifies. PyTorch's files are zip
archives with a checksum for every member; ``torch.load`` does not verify it, but this module does.
"""

import hashlib
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from timm.models import clean_state_dict
from torch import Tensor

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import write_whole

# The keys of weights in training checkpoints, averaged weights first: timm's keys, then mmengine's,
# whose `state_dict` is the averaged model.
_STATE_DICTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Names of learned tensors, which must have a floating-point type in every model.
_LEARNED = re.compile(r"(.*[._])?(weight|bias|gamma|tokens?|pos_embed|tau|gate|original[01])")
# Names of causal masks in old files of GPT-2 and GPT-NeoX.
_MASK = re.compile(r"(.*\.)?(attn|attention)\.bias")
_SHA256 = "sha256"


class LogHistory:
    """One series of a log in a checkpoint of mmengine, read in place of its ``HistoryBuffer``.

    mmengine's class would also take its methods from the file.

    Attributes:
        values: (N,) logged numbers.
        counts: (N,) number of samples of each.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the numbers of a pickled ``HistoryBuffer``."""
        self.values, self.counts = (
            np.asarray(state[name], dtype=np.float64) for name in ("_log_history", "_count_history")
        )
        if self.values.shape != self.counts.shape or self.values.ndim != 1:
            raise ValueError("a series of the log has not as many counts as values")


class _NumberType:
    """The type of an array's numbers, in place of ``numpy.dtype``.

    NumPy's own takes flags from the file, and would follow them into any memory.
    """

    _order = "="

    def __init__(self, name: str, *_: Any) -> None:
        self._name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    def read(self, raw: bytes) -> np.ndarray:
        """Return a copy of raw numbers."""
        if self._name not in ("f8", "f4", "i8", "i4", "b1"):
            raise ValueError(f"an array of {self._name!r} is not of plain numbers")
        order = self._order if self._order in ("<", ">") else "="
        return np.frombuffer(raw, np.dtype(self._name).newbyteorder(order)).copy()


class _Array:
    """An array of plain numbers, in place of ``numpy.ndarray``."""

    def __init__(self, *_: Any) -> None:
        self._numbers = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, in_columns, raw = state
        self._numbers = kind.read(raw).reshape(shape, order="F" if in_columns else "C")

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.array(self._numbers, *args, **kwargs)


def _number(kind: _NumberType, raw: bytes) -> float:
    """Read a single number of NumPy."""
    return kind.read(raw).item()


def _nothing(*names: Any) -> None:
    """Stand for a class or a method that a file names and nobody needs."""


# What mmengine's own CheckpointHook writes beside tensors and plain values: its log, and arrays and
# numbers of NumPy. Pickles of NumPy 1 and 2 name its modules differently.
_OF_MMENGINE = [
    (LogHistory, "mmengine.logging.history_buffer.HistoryBuffer"),
    (_nothing, "builtins.getattr"),
    (_nothing, "numpy.ndarray"),
    (_NumberType, "numpy.dtype"),
    *(
        (own, f"numpy.{core}.multiarray.{name}")
        for own, name in ((_Array, "_reconstruct"), (_number, "scalar"))
        for core in ("_core", "core")
    ),
]


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a weight file or a training checkpoint without running code from it.

    Args:
        path: ``.safetensors`` file, or a file of ``torch.save``.
        map_location: Device of the tensors, as in ``torch.load``.

    Returns:
        The content of the file; ``{"state_dict": tensors}`` for a ``.safetensors`` file. The log in
        a checkpoint of mmengine's own hook has a :class:`LogHistory` for each series.

    Raises:
        InputError: If the file does not exist, is damaged, holds more than tensors and plain
            values, or has a tensor that a model cannot use (see :func:`check_tensors`).
    """
    path = Path(path).expanduser()
    if not path.is_file():  # also refuses named pipes and devices
        raise InputError(f"there is no checkpoint file {path}")
    try:
        if path.suffix == ".safetensors":
            checkpoint: Any = {"state_dict": _read_safetensors(path, map_location)}
        else:
            _check_archive(path)
            with torch.serialization.safe_globals(_OF_MMENGINE):
                checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is damaged or holds more than tensors and plain values. It was not loaded, "
            "because loading could run code. Save only the state dict, preferably as .safetensors "
            f"({one_line(error)}){_others(path)}"
        ) from error
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a readable safetensors file: {one_line(error)}; copy or export it again"
        ) from error
    except Exception as error:  # on foreign bytes torch.load may raise nearly anything
        raise InputError(
            f"{path} is not a readable checkpoint ({one_line(error)}); copy it again{_others(path)}"
        ) from error
    if not isinstance(checkpoint, dict):
        raise InputError(
            f"{path} holds a {type(checkpoint).__name__}, not a state dict: save model.state_dict()"
        )
    parts = [checkpoint.get(name) for name in (*_STATE_DICTS, "ema_state_dict")]
    for part in (checkpoint, *parts):
        if isinstance(part, Mapping):
            check_tensors(part, path)
    return checkpoint


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a model; from a training checkpoint those that were validated.

    Args:
        path: File for :func:`read_checkpoint`, written by timm, mmengine or ``torch.save``.

    Returns:
        The tensors by name, on the CPU, without the prefix of a data-parallel wrapper.

    Raises:
        InputError: As :func:`read_checkpoint`, or if the file has no state dict.
    """
    return state_dict_in(read_checkpoint(path), path)


def state_dict_in(checkpoint: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a model in the result of :func:`read_checkpoint`."""
    found = next(
        (checkpoint[name] for name in _STATE_DICTS if isinstance(checkpoint.get(name), Mapping)),
        checkpoint,
    )
    if not found or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        names = ", ".join(map(str, list(found)[:5]))
        raise InputError(
            f"{path} holds no state dict (found: {names or 'nothing'}); save model.state_dict()"
        )
    return clean_state_dict(dict(found))


def check_tensors(tensors: Mapping[str, Any], where: str | Path) -> None:
    """Refuse tensors that a trained model cannot have.

    Args:
        tensors: Tensors by name. Values that are not tensors are skipped.
        where: Name of their file, for the message.

    Raises:
        InputError: If a floating-point tensor holds NaN or infinity, a learned tensor has no
            floating-point type, a τ is not one positive number, or a tensor is sparse or quantised.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        fault = _fault(str(name), tensor)
        if fault:
            raise InputError(f"{where}: {name} {fault}")


def _fault(name: str, tensor: Tensor) -> str | None:
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return "is sparse, quantised or without values; save it as an ordinary tensor"
    if tensor.untyped_storage().nbytes() < tensor.nbytes:  # reading it would exhaust the memory
        return f"repeats few values as {tuple(tensor.shape)}; save it as an ordinary tensor"
    if not tensor.is_floating_point():
        mask = tensor.dtype in (torch.bool, torch.uint8) and _MASK.fullmatch(name)
        if _LEARNED.fullmatch(name) and not mask:
            return f"is of type {kind}, but weights must have a floating-point type"
        return None
    values = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no isfinite
    if not values.isfinite().all():
        return (
            "holds NaN or infinity: the file is damaged, or the training diverged; use an earlier "
            "checkpoint"
        )
    last = name.rpartition(".")[2]
    if last == "nested_tau" and not (tensor > 0).all():
        return f"is {tensor.tolist()}, but τ must be positive; the file is damaged"
    if last == "tau" and not (tensor.numel() == 1 and tensor.item() > 0):
        return f"is {tensor.tolist()}, but τ must be one positive number; the file is damaged"
    return None


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, types, shapes and values of tensors, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_digest(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Compare tensors with the SHA-256 in their ``.safetensors`` file, if it has one.

    Raises:
        InputError: If they differ.
    """
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(_SHA256)
    if expected is not None and expected != tensors_digest(tensors):
        raise InputError(
            f"{path} is damaged: the SHA-256 of its tensors is wrong; copy or export it again"
            f"{_others(path)}"
        )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a ``.safetensors`` file with the SHA-256 of its tensors, completely or not at all.

    Args:
        path: Path of the file.
        tensors: Tensors by name; no two may share memory.
        metadata: More text for the header.

    Raises:
        OSError: If the file cannot be written; ``filename`` is ``path``.
    """
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    data = save(plain)
    # The library writes several entries of metadata in random order, but equal tensors should give
    # equal files. A file has 8 bytes of length, the header in JSON, then the numbers.
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = {"format": "pt", **(metadata or {}), _SHA256: tensors_digest(plain)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers must begin at a multiple of 8 bytes
    write_whole(path, len(text).to_bytes(8, "little") + text + data[start:])


def seal_tensors(path: Path) -> None:
    """Add the SHA-256 to a ``.safetensors`` file of another library.

    Raises:
        OSError: If the file cannot be written; ``filename`` is ``path``.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    write_tensors(path, load_file(path), metadata)


def _read_safetensors(path: Path, map_location: Any) -> dict[str, Tensor]:
    tensors = load_file(path, device=str(map_location or "cpu"))
    check_digest(tensors, path)
    return tensors


def _check_archive(path: Path) -> None:
    """Verify the checksums of a file of ``torch.save``, which is a zip archive."""
    if not zipfile.is_zipfile(path):
        return  # the format from before 2020, which has no checksums
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if packed or sum(member.file_size for member in members) > path.stat().st_size:
            raise InputError(
                f"{path} is a compressed archive, which torch.save does not write; unpack it"
            )
        damaged = archive.testzip()
    if damaged is not None:
        raise InputError(
            f"{path} is damaged: the checksum of {damaged} in it is wrong; copy it again"
            f"{_others(path)}"
        )


def _others(path: Path) -> str:
    """Name the other checkpoints in the folder of one that cannot be read, newest first."""
    if path.suffix != ".pth":
        return ""
    others = [file for file in path.parent.glob("*.pth") if file != path and file.is_file()]
    others.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return f", or use {' or '.join(file.name for file in others[:3])}" if others else ""
