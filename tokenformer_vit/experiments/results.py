"""Read the records of sweeps, and check that the records of a table can be compared."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.records import read_json

from .questions import Question
from .rows import Record
from .run import differences

Groups = dict[tuple[Question, str], list[Record]]  # by question and folder


def read_groups(questions: Iterable[Question], results: Path) -> Groups:
    """Read the records of all sweeps, one folder each; see :func:`read_sweep`."""
    groups: Groups = {}
    for question in questions:
        for folder in sorted(results.glob("*/")):
            if records := read_sweep(question, folder):
                groups[question, folder.name] = records
    return groups


def read_sweep(question: Question, folder: Path) -> list[Record]:
    """Read the records of a question in a folder.

    Raises:
        InputError: If a record has an unknown variant, or the records differ in more than the
            variant.
    """
    records = {path: read_json(path) for path in sorted(folder.glob("*.json"))}
    records = {
        path: each for path, each in records.items() if each.get("question") == question.name
    }
    names = {variant.name for variant in question.variants}
    for path, record in records.items():
        if record["variant"] not in names:
            raise InputError(
                f"{path} has the variant {record['variant']}, which ablations/{question.name}.py "
                "does not have; add it there, or delete the record"
            )
    shared = {path: _shared(question, record) for path, record in records.items()}
    for key in dict.fromkeys(key for each in shared.values() for key in each):
        _check_one_value(key, {path: each[key] for path, each in shared.items() if key in each})
    for name in names:
        # All runs of a variant have the same change.
        own = {path: each for path, each in records.items() if each["variant"] == name}
        for path, record in own.items():
            first, one = next(iter(own.items()))
            pair = (_pruned(each["options"]) for each in (one, record))
            replaced = one.get("base") != record.get("base") and _replaces(question, record)
            for key, values in differences(*pair, replaced=replaced):
                _check_one_value(f"options.{key}", dict(zip((first, path), values, strict=True)))
        starts = {path: each["start"] for path, each in own.items() if "start" in each}
        _check_one_value("start", starts)
    return list(records.values())


def _check_one_value(key: str, values: Mapping[Path, Any]) -> None:
    different = {str(value): path for path, value in values.items()}
    if len(different) > 1:
        (one, first), (other, second) = list(different.items())[:2]
        raise InputError(
            f"{key} is {one} in {first} and {other} in {second.name}, so they cannot be compared; "
            "give one of the sweeps another --out"
        )


def _shared(question: Question, record: Record) -> Record:
    """Return what a run must share with the others of its table.

    This is all of its settings but the seed, the learning rate and what the variant changes. Where
    the variant replaces the whole backbone, or language model, only what is outside it counts.
    """
    field = question.field
    settings, options = copy.deepcopy(record["settings"]), record["options"]
    shared = {key: record[key] for key in question.common if key in record}
    shared["config"] = Path(record["config"]).name  # its path depends on the current folder
    settings.get("randomness", {}).pop("seed", None)
    settings.pop("load_from", None)  # the earlier run of a stage
    settings.get("optim_wrapper", {}).get("optimizer", {}).pop("lr", None)
    settings.get("train_cfg", {}).pop("val_interval", None)  # it does not change the training
    length = settings.get("train_cfg", {}).pop(field.limit, "the config's")
    if field.limit in options.get("train_cfg", {}):
        shared.pop(field.length, None)
    else:
        shared[field.limit] = length
    part = field.part(settings)
    if part:
        field.replace(settings, {})
    if not _replaces(question, record):
        # The weights to start from are compared by their digests.
        own = {field.seed_key: None, field.weights_key: None}
        shared[field.path[-1]] = _pruned(_without(part, {**field.part(options), **own}))
    # All runs of a table count FLOPs or none does. The settings say so only if the config does not.
    # Measuring the layers does not change the training.
    ignored = [{"type": "CostHook"}, *options.get("custom_hooks", ())]
    present = settings.pop("custom_hooks", ())
    hooks = [hook for hook in present if hook not in ignored and hook["type"] != "DiagnosticsHook"]
    if hooks:
        settings["custom_hooks"] = hooks
    others = {key: options[key] for key in options.keys() - {"train_cfg", "custom_hooks"}}
    return {**shared, "settings": _pruned(_without(settings, others))}


def _replaces(question: Question, record: Record) -> bool:
    """Tell whether the variant replaces the whole backbone, or language model."""
    part = question.field.part(record["settings"])
    return any("_delete_" in sizes for sizes in (part, part.get("config", {})))


def _without(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys that another tree has."""
    kept = {}
    for key, value in tree.items():
        if key not in other:
            kept[key] = value
        elif isinstance(value, dict) and isinstance(other[key], dict):
            kept[key] = _without(value, other[key])
    return kept


def _pruned(tree: Any) -> Any:
    """Drop empty dicts, and sort keys."""
    if not isinstance(tree, dict):
        return tree
    branches = {key: _pruned(tree[key]) for key in sorted(tree)}
    return {key: branch for key, branch in branches.items() if branch != {}}
