"""What a sweep costs before it starts: runs, images or sequences, training FLOPs and hours."""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokenformer_vit.records import environment, read_json

from .questions import Question
from .record import find_record
from .rows import scientific
from .run import Run

_STEPS = 3  # that are timed; the fastest counts
_SAME_SIZE = 0.01  # largest difference of two parameter counts
_SLOW = 0.8  # ratio of bfloat16_speed(), which varies by a few percent, from which on it is slow


def estimate(question: Question, planned: Sequence[Run], args: argparse.Namespace) -> str:
    """Say what the runs that are left cost on this machine.

    The seconds come from records of the same config on the same hardware, or else from a few steps
    of the largest model. Later seeds count at one learning rate if ``--lr-seeds`` is given.

    Raises:
        InputError: If the FLOPs of a model cannot be counted.
    """
    runs = _at_one_rate(planned, args)
    left = [run for run in runs if _is_left(run, args)]
    about = f"{len(left)} of {len(runs)} runs are left"
    if not left:
        return about
    field = question.field
    examples: dict[str, int] = {}  # by data set: some variants train on a share of the images
    processes = args.nproc_per_node or 1
    costs = {}
    for run in left:
        dataset = repr(run.whole["train_dataloader"]["dataset"])
        if dataset not in examples:
            examples[dataset] = field.num_examples(run.whole)
        costs[run.about["variant"]] = _cost(run, examples[dataset], processes)
    seen, flops = (sum(costs[run.about["variant"]][index] for run in left) for index in (0, 1))
    # Records do not tell CPUs apart; of two, only one may have instructions for bfloat16.
    slow = _in_bfloat16(left[0]) and not torch.cuda.is_available() and bfloat16_speed() < _SLOW
    rates = [] if slow else _recorded_rates(left, costs)
    source = f"as {len(rates)} records of this config on this hardware"
    if not rates:
        largest = max(left, key=lambda run: field.flops(run.whole))
        rates = [_measured_rate(largest)]
        source = f"measured in {_STEPS} steps of {largest.about['variant']}, which is not compiled "
        source += "here, without loading and validation"
        if slow:
            source += "; this CPU is slow in bfloat16, which the config asks for"
    seconds = flops / statistics.median(rates)
    return (
        f"{about}: {seen:,} {field.examples}, {scientific(flops)} training FLOPs\n"
        f"about {seconds / 3600 / args.jobs:.2g} hours with --jobs {args.jobs}, at "
        f"{seen / seconds:,.0f} {field.examples}/s in a run ({source})"
    )


def _at_one_rate(planned: Sequence[Run], args: argparse.Namespace) -> list[Run]:
    """Keep one learning rate for each variant of the seeds that do not try them all."""
    kept = {}
    for run in planned:
        variant, seed = run.about["variant"], run.about["seed"]
        tries = args.lr_seeds is None or seed < args.lr_seeds
        key = (variant, seed, run.about["lr"] if tries else None)
        if key not in kept or find_record(run):
            kept[key] = run
    return list(kept.values())


def _is_left(run: Run, args: argparse.Namespace) -> bool:
    record = find_record(run)
    if record is None:
        return not run.is_finished
    return "failed" in record and args.retry_failed


def _cost(run: Run, examples: int, processes: int) -> tuple[int, int]:
    """Return the number of examples that a run sees, and its training FLOPs."""
    field, cfg = run.field, run.whole
    batch = cfg["train_dataloader"]["batch_size"] * processes
    per_unit = {"iteration": batch, "epoch": examples}
    seen = run.length * per_unit[field.unit]
    hooks = cfg.get("custom_hooks") or ()
    schedule = next((hook["schedule"] for hook in hooks if "schedule" in hook), ())
    flops, since, part = 0, 0, field.part(cfg)
    each = field.flops(cfg)
    for event in schedule:
        (time_key,) = event.keys() & per_unit.keys()
        grown = event[time_key] * per_unit[time_key]
        flops += each * (grown - since)
        since = grown
        sizes = {key: size for key, size in event.items() if key != time_key}
        part = field.sized(part, sizes)
        each = field.flops({**cfg, **_above(cfg, field.path, part)})
    return seen, flops + each * (seen - since)


def _above(cfg: Mapping[str, Any], path: Sequence[str], part: Any) -> dict[str, Any]:
    """Return the part of a config at the first key of a path, with another value at its end."""
    key, *below = path
    return {key: {**cfg[key], **_above(cfg[key], below, part)} if below else part}


def _recorded_rates(left: Sequence[Run], costs: Mapping[str, tuple[int, int]]) -> list[float]:
    """Return the FLOPs a second of uninterrupted runs: same config, dtype and hardware."""
    run, here, rates = left[0], environment(), []
    own = {}  # FLOPs of an example, by the number of parameters
    for each in left:
        seen, flops = costs[each.about["variant"]]
        own[each.about["parameters"]] = flops / seen
    for path in sorted(run.out.parent.glob(f"*_{run.base.stem}/*.json")):
        record = read_json(path)
        if record.get("hardware") != here["hardware"] or record.get("resumed_at_iteration") != 0:
            continue
        if record.get("cpu", here.get("cpu")) != here.get("cpu"):  # older records do not name it
            continue
        if record["dtype"].startswith("bfloat16") != _in_bfloat16(run):
            continue
        size = record["parameters"]
        flops = [each for count, each in own.items() if abs(count / size - 1) <= _SAME_SIZE]
        if "flops" in record:
            rates.append(record["flops"] / record["seconds"])
        elif flops and "epochs" in record:
            examples = record["epochs"] * record[f"train_{run.field.examples}"]
            rates.append(flops[0] * examples / record["seconds"])
    return rates


def _in_bfloat16(run: Run) -> bool:
    return run.whole["optim_wrapper"]["type"] == "AutocastOptimWrapper"


def bfloat16_speed() -> float:
    """Return by how much bfloat16 is faster than float32 in products on this CPU.

    Without instructions for it (AMX, AVX512_BF16), PyTorch converts each number.
    """
    shortest = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(256, 256, dtype=dtype, device="cpu")
        times = []
        for _ in range(6):  # the first ones prepare the product
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - begin)
        shortest.append(min(times))
    return shortest[0] / shortest[1]


def _measured_rate(run: Run) -> float:
    """Time forward and backward passes with random weights; return FLOPs a second."""
    field, cfg = run.field, run.whole
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = field.build(cfg).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        for buffer in model.buffers():
            buffer.fill_(1)
    batch = cfg["train_dataloader"]["batch_size"]
    amp = _in_bfloat16(run)
    times = []
    for _ in range(1 + _STEPS):
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = field.random_loss(model, batch, device)
        loss.backward()
        loss.item()  # waits for the GPU
        model.zero_grad()
        times.append(time.perf_counter() - begin)
    return batch * field.flops(cfg) / min(times[1:])
