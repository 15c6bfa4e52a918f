"""Measure the time and the memory that a model takes, on a GPU or a CPU.

Nothing here knows what is measured: calls are functions without arguments, models any module.
Rates are per second; bytes are bytes.
"""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import torch
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "compiled_graphs",
    "copy_rate",
    "count_flops",
    "frozen_compilations",
    "many_compilations",
    "matmul_rate",
    "measure_rounds",
    "peak_bytes",
    "percentiles",
    "saved_bytes",
    "tensor_bytes",
]

Call = Callable[[], object]


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the 20th, 50th and 80th percentile, interpolated linearly."""
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(points).tolist()


def seconds_of(call: Call, device: torch.device) -> float:
    """Time one call: by events on a GPU, which is not waited for before, by the clock elsewhere."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    start_time = time.perf_counter()
    call()
    return time.perf_counter() - start_time


def measure_rounds(
    calls: Mapping[str, Call],
    rounds: int,
    device: torch.device,
    tick: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Time calls against each other, each once a round.

    Every round starts at the next call, and each timed call follows an untimed one of its own, so
    that none profits from its place or from what another left in the caches.

    Args:
        calls: By name, warmed up.
        rounds: How many.
        device: Where they run.
        tick: Told the name after each.

    Returns:
        The seconds of every round, by name.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            calls[name]()
            seconds[name].append(seconds_of(calls[name], device))
            tick(name)
    return seconds


@contextmanager
def many_compilations() -> Iterator[None]:
    """Let one process compile many models in turn.

    Their blocks run through the same Python functions, of which torch.compile gives up after a
    few versions and quietly goes on uncompiled. Here the limit is far off and reaching it is an
    error. Whatever was compiled before is forgotten.
    """
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    if not hasattr(dynamo_config, names[0]):  # an older PyTorch
        names = ("cache_size_limit", "accumulated_cache_size_limit", "fail_on_cache_limit_hit")
    torch.compiler.reset()
    with dynamo_config.patch(dict(zip(names, (256, 4096, True), strict=True))):  # type: ignore
        yield


def compiled_graphs() -> int:
    """Count the graphs that torch.compile has made so far."""
    return counters["stats"]["unique_graphs"]


def frozen_compilations() -> AbstractContextManager[object]:
    """Make it an error to compile again, a context in which to measure what is warmed up."""
    return dynamo_config.patch(error_on_recompile=True)  # type: ignore[attr-defined]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def saved_bytes(forward: Call, model: nn.Module) -> int:
    """Add up what a forward call keeps for the backward.

    Counted are whole storages, each once, since a view keeps all of its storage. Not counted are
    those of parameters and buffers, and copies of parameters in another precision (recognised by
    their values), whose size does not depend on the batch. What torch.compile keeps goes through
    the same hooks, without a recompilation. A custom autograd function that puts a tensor on its
    context by itself, without ``save_for_backward``, escapes.

    Args:
        forward: Computes the loss.
        model: Owns the parameters.

    Returns:
        Bytes.
    """
    kept: dict[int, list[Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # shares the storage, and makes no cycle through the graph
        kept.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    own = [*model.parameters(), *model.buffers()]
    for tensor in own:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in model.parameters():
        by_shape.setdefault(tuple(sorted(parameter.shape)), []).append(parameter.detach())
    return sum(
        views[0].untyped_storage().nbytes()
        for views in kept.values()
        if not any(
            _is_cast(view, by_shape.get(tuple(sorted(view.shape)), ()))
            for view in views
            if view.ndim > 1 and view.is_floating_point()
        )
    )


def _is_cast(tensor: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Say whether a tensor has the values of a parameter, or of one transposed."""
    for parameter in parameters:
        for other in (parameter, parameter.t()) if parameter.ndim == 2 else (parameter,):
            if other.shape == tensor.shape and all(
                torch.equal(other[rows].to(tensor.dtype), tensor[rows])
                for rows in (slice(1), slice(None))  # the first row alone tells most apart
            ):
                return True
    return False


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Measure by how much memory rises during a call.

    Args:
        call: Warmed up.
        device: Where it runs. On a GPU tensors are counted; elsewhere the memory of this process
            in the RAM, after what the C library held in reserve went back to the system.

    Returns:
        Bytes of the highest point over those before the call; None where the system does not
        tell, which on a CPU is any but Linux.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if sys.platform != "linux":
        return None
    with suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark
        before, mark = _resident("VmRSS"), _resident("VmHWM")
        if mark > before + 2**24:
            return None  # it was accepted, but without effect
        call()
        return _resident("VmHWM") - before
    except (OSError, ValueError):
        return None


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a large square matrix product of random numbers.

    Args:
        device: A product of size 8192 on a GPU, 2048 on a CPU.
        dtype: Of the operands.
    """
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _least_seconds(lambda: torch.mm(a, b, out=out), device)


def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second, read and written both counted, of a large copy."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _least_seconds(lambda: target.copy_(source), device)


def _least_seconds(call: Call, device: torch.device) -> float:
    for _ in range(3):
        call()
    # The least, not the median: what disturbs a measurement never makes it faster.
    return min(seconds_of(call, device) for _ in range(11))


def count_flops(model: nn.Module, image_shape: Sequence[int]) -> dict[str, int]:
    """Count the floating-point operations that a classifier needs for an image.

    Matrix products and convolutions, a multiplication and an addition each; attention as its two
    products forward and four backward, whatever a kernel computes again.

    Args:
        model: On the device ``meta``, uncompiled.
        image_shape: (C, H, W).

    Returns:
        ``infer``: of the forward; ``train``: of forward and backward.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]
    images = torch.empty(2, *image_shape, device="meta")
    labels = torch.zeros(2, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as infer, torch.no_grad():
        model.eval()(images)
    with FlopCounterMode(display=False) as train:
        F.cross_entropy(model.train()(images), labels).backward()
    return {
        "infer": infer.get_total_flops() // len(images),
        "train": train.get_total_flops() // len(images),
    }
