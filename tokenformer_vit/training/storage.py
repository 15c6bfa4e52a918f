"""What mmengine reads and writes: files that appear whole, and run no code."""

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from mmengine.fileio import (
    LocalBackend,
    PickleHandler,
    YamlHandler,
    register_backend,
    register_handler,
)
from mmengine.runner import CheckpointLoader

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.models import classifier_state_dict
from tokenformer_vit.models.description import find_description
from tokenformer_vit.models.weights import read_checkpoint


class AtomicLocalBackend(LocalBackend):
    """mmengine's local files, but a file appears whole under its name or not at all."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write ``obj`` beside ``filepath``, flush it to the disk, then rename it.

        Raises:
            InputError: If the disk is full or cannot be written; what was there before stays.
        """
        path = Path(filepath)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
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
    """Load a checkpoint of tensors and plain values; the one loader that mmengine is left with.

    Args:
        filename: ``.pth`` file, or ``.safetensors`` file of a timm model.
        map_location: As in ``torch.load``.

    Returns:
        The checkpoint; of a safetensors file ``state_dict``, with a classifier's names, and
        ``meta`` with the class names that its export wrote down.

    Raises:
        InputError: As :func:`~tokenformer_vit.models.weights.read_checkpoint`; or if ``filename``
            is no local file, but a URL or a name from a model zoo.
    """
    path = Path(filename).expanduser()
    if not path.exists() and re.match(r"[A-Za-z][\w+.-]+:", filename):
        raise InputError(
            f"{filename} is no local file: download it first, and give its path (files from "
            "elsewhere are read like any other, without running their code)"
        )
    checkpoint = read_checkpoint(path, map_location or "cpu")
    if path.suffix == ".safetensors":
        description = find_description(path, checkpoint) or {}
        checkpoint["state_dict"] = classifier_state_dict(checkpoint["state_dict"])
        if names := description.get("label_names"):
            checkpoint["meta"] = {"dataset_meta": {"classes": names}}
    meta = checkpoint.get("meta")
    if isinstance(meta, dict):
        # mmengine's resume would run this text as Python. Its own checkpoints have it under `cfg`.
        meta.pop("config", None)
    return checkpoint


@register_handler(["yaml", "yml"])
class SafeYamlHandler(YamlHandler):
    """Read YAML as plain values; mmengine's own loader makes any object that a file names."""

    def load_from_fileobj(self, file, **kwargs: Any) -> Any:
        """Read a file."""
        return super().load_from_fileobj(file, Loader=yaml.SafeLoader)


@register_handler(["pickle", "pkl"])
class RefusedPickleHandler(PickleHandler):
    """Write pickles, but refuse to read them: that would run their code."""

    def load_from_fileobj(self, file: Any, **kwargs: Any) -> NoReturn:
        """Refuse a file, such as the annotations of a data set.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"{getattr(file, 'name', None) or 'a .pkl file'} is not read, because a pickle can run "
            "code: save it as .json"
        )

    def load_from_path(self, filepath: str | Path, **kwargs: Any) -> NoReturn:
        """Refuse a file, as :meth:`load_from_fileobj` does."""
        raise InputError(f"{filepath} is not read, because a pickle can run code: save it as .json")


register_backend("local", AtomicLocalBackend, force=True, prefixes="")
# For every scheme that mmengine knows: its own loaders would run the code of what they download.
for _prefix in ("", *CheckpointLoader._schemes):
    CheckpointLoader.register_scheme(prefixes=_prefix, loader=load_plain_checkpoint, force=True)
