"""Measure time, memory and FLOPs of any call, on a GPU or a CPU.

A call is a function without arguments, a model is any module. Rates are per second.
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

Call = Callable[[], object]


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the 20th, 50th and 80th percentile, interpolated linearly."""
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(points).tolist()


def _seconds_of(call: Call, device: torch.device) -> float:
    """Time one call: by events on a GPU, without waiting for it before; by the clock on a CPU."""
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


@contextmanager
def kept_heap() -> Iterator[None]:
    """Let GNU's C library keep freed memory instead of returning it to the system; see mallopt(3).

    Otherwise a call on a CPU gets part of its memory from the system again, page by page. How much
    depends on what the process did before, so the same call may take longer in another process.
    Other C libraries stay as they are.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        yield
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    set_option(trim_threshold, -1)
    set_option(mmap_max, 0)
    try:
        yield
    finally:  # the library's own values
        set_option(trim_threshold, 128 * 1024)
        set_option(mmap_max, 65536)


def measure_rounds(
    calls: Mapping[str, Call],
    rounds: int,
    device: torch.device,
    tick: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Time calls in turns, each once per round.

    Every round starts with another call, an untimed run precedes each timed one, and freed memory
    is kept. Therefore no call has an advantage from its place in a round, or from the caches or the
    memory of another call.

    Args:
        calls: Calls by name, already warmed up.
        rounds: Number of rounds.
        device: Device on which the calls run.
        tick: Function that gets the name after each timed call.

    Returns:
        Seconds of every round, by name.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with kept_heap():
        for index in range(rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                calls[name]()
                seconds[name].append(_seconds_of(calls[name], device))
                tick(name)
    return seconds


@contextmanager
def many_compilations() -> Iterator[None]:
    """Let one process compile many models.

    All blocks run the same Python functions. After a few versions of a function, torch.compile
    would silently stop compiling it. In this context the limit is much higher, and reaching it is
    an error. Earlier compiled code is discarded.
    """
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    if not hasattr(dynamo_config, names[0]):  # an older PyTorch
        names = ("cache_size_limit", "accumulated_cache_size_limit", "fail_on_cache_limit_hit")
    torch.compiler.reset()
    with dynamo_config.patch(dict(zip(names, (256, 4096, True), strict=True))):  # type: ignore
        yield


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made so far."""
    return counters["stats"]["unique_graphs"]


def frozen_compilations() -> AbstractContextManager[object]:
    """Return a context in which a new compilation is an error, to measure after the warm-up."""
    return dynamo_config.patch(error_on_recompile=True)  # type: ignore[attr-defined]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def saved_bytes(forward: Call, model: nn.Module) -> int:
    """Count the bytes that a forward call keeps for the backward pass.

    Each storage is counted once and as a whole, because a view keeps its whole storage. Parameters,
    buffers and copies of parameters in another precision are not counted, because their size does
    not depend on the batch; copies are recognised by their values. A compiled model is measured as
    it is, without a new compilation. Tensors that a custom autograd function stores without
    ``save_for_backward`` are not counted.

    Args:
        forward: Function that computes the loss.
        model: Model with the parameters.

    Returns:
        Number of bytes.
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
    """Return whether a tensor has the values of a parameter or of its transpose."""
    for parameter in parameters:
        for other in (parameter, parameter.t()) if parameter.ndim == 2 else (parameter,):
            if other.shape == tensor.shape and all(
                torch.equal(other[rows].to(tensor.dtype), tensor[rows])
                for rows in (slice(1), slice(None))  # the first row is enough for most
            ):
                return True
    return False


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Measure how much memory rises during a call.

    On a GPU this is the memory of tensors. On a CPU it is this process's resident memory, after
    the C library has returned its reserve to the system.

    Args:
        call: Call that is already warmed up.
        device: Device on which it runs.

    Returns:
        Peak bytes minus the bytes before the call. None if the system does not report them, as on a
        CPU without Linux.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    resident = _reset_high_water()
    call()
    return None if resident is None else _resident("VmHWM") - resident


def _reset_high_water() -> int | None:
    """Return the bytes of resident memory, from which its high-water mark now rises, if it does."""
    if sys.platform != "linux":
        return None
    with suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark
        resident, mark = _resident("VmRSS"), _resident("VmHWM")
    except (OSError, ValueError):
        return None
    return resident if mark <= resident + 2**24 else None  # the reset may have no effect


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a large square matrix product of random numbers.

    Args:
        device: Device; the size is 8192 on a GPU and 2048 on a CPU.
        dtype: Dtype of the operands.
    """
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _least_seconds(lambda: torch.mm(a, b, out=out), device)


def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second of a large copy; read and written bytes both count."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _least_seconds(lambda: target.copy_(source), device)


def _least_seconds(call: Call, device: torch.device) -> float:
    for _ in range(3):
        call()
    # The minimum, not the median, because disturbances only make a measurement slower.
    return min(_seconds_of(call, device) for _ in range(11))


def counted_flops(call: Call) -> dict[str, int]:
    """Count the floating-point operations of a call with PyTorch's counter.

    It counts matrix products, convolutions and attention; a multiplication and an addition are two
    operations.

    Args:
        call: Function to count; tensors may be on the device ``meta``.

    Returns:
        FLOPs by module name; ``Global`` is the sum.
    """
    with FlopCounterMode(display=False) as counter:
        call()
    return {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}


def count_flops(model: nn.Module, image_shape: Sequence[int]) -> dict[str, int]:
    """Count the FLOPs of a classifier per image; see :func:`counted_flops`.

    Attention is counted as two products in the forward pass and four in the backward pass, even if
    a kernel computes some of them again.

    Args:
        model: Uncompiled classifier on the device ``meta``.
        image_shape: (C, H, W).

    Returns:
        ``infer``: FLOPs of a forward pass; ``train``: of a forward and a backward pass.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]
    images = torch.empty(2, *image_shape, device="meta")
    labels = torch.zeros(2, dtype=torch.long, device="meta")
    with torch.no_grad():
        infer = counted_flops(lambda: model.eval()(images))["Global"]
    train = counted_flops(lambda: F.cross_entropy(model.train()(images), labels).backward())
    return {"infer": infer // len(images), "train": train["Global"] // len(images)}
