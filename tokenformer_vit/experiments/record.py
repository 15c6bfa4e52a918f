"""The record of a run, made from its logs, or from its error if it failed.

A record, ``OUT/<run>.json``, has what the training's own ``record.json`` has, and::

    question, variant, label
    paper                 the paper's top-1 on ImageNet-1K at base size, or null
    config, seed, lr
    parameters
    flops                 training FLOPs
    trainable             number of trained parameters, if a question tunes trained weights
    start                 file of these weights, and its digest
    options               what the variant changes in the config
    base                  short digest of the config's content and, if the run starts from weights
                          or from another run, of these
    settings              all that differs from the config
    command               command of the sweep; training_command is that of the run
    taken_from            record of another question, which had already trained the same model
    failed                the error of a run that failed
    final, best           {top1, top5} in %, after the last epoch and after the best one; for
                          language {perplexity, and perplexity/<text> if there are several texts};
                          empty if the run only makes weights for others
    validation            {epoch, top1}: lists, with flops where training FLOPs are counted; for
                          language {iteration, perplexity, ..., flops}
    loss                  {iteration, loss}: lists of at most 100 points
    diagnostics           {epoch or iteration, layers: lists}, and for each figure of
                          DiagnosticsHook a list of lists, by time (0 is the start) and by layer;
                          tau where it changes
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.records import environment, read_json, write_record
from tokenformer_vit.training.reports import read_scalars

from .fields import Field
from .plan import MOST_DIAGNOSES
from .run import Run, plain, shown

_IDENTITY = ("settings", "question", "variant", "start", "base", "lr")  # keys of what was trained
_MOST_LOSSES = 100  # points of a loss curve in a record
_MOST_FIGURES = 4500  # numbers of diagnostics in a record


def find_record(run: Run) -> dict[str, Any] | None:
    """Return the record of a run, or None if there is none.

    Raises:
        InputError: If the record has other settings.
    """
    if not run.record.is_file():
        return None
    record = read_json(run.record)
    there, wanted = ({key: each.get(key) for key in _IDENTITY} for each in (record, run.about))
    if run.field.length in record:  # the base may be another with --same-training
        there[run.field.length], wanted[run.field.length] = record[run.field.length], run.length
    run.check_same(there, wanted, run.record, "--out and --work-dir")
    return record


def adopt(run: Run, processes: int) -> str | None:
    """Copy the record of the same training from another question, and return its name.

    Several questions have the config's own model as a variant; it is trained only once. Without
    such a record, returns None.
    """
    wanted = {key: run.about[key] for key in ("config", "base", "settings")}
    # Other code, or another number of processes, would not give the same numbers.
    wanted = plain({**wanted, "commit": environment()["commit"], "processes": processes})
    for path in sorted(run.out.parent.glob(f"*_{run.base.stem}/*.json")):
        record = read_json(path)
        there = {key: record.get(key, "") for key in wanted}
        for each in (there, wanted):
            # The working tree may be dirty only because of a new record.
            each["commit"] = each["commit"].removesuffix("-dirty")
        if there == wanted and "failed" not in record:
            source = f"{path.parent.name}/{path.name}"
            _write(run, {**record, **run.about, "taken_from": source})
            return source
    return None


def collect(run: Run, failed: str | None = None) -> dict[str, Any]:
    """Write and return the record of a run, made from the files of its training."""
    measure = run.field.measure
    train, val = read_scalars(sorted(run.folder.glob("*/vis_data/scalars.json")))
    if failed is None:
        training = read_json(run.folder / "record.json")
        training["training_command"] = training.pop("command")
    else:
        training = {**environment(), "failed": failed, "n": 1}
    steps = thin(list(train), _MOST_LOSSES)
    record = {
        "command": shlex.join(["python", shown(sys.argv[0]), *sys.argv[1:]]),
        **{key: value for key, value in training.items() if not re.fullmatch(measure.keys, key)},
        **run.about,
        **_validation(run.field, val),
        "loss": {"iteration": steps, "loss": [_number(train[step]["loss"]) for step in steps]},
        **read_layers(run.folder / "diagnostics.jsonl"),
    }
    if failed is None and "final" not in record:
        if run.has_result:
            record["failed"] = f"its log has no validation {measure.name}"
        else:
            record["final"] = {}
    _write(run, with_flops(run, record))
    return record


def with_flops(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the training FLOPs, if the run did not count them itself.

    They are those of CostHook, for a run that trains all of a model of one size.
    """
    if record.keys() & {"flops", "trainable", "failed"} or not record["final"]:
        return record
    try:
        each = run.field.flops(run.whole)
    except InputError:
        return record  # a model of the user's own
    # The last batch of an epoch may be smaller, or be dropped.
    passed = record[run.field.length] * record[f"train_{run.field.examples}"]
    taken = record["iterations"] * record[f"{run.field.examples}_per_step"]
    return {**record, "flops": each * min(passed, taken)}


def _validation(field: Field, val: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last and the best figures of validation, and their curves."""
    measure = field.measure
    read = {step: measure.read(line) for step, line in val.items()}
    read = {step: figures for step, figures in read.items() if measure.name in figures}
    if not read:
        return {}
    best = max(read, key=lambda step: measure.score(read[step][measure.name]))
    curves = [name for name in read[best] if name.split("/")[0] == measure.name]
    costs = all("flops" in line for line in val.values())
    return {
        "final": read[max(read)],
        "best": {field.unit: best, **read[best]},
        "validation": {
            field.unit: list(read),
            **{name: [figures[name] for figures in read.values()] for name in curves},
            **({"flops": [val[step]["flops"] for step in read]} if costs else {}),
        },
    }


def read_layers(path: Path) -> dict[str, Any]:
    """Read the figures of every layer over the run; with many layers, at fewer times."""
    if not path.is_file():
        return {}  # a model without Pattention, or a run that failed before the first measurement
    lines = _measurements(path)
    if not lines:
        return {}  # it was killed at the first line
    unit = "epoch" if "epoch" in lines[0] else "iteration"
    measured = {line[unit]: line["layers"] for line in lines}
    first, last = measured[min(measured)], measured[max(measured)]
    layers, names = list(last), list(next(iter(last.values())))
    if all(first[layer]["tau"] == last[layer]["tau"] for layer in layers):
        names.remove("tau")  # it does not change
    most = min(MOST_DIAGNOSES + 1, _MOST_FIGURES // (len(layers) * len(names)))
    times = thin(list(measured), max(2, most))
    figures = {
        name: [[_number(measured[time][layer][name]) for layer in layers] for time in times]
        for name in names
    }
    return {"diagnostics": {unit: times, "layers": layers, **figures}}


def _measurements(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a DiagnosticsHook; the later one counts where a resumed run repeats one."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):  # the line that a killed run was writing
            record = json.loads(line)
            found[record["iteration"]] = record
    return [found[iteration] for iteration in sorted(found)]


def thin(values: Sequence[int], most: int) -> list[int]:
    """Keep at most ``most`` values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _number(value: float | None) -> float | None:
    """Round to four digits; JSON has no NaN."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _write(run: Run, record: dict[str, Any]) -> None:
    run.out.mkdir(parents=True, exist_ok=True)
    write_record(run.record, record)
