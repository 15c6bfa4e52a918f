"""Measure time, memory and FLOPs of any call without arguments, on a GPU or a CPU."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

Call = Callable[[], object]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return ``NAME_p20``, ``NAME_p50`` and ``NAME_p80`` of values, interpolated linearly."""
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return {f"{name}_{key}": short(v) for key, v in zip(("p20", "p50", "p80"), found, strict=True)}


def short(value: float) -> float:
    """Round to six significant digits, enough for a measured time."""
    return float(f"{value:.6g}")


def seconds_of(call: Call, device: torch.device) -> float:
    """Time one call: by events on a GPU, without waiting for it before; by the clock on a CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_rounds(
    calls: Mapping[str, Call], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of every round by name, of calls that are already warmed up.

    Every round starts with another call, and an untimed run precedes each timed one. Therefore no
    call gains from its place in a round, or from the caches of another call.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            calls[name]()
            seconds[name].append(seconds_of(calls[name], device))
    return seconds


def saved_bytes(forward: Call, model: nn.Module) -> int:
    """Count the bytes that a forward call keeps for the backward pass.

    A storage counts once and as a whole, because a view keeps all of it. Parameters, buffers and
    their copies in another precision do not count: their size does not depend on the batch. What a
    custom autograd function stores without ``save_for_backward`` is not seen.
    """
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # shares the storage, and makes no cycle through the graph
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    matrices = [parameter.detach() for parameter in model.parameters() if parameter.ndim > 1]
    copies = [own for each in matrices for own in (each, each.mT)]

    def is_copy(tensor: Tensor) -> bool:
        same = (own for own in copies if own.shape == tensor.shape)
        return any(torch.equal(own.to(tensor.dtype), tensor) for own in same)

    return sum(t.untyped_storage().nbytes() for t in kept.values() if not is_copy(t))


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Return how many bytes of tensors a warmed-up call adds at its peak; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square product of random numbers: 8192 on a GPU, 2048 on a CPU."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    # The minimum, not the median, because disturbances only make a measurement slower.
    return 2 * size**3 / min(seconds_of(lambda: torch.mm(a, b, out=out), device) for _ in range(14))


def counted_flops(call: Call) -> dict[str, int]:
    """Return what PyTorch counts, by module; ``Global`` is the sum.

    It counts matrix products, convolutions and attention, also of tensors on the device ``meta``. A
    multiplication and an addition are two FLOPs.
    """
    with FlopCounterMode(display=False) as counter:
        call()
    return {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
