"""The configs that come with the package: in ``.mim/configs``, or in the clone's ``configs/``."""

import difflib
from contextlib import AbstractContextManager
from pathlib import Path

import tokenformer_vit
from tokenformer_vit.errors import InputError

from .mmengine_internals import bases_of_package

_PACKAGE = Path(tokenformer_vit.__file__).parent
_INSTALLED = _PACKAGE / ".mim" / "configs"  # as in OpenMMLab's packages
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"


def find_config(name: str | Path, what: str = "config") -> Path:
    """Find a config: a file, or else one that comes with the package.

    Args:
        name: Path of a file, or the name of a shipped config: ``configs/digits_demo.py``,
            ``digits_demo.py`` or ``digits_demo``.
        what: What a command takes under this name, for the message.

    Returns:
        The path of an existing file.

    Raises:
        InputError: If there is no such config; the message gives similar names. For a folder it
            gives the config that a run wrote into it, or that the training on it wrote.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.parent == Path("configs"):
        path = Path(path.name)
    elif path.is_dir() and not _shipped(str(path)).is_file():
        raise InputError(
            f"{path} is a folder, not a config: give the config of the {_example(path)}"
        )
    return _find_shipped(str(path), what)


def _example(folder: Path) -> str:
    """Name the config of a run: that in its folder, or of the training on a folder of images."""
    own = folder.resolve().name
    found = sorted(folder.glob("*.py")) if (folder / "last_checkpoint").is_file() else []
    found.append(Path("work_dirs", own, f"{own}.py"))
    return next((f"run, {path}" for path in found if path.is_file()), "training, a file *.py")


def shipped_bases() -> AbstractContextManager[None]:
    """Let configs that are read in a ``with`` block inherit from shipped ones.

    ``_base_ = "tokenformer_vit::digits_demo.py"`` then works in any folder.
    """
    return bases_of_package(tokenformer_vit.__name__, _find_shipped)


def _shipped(name: str) -> Path:
    return CONFIGS / f"{name.removesuffix('.py')}.py"


def _find_shipped(name: str, what: str = "config") -> Path:
    path = _shipped(name)
    if Path(name).is_absolute() or not path.is_file():
        names = sorted(file.stem for file in CONFIGS.glob("*.py"))
        close = difflib.get_close_matches(Path(name).stem, names, n=3)
        more = (
            f"of the shipped ones, try {', '.join(close)}"
            if close
            else f"the shipped ones are in {CONFIGS}"
        )
        raise InputError(f"there is no {what} {name}; {more}")
    return path
