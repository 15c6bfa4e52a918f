"""Split the time of a training step by kernels, with PyTorch's profiler.

Like every record, the record has the command, commit, date, hardware and versions. It describes the
models as the record of a benchmark does (records.py), and has::

    mode, precision, dtype, batch_size
    profiles                   a list of
      variant                  such as "auto compiled"
      seconds                  of a step
      parts                    for each of PARTS, a part with
        seconds                of a step
      kernels                  the slowest ones: name, part, calls and seconds of a step

The seconds of the parts add up to those of the step. A kernel belongs to the first part whose
pattern its name has. torch.compile names a kernel after all that it fuses: a kernel of Θ may also
add a residual. On a GPU, ``idle`` is the time without a kernel; the profiler slows down the host,
and without it a step may have less idle time. On a CPU, the times are those of operators, and
``idle`` is the time outside them.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tokenformer_vit.errors import InputError

from . import measures
from .variants import PRECISIONS, BenchmarkVariant, Group, PreparedVariant, Setting, short

# Names of kernels and operators, by part, in the order of the search.
_PATTERNS = {
    "attention": r"flash|fmha|attention|sdpa",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|conv|splitk|::(add)?(mm|bmm)$|_mm\b",
    "optimizer": r"adam|multi_tensor|optimizer",
    "theta": r"gelu|vector_norm|erf|theta|_pattention|^_?(forward|backward)_kernel",
    "layer norm": r"layer_?norm",
    "copies": r"memcpy|memset|copy",
}
# Kernels that torch.compile makes. Their names also list the operations before and after them.
_COMPILED = re.compile(r"triton_|graph_\d+_cpp")
_OF_COMPILED = ("theta", "layer norm")
PARTS = (*_PATTERNS, "other", "idle")
_STEPS = 5
_KERNELS = 15


def part_of(name: str) -> str:
    """Return the part of a step that a kernel belongs to."""
    parts = _OF_COMPILED if _COMPILED.match(name) else _PATTERNS
    found = (part for part in parts if re.search(_PATTERNS[part], name, re.IGNORECASE))
    return next(found, "other")


def profile_variant(setting: Setting, group: Group, variant: BenchmarkVariant) -> dict[str, Any]:
    """Profile some steps of a variant.

    Args:
        setting: Model, device and seed.
        group: Mode, precision and batch size.
        variant: Variant to profile.

    Returns:
        Entry of the variant in the record.

    Raises:
        InputError: If the profiler does not see the kernels of the GPU.
    """
    random = torch.Generator().manual_seed(setting.seed)
    weights, device = PRECISIONS[group.precision].weights, setting.device
    inputs, targets = setting.subject.draw(group, random)
    if inputs.is_floating_point():
        inputs = inputs.to(weights)
    batch = (inputs.to(device), targets.to(device))
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Without this, the kernels of a compiled block have no names on a CPU.
    names = {"cpp.enable_kernel_profile": True, "cpp.descriptive_names": "original_aten"}
    with measures.many_compilations(), inductor_config.patch(names):
        run = PreparedVariant(setting, group, variant, [batch])
        for _ in range(3):
            run.step()
        with profile(activities=activities) as profiler:
            start = time.perf_counter()
            for _ in range(_STEPS):
                run.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    events = profiler.events()
    assert events is not None
    if device.type == "cpu":
        calls = [(event.name, event.self_cpu_time_total / 1e6) for event in events]
        busy = sum(each for _, each in calls)
    else:
        kernels = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        if not kernels:
            raise InputError("PyTorch's profiler saw no kernel on this GPU; it needs CUPTI")
        calls = [(event.name, event.time_range.elapsed_us() / 1e6) for event in kernels]
        spans = [(event.time_range.start / 1e6, event.time_range.end / 1e6) for event in kernels]
        busy, seconds = covered(spans)
    return {"variant": variant.name, **_figures(calls, busy, seconds)}


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return how long any of some spans lasts, and the time from the first start to the last end.

    Args:
        spans: Start and end of each.
    """
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    total, first = 0.0, ordered[0][0]
    last = first
    for start, end in ordered:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total, last - first


def _figures(calls: Sequence[tuple[str, float]], busy: float, seconds: float) -> dict[str, Any]:
    """Sum up the calls of all steps.

    Args:
        calls: Name and seconds of each call of a kernel.
        busy: Seconds with at least one kernel.
        seconds: Seconds of all steps.
    """
    took: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    count = Counter(name for name, _ in calls)
    for name, each in calls:
        took[name] += each
        parts[part_of(name)] += each
    # Kernels that run at the same time share their time.
    scale = busy / sum(parts.values()) if busy else 0.0
    parts = {part: scale * parts[part] for part in _PATTERNS} | {"other": scale * parts["other"]}
    parts["idle"] = max(0.0, seconds - busy)
    return {
        "seconds": short(seconds / _STEPS),
        "parts": [{"part": part, "seconds": short(parts[part] / _STEPS)} for part in PARTS],
        "kernels": [
            {
                "name": name[:200],
                "part": part_of(name),
                "calls": round(count[name] / _STEPS, 1),
                "seconds": short(each / _STEPS),
            }
            for name, each in sorted(took.items(), key=lambda item: -item[1])[:_KERNELS]
        ],
    }


def table(record: Mapping[str, Any]) -> str:
    """Lay out the profiles of a record as text: milliseconds and share of each part."""
    profiles = record["profiles"]
    lines = [
        f"{record['mode']}, {record['dtype']}, batch {record['batch_size']}: ms of a step, and %",
        f"{'part':18}" + "".join(f"{each['variant']:>22}" for each in profiles),
    ]
    for index, part in enumerate(PARTS):
        cells = [(each["parts"][index]["seconds"], each["seconds"]) for each in profiles]
        row = "".join(f"{1e3 * own:14.2f}{100 * own / whole:7.1f}%" for own, whole in cells)
        lines.append(f"{part:18}{row}")
    return "\n".join(lines)
