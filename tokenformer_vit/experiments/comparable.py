"""The records of the sweeps, and whether those of a table can be compared."""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError

from .questions import Question
from .rows import Record


def read_groups(
    questions: Iterable[Question], results: Path
) -> dict[tuple[Question, str], list[Record]]:
    """Read the records, by question and folder.

    Args:
        questions: Those of which records are read.
        results: Holds a folder for each sweep.

    Raises:
        InputError: If a record is of an unknown variant, or those of a folder differ in more than
            their question asks.
    """
    groups = {}
    for question in questions:
        for folder in sorted(results.glob("*/")):
            records = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
            records = {
                path: record
                for path, record in records.items()
                if record.get("question") == question.name
            }
            for path, record in records.items():
                if record["variant"] not in {variant.name for variant in question.variants}:
                    raise InputError(
                        f"{path} is of {record['variant']}, which ablations/{question.name}.py "
                        "does not know; correct either"
                    )
            if records:
                _check_common(question, records)
                groups[question, folder.name] = list(records.values())
    return groups


def _check_common(question: Question, records: Mapping[Path, Record]) -> None:
    field = question.field
    told = {path: _told(question, record) for path, record in records.items()}
    for key in (*_common(question), field.limit, "settings", field.path[-1]):
        _check_one_value(key, {path: each[key] for path, each in told.items() if key in each})
    for name in {record["variant"] for record in records.values()}:
        own = {path: record for path, record in records.items() if record["variant"] == name}
        # What a variant is does not change between its runs.
        _check_one_value("options", {path: _pruned(run["options"]) for path, run in own.items()})
        _check_one_value(
            "start", {path: run["start"] for path, run in own.items() if "start" in run}
        )


def _check_one_value(key: str, values: Mapping[Path, Any]) -> None:
    different = {str(value): path for path, value in values.items()}
    if len(different) > 1:
        (one, first), (other, second) = list(different.items())[:2]
        raise InputError(
            f"{key} is {one} in {first} and {other} in {second.name}: they cannot be compared; "
            "give one of the sweeps another --out"
        )


def _common(question: Question) -> tuple[str, ...]:
    """Name the figures without which in common runs are no comparison."""
    field = question.field
    # Variants that train on different texts have different numbers of sequences.
    examples = () if question.texts else (field.examples[0],)
    return ("config", field.length, *examples, field.per_step, "dtype")


def _told(question: Question, record: Record) -> Record:
    """Return what a run should have in common with the others of its table.

    Of its settings that is all but seeds, learning rate and what the variant changes; of a variant
    that replaces the whole backbone, or language model, all that is outside it.
    """
    field = question.field
    settings, options = copy.deepcopy(record["settings"]), record["options"]
    told = {key: record[key] for key in _common(question) if key in record}
    settings.get("randomness", {}).pop("seed", None)
    settings.get("optim_wrapper", {}).get("optimizer", {}).pop("lr", None)
    part, changed = field.part(settings), field.part(options)
    if part:
        field.replace(settings, {})
    if not any("_delete_" in sizes for sizes in (part, part.get("config", {}))):
        told[field.path[-1]] = _pruned(_without(part, {**changed, **dict.fromkeys(field.own)}))
    length = settings.get("train_cfg", {}).pop(field.limit, "the config's")
    if field.limit in options.get("train_cfg", {}):
        told.pop(field.length, None)
    else:
        told[field.limit] = length
    # That of cost is in all runs of a table, but said only where it is not the config's own.
    ignored = [{"type": "CostHook"}, *options.get("custom_hooks", ())]
    present = settings.pop("custom_hooks", ())
    if hooks := [hook for hook in present if hook not in ignored]:
        settings["custom_hooks"] = hooks
    others = {key: options[key] for key in options.keys() - {"train_cfg", "custom_hooks"}}
    return {**told, "settings": _pruned(_without(settings, others))}


def _without(tree: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is said elsewhere, too."""
    kept = {}
    for key, value in tree.items():
        if key not in said:
            kept[key] = value
        elif isinstance(value, dict) and isinstance(said[key], dict):
            kept[key] = _without(value, said[key])
    return kept


def _pruned(tree: Any) -> Any:
    """Leave out empty dicts, and sort."""
    if not isinstance(tree, dict):
        return tree
    branches = {key: _pruned(tree[key]) for key in sorted(tree)}
    return {key: branch for key, branch in branches.items() if branch != {}}
