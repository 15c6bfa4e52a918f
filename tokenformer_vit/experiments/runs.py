"""A run: what it is told, and where it works.

A run's settings are all that differs from the config of the sweep. They stand in a small config of
its own, ``WORK_DIR/<run>.py``, which inherits from the sweep's; the run itself works in
``WORK_DIR/<run>/``. They are also in its record, so that a record is never taken for that of other
settings.
"""

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole

from .fields import Field

ROOT = Path(__file__).resolve().parents[2]
MOST_DIAGNOSES = 20  # epochs after which layers are measured, besides the start


@dataclass(frozen=True)
class Run:
    """One training of one variant.

    Args:
        name: Of its files: variant, seed, and the learning rate where it is not the config's.
        settings: All that differs from the sweep's config.
        about: What its record says of it.
        base: The sweep's config.
        field: Of images or of language.
        length: How many epochs or iterations it takes, as the field counts.
        start: The run from whose end it starts.
        work_dir: Where the sweep works.
        out: Where the sweep's records go.
    """

    name: str
    settings: dict[str, Any]
    about: dict[str, Any]
    base: Path
    field: Field
    length: int
    start: "Run | None"
    work_dir: Path
    out: Path

    @property
    def config(self) -> Path:
        """The config that says what differs."""
        return self.work_dir / f"{self.name}.py"

    @property
    def folder(self) -> Path:
        """The work directory of the training."""
        return self.work_dir / self.name

    @property
    def record(self) -> Path:
        """Where its record goes."""
        return self.out / f"{self.name}.json"

    @property
    def is_finished(self) -> bool:
        """Whether the training came to its end."""
        path = self.folder / "record.json"
        return path.is_file() and json.loads(path.read_text())[self.field.length] == self.length


def difference(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config that inherits from ``base`` has to say to become ``new``."""
    said = {}
    for key, value in new.items():
        old = base.get(key)
        if key in base and value == old:
            continue
        if isinstance(value, dict) and key in base:
            inherits = isinstance(old, dict) and old.keys() <= value.keys()
            said[key] = difference(old, value) if inherits else {"_delete_": True, **value}
        else:
            said[key] = value
    return said


def prepare(run: Run) -> None:
    """Write the config of a run.

    Raises:
        InputError: If a run of that name was begun with other settings.
    """
    if run.config.is_file():
        tree = ast.parse(run.config.read_text())
        there = {node.targets[0].id: ast.literal_eval(node.value) for node in tree.body}
        del there["_base_"]  # the folder may have been moved
        text = run.config.read_text()
        there["base"] = (re.findall(r"^# Its base: (\w+)$", text, re.MULTILINE) or [None])[0]
        check_same(there, {**run.settings, "base": run.about["base"]}, run.config, "--work-dir")
    lines = [
        f"# {run.name} of ablations/{run.about['question']}.py: what differs from its base.",
        f"# Its base: {run.about['base']}",
        f"_base_ = {str(run.base)!r}",
        *(
            f"{key} = {pformat(value, width=90, sort_dicts=False)}"
            for key, value in run.settings.items()
        ),
    ]
    run.config.parent.mkdir(parents=True, exist_ok=True)
    write_whole(run.config, "\n".join([*lines, ""]).encode())


def check_same(
    there: Mapping[str, Any], wanted: Mapping[str, Any], path: Path, option: str
) -> None:
    """Check that what is there is of the settings that are wanted.

    Args:
        there: What was found.
        wanted: What there should be.
        path: Where it was found.
        option: Of the command line, which would choose another place.

    Raises:
        InputError: If it is of others.
    """
    differing = dict(_differing(plain(there), plain(wanted)))
    if differing:
        key, (old, new) = next(iter(differing.items()))
        raise InputError(
            f"{shown(path)} is of a run with other settings, such as {key}: {old} there and {new} "
            f"here; choose another {option}, or delete what is there"
        )


def _differing(one: Any, other: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            unset = "the config's"
            yield from _differing(one.get(name, unset), other.get(name, unset), f"{key}.{name}")
    elif one != other:
        yield key.removeprefix("."), (one, other)


def plain(value: Any) -> Any:
    """Return what JSON makes of a value."""
    return json.loads(json.dumps(value))


def shown(path: str | Path) -> str:
    """Write a path relative to the present folder where it is within it."""
    path = Path(path)
    absolute = Path(os.path.abspath(path))
    return (
        str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)
    )
