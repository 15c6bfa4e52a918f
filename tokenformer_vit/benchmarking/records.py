"""The record of a benchmark: started, resumed, and read.

Like every record it has the command, commit, date, hardware and versions. Its own keys are::

    device, threads            cpu or cuda; threads of a CPU operation
    unit                       image or token, written as UNIT below
    model, baseline            timm names, or "matched-vit"; for language the preset, and
                               "transformer" or "transformer, rotary"
    img_size                   images only
    num_tokens                 language only: length of a sequence
    config, hidden_features    language only: fields of LMConfig; hidden width of the Transformer
    depth                      null if each model has its own depth
    seed, n                    n is the number of rounds
    parameters                 {model, baseline}: number of parameters
    flops_per_UNIT             {model, baseline}: {mode: FLOPs}
    ceilings                   {precision: {matmul_tflops, copy_gb_per_s}}, the highest measured
    groups                     a list of
      mode, precision, dtype, batch_size, input_shape
      items                    images or tokens in a step
      minimal_bytes            bytes that a step must move, see below
      bound_UNITs_per_s        fastest possible speed of our model under the ceilings
      bound_by                 the ceiling that sets this bound: matmul or copy
      variants                 a list of
        variant                such as "auto compiled" or "baseline eager"
        implementation         baseline, released, or a backend: auto or reference
        compiled               true or false
        failed                 the reason, such as "out of memory"; then nothing below is there
        seconds                time of every round
        seconds_p20, _p50, _p80
        UNITs_per_s            median speed
        ratio_p20, _p50, _p80  seconds of the compiled baseline (in decoding: of the eager baseline)
                               divided by the variant's in the same round; above 1 is faster; absent
                               if that baseline failed
        saved_mb_per_UNIT      memory kept for the backward pass, 10^6 bytes; null if not training
        peak_mib               peak memory of the variant alone: parameters, optimizer state and the
                               rise during a step, without the keys and values in the cache before
                               it; null if unknown
        mfu                    needed FLOPs, divided by the FLOPs that the matmul ceiling allows in
                               the same time

Minimal bytes. Inference reads the inputs and every parameter once. Decoding reads every parameter
once for each token of a sequence; cached keys and values are not counted. Training reads the
inputs; reads every parameter in the forward and in the backward pass; writes and reads every
gradient; reads and writes every parameter and both moments in the optimizer; and writes and reads
the activations of our variant that keeps the fewest. The bound is the larger of two times: these
bytes at the copy ceiling, and the FLOPs at the matmul ceiling.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokenformer_vit.command_line import typed_command
from tokenformer_vit.errors import InputError
from tokenformer_vit.records import environment, read_record

from . import measures
from .variants import PRECISIONS, Group, Setting, short

# Entries that must be equal in a resumed run and in the interrupted one.
_SAME = (
    *("model", "baseline", "img_size", "num_tokens", "depth", "n", "seed"),
    *("device", "threads", "hardware", "cpu", "versions", "commit"),
)


def counted(unit: str, counts: Mapping[str, tuple[int, dict[str, int]]]) -> dict[str, Any]:
    """Return the entries of a record with the parameters and FLOPs of both models.

    Args:
        unit: ``image`` or ``token``.
        counts: For each model, the number of parameters and the FLOPs of each mode.
    """
    return {
        "unit": unit,
        "parameters": {name: parameters for name, (parameters, _) in counts.items()},
        f"flops_per_{unit}": {name: flops for name, (_, flops) in counts.items()},
    }


def new_record(setting: Setting, models: Mapping[str, Any]) -> dict[str, Any]:
    """Start a record.

    Args:
        setting: Settings of all groups.
        models: Entries that describe the models.
    """
    packages = ("torch", "timm", "triton")
    if models["unit"] == "token":
        packages += ("transformers",)
    return {
        "command": typed_command(),
        **environment(packages, setting.device.type),
        "device": setting.device.type,
        "threads": torch.get_num_threads(),
        **models,
        "n": setting.rounds,
        "seed": setting.seed,
        "ceilings": {},
        "groups": [],
    }


def raise_ceilings(ceilings: dict[str, float], setting: Setting, group: Group) -> None:
    """Measure the ceilings of the device again, and keep the highest values of this run.

    A single measurement may be slow because other programs use the machine.
    """
    products = PRECISIONS[group.precision].products
    for name, rate in (
        ("matmul_tflops", measures.matmul_rate(setting.device, products) / 1e12),
        ("copy_gb_per_s", measures.copy_rate(setting.device) / 1e9),
    ):
        ceilings[name] = max(ceilings.get(name, 0.0), short(rate))


def group_of(entry: Mapping[str, Any]) -> Group:
    """Return the group of a record's entry."""
    return Group(entry["mode"], entry["precision"], entry["batch_size"])


def read_benchmark(path: Path) -> dict[str, Any]:
    """Read the record of a benchmark.

    Raises:
        InputError: If the file is not such a record.
        OSError: If the file cannot be read.
    """
    record = read_record(path)
    if record.get("groups") and record.get("ceilings"):
        return record
    raise InputError(f"{path} is not a record of `tokenformer-vit benchmark`: give one that is")


def resume(path: Path, record: dict[str, Any]) -> None:
    """Copy the measurements of an earlier run into the record of this run.

    Args:
        path: Record of the earlier run.
        record: Record of this run, which is changed.

    Raises:
        InputError: If the earlier run had other models, settings, hardware or versions.
    """
    earlier = read_benchmark(path)
    for key in _SAME:
        # The git tree may be dirty only because of the record itself.
        old, new = (str(r.get(key)).removesuffix("-dirty") for r in (earlier, record))
        if old != new:
            raise InputError(
                f"{key} is {old} in {path}, but now it is {new}: give another --out, or remove "
                "--resume to replace the record"
            )
    record["ceilings"], record["groups"] = earlier["ceilings"], earlier["groups"]
