"""One run of a sweep: its settings, and where its files are.

The settings are all that differs from the sweep's config. They are written into a small config,
``WORK_DIR/<run>.py``, which inherits from the sweep's. The run works in ``WORK_DIR/<run>/``. The
record repeats the settings, so it is never used for a run with other settings.
"""

import ast
import copy
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
from tokenformer_vit.records import read_json

from .fields import Config, Field
from .variants import PAIRS

ROOT = Path(__file__).resolve().parents[2]
PROBES = ("probes", "net2net")  # modules of the folder ablations that a run needs
_PROBED = {"stem_seed", "frozen_norms", "nested_tau"}  # arguments of ProbeBackbone
_MASKED = {"masks", "frozen_stem"}  # arguments of MaskedLM


@dataclass(frozen=True)
class Run:
    """One training of one variant."""

    name: str  # of its files: variant, seed, and the learning rate if it is not the config's
    settings: dict[str, Any]  # all that differs from the sweep's config
    about: dict[str, Any]  # what the record says about the run before it is trained
    base: Path  # the sweep's config
    field: Field
    length: int  # epochs or iterations, as the field counts
    start: "Run | None"  # the earlier run that it continues
    work_dir: Path  # where the sweep works
    out: Path  # folder of the sweep's records
    whole: dict[str, Any]  # config that builds the model at the start of the run, without weights
    has_result: bool = True  # or it only makes weights that others start from
    same_training: bool = False  # earlier versions of the sweep's config trained the same

    @property
    def config(self) -> Path:
        """The config with the settings."""
        return self.work_dir / f"{self.name}.py"

    @property
    def folder(self) -> Path:
        """The work directory of the training."""
        return self.work_dir / self.name

    @property
    def record(self) -> Path:
        """The file of the record."""
        return self.out / f"{self.name}.json"

    @property
    def is_finished(self) -> bool:
        """Whether the training came to its end."""
        path = self.folder / "record.json"
        return path.is_file() and read_json(path)[self.field.length] == self.length

    def write_config(self) -> None:
        """Write the config.

        Raises:
            InputError: If there is a run of this name with other settings.
        """
        imports = [*self.whole["custom_imports"]["imports"], *PROBES]
        settings = copy.deepcopy({**self.settings, "custom_imports": {"imports": imports}})
        name_probes(settings)
        if self.config.is_file():
            text = self.config.read_text(encoding="utf-8")
            tree: list[Any] = ast.parse(text).body
            there = {node.targets[0].id: ast.literal_eval(node.value) for node in tree}
            del there["_base_"]  # the folder may have been moved
            there["base"] = (re.findall(r"^# Its base: (\w+)$", text, re.MULTILINE) or [None])[0]
            wanted = {**settings, "base": self.about["base"]}
            self.check_same(there, wanted, self.config, "--work-dir")
        lines = [
            f"# {self.name} of ablations/{self.about['question']}.py: what differs from its base.",
            f"# Its base: {self.about['base']}",
            f"_base_ = {str(self.base)!r}",
        ]
        for key, value in settings.items():
            lines.append(f"{key} = {pformat(value, width=90, sort_dicts=False)}")
        self.work_dir.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, "\n".join([*lines, ""]).encode())

    def check_same(
        self, there: Mapping[str, Any], wanted: Mapping[str, Any], path: Path, way: str
    ) -> None:
        """Check that a file has the settings of this run, and was made with the same config.

        Raises:
            InputError: If they differ; ``way`` names the options that choose another place.
        """
        differing = dict(differences(plain(there), plain(wanted), self.same_training))
        base = differing.pop("base", None)
        if differing:
            key, (old, new) = next(iter(differing.items()))
            raise InputError(
                f"{shown(path)} belongs to a run with other settings, such as {key}: {old} there "
                f"and {new} here; choose another {way}, or delete the file"
            )
        if base and not self.same_training:
            raise InputError(
                f"{shown(path)} was made with another version of {shown(self.base)}, or of the run "
                f"that it starts from (digest {base[0]} there and {base[1]} here): choose another "
                f"{way}, or give --same-training if both versions train the same"
            )


def name_probes(cfg: Config) -> None:
    """Name the classes of the folder ablations that the settings of a run need."""
    model = cfg.get("model", {})
    if model.keys() & _MASKED:
        model["type"] = "masked_lm.MaskedLM"
        hooks = cfg.get("custom_hooks", [{"type": "CostHook"}])
        cfg["custom_hooks"] = [*hooks, {"type": "masked_lm.MasksHook"}]
    backbone = model.get("backbone", {})
    if backbone.keys() & _PROBED:
        backbone["type"] = "ProbeBackbone"
    for hook in cfg.get("custom_hooks", ()):
        if "schedule" in hook and not any(key in PAIRS for key in hook["schedule"][0]):
            hook["type"] = "Net2NetHook"


def difference(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a config that inherits from ``base`` equals ``new``."""
    changes = {}
    for key, value in new.items():
        old = base.get(key)
        if key in base and value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and old.keys() <= value.keys():
            changes[key] = difference(old, value)
        elif isinstance(value, dict) and key in base:
            changes[key] = {"_delete_": True, **value}
        else:
            changes[key] = value
    return changes


def differences(
    one: Any, other: Any, edited: bool = False, replaced: bool = False, key: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Find where the settings of two runs differ.

    Args:
        one: Settings of a run, or a part of them.
        other: The same part of the settings of another run.
        edited: The runs are of two versions of a config. A part that replaces the config's own, a
            ViT for example, repeats keys of its version: only keys of both versions are compared.
        replaced: This is such a part.
        key: Name of the part.

    Yields:
        Each key that differs, with both values.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        replaced = replaced or (edited and "_delete_" in one and "_delete_" in other)
        for name in one.keys() & other.keys() if replaced else {**one, **other}:
            here, there = (each.get(name, "the config's") for each in (one, other))
            yield from differences(here, there, edited, replaced, f"{key}.{name}")
    elif one != other:
        yield key.removeprefix("."), (one, other)


def plain(value: Any) -> Any:
    """Return a value as it is after JSON writes and reads it."""
    return json.loads(json.dumps(value))


def shown(path: str | Path) -> str:
    """Return a path relative to the current folder, or unchanged if it is outside of it."""
    absolute = Path(os.path.abspath(path))
    inside = absolute.is_relative_to(Path.cwd())
    return str(absolute.relative_to(Path.cwd()) if inside else path)
