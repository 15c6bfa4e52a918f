"""Files that are never half-written, and checkpoints that are loaded without running their code."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from mmengine.fileio import LocalBackend, register_backend
from mmengine.runner import CheckpointLoader
from safetensors import SafetensorError
from safetensors.torch import load_file

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.models import classifier_state_dict


class AtomicLocalBackend(LocalBackend):
    """mmengine's local files, but a file appears whole under its name or not at all."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write ``obj`` beside ``filepath``, flush it to the disk, then rename it.

        Raises:
            InputError: If the disk is full or cannot be written; what was there before stays.
        """
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_whole(path, obj)
        except OSError as error:
            raise InputError(
                f"cannot write {path} ({error.strerror}); earlier files are intact: free some "
                "space, then run the same command with --resume"
            ) from error

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write text as :meth:`put` writes bytes."""
        self.put(obj.encode(encoding), filepath)


def load_plain_checkpoint(filename: str, map_location: Any = None) -> dict[str, Any]:
    """Load a checkpoint of tensors and plain values; mmengine's loader for local files.

    Args:
        filename: ``.pth`` file, or ``.safetensors`` file of a timm model.
        map_location: As in ``torch.load``.

    Returns:
        The checkpoint; of a safetensors file ``state_dict``, with a classifier's names, and
        ``meta`` with the class names that its export wrote down.

    Raises:
        InputError: If the file is missing, damaged, or would have to run code to be read.
    """
    path = Path(filename).expanduser()
    if not path.is_file():
        raise InputError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path, device=str(map_location or "cpu"))
            checkpoint: dict[str, Any] = {"state_dict": classifier_state_dict(tensors)}
            config = path.with_name("config.json")  # timm's, beside an exported file
            names = json.loads(config.read_text()).get("label_names") if config.is_file() else None
            if names:
                checkpoint["meta"] = {"dataset_meta": {"classes": names}}
            return checkpoint
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is damaged or holds more than tensors and plain values; it was not loaded, "
            "since it could run code"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is not a readable checkpoint ({reason})") from error


register_backend("local", AtomicLocalBackend, force=True, prefixes="")
CheckpointLoader.register_scheme(prefixes="", loader=load_plain_checkpoint, force=True)
