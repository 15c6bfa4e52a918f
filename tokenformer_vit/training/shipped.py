"""The configs that come with the package: in ``.mim/configs``, or in the clone's ``configs/``."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.config import Config

import tokenformer_vit
from tokenformer_vit.errors import InputError

__all__ = ["CONFIGS", "find_config", "shipped_bases"]

_PACKAGE = Path(tokenformer_vit.__file__).parent
_INSTALLED = _PACKAGE / ".mim" / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
_PREFIX = f"{tokenformer_vit.__name__}::"


def find_config(name: str | Path) -> Path:
    """Find a config: a file, or else one that comes with the package.

    Args:
        name: Path of a file, or the name of a shipped config: ``configs/digits_demo.py``,
            ``digits_demo.py`` or ``digits_demo``.

    Returns:
        The path of an existing file.

    Raises:
        InputError: If there is none; the message gives names that are close.
    """
    path = Path(name)
    if path.is_file():
        return path
    stem = path.name.rpartition("::")[2].removesuffix(".py")
    if path.parent in (Path(), Path("configs")) and (CONFIGS / f"{stem}.py").is_file():
        return CONFIGS / f"{stem}.py"
    names = sorted(file.stem for file in CONFIGS.glob("*.py"))
    close = difflib.get_close_matches(stem, names, n=3) or names
    raise InputError(f"there is no config {name}; of the shipped ones, try {', '.join(close)}")


@contextmanager
def shipped_bases() -> Iterator[None]:
    """Let configs that are read in a ``with`` block inherit from shipped ones.

    ``_base_ = "tokenformer_vit::digits_demo.py"`` then works in any folder. mmengine itself looks
    into OpenMMLab's own packages alone.
    """
    find = Config._get_cfg_path

    def find_base(name: str, inheriting: str) -> tuple[str, str | None]:
        if name.startswith(_PREFIX):
            path = CONFIGS / name.removeprefix(_PREFIX)
            return str(path if path.is_file() else find_config(name)), None
        return find(name, inheriting)

    Config._get_cfg_path = staticmethod(find_base)
    try:
        yield
    finally:
        Config._get_cfg_path = staticmethod(find)
