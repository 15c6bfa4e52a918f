"""Measure models in turns, in one process: speed and peak memory of training and inference."""

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.layers import set_fused_attn
from torch import Tensor
from tqdm import tqdm

from tokenformer_vit.models import compile_blocks


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
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
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
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


class Run:
    """A model that is ready to be measured: steps of AdamW on its loss, or forward passes.

    ``create`` builds the model. ``compute`` takes it and a batch, and returns the loss in training,
    else any output. Batches, on the device, are used in turns. ``amp`` is autocast to bfloat16.
    """

    def __init__(
        self,
        create: Callable[[], Any],
        compiled: bool,
        compute: Callable[..., Tensor],
        batches: Sequence[Sequence[Tensor]],
        training: bool,
        amp: bool,
    ) -> None:
        device = self.device = batches[0][0].device
        # On a CPU, PyTorch's kernel is 2.5 times slower in bfloat16 than timm's products.
        set_fused_attn(device.type != "cpu" or not amp)
        model = self.model = create().to(device).train(training)
        set_fused_attn(True)
        if compiled:
            # A graph break is an error. Shapes are static, as in a process with one model.
            compile_blocks(getattr(model, "base_model", model), fullgraph=True, dynamic=False)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self.compute, self.batches = compute, itertools.cycle(batches)

    def forward(self) -> Tensor:
        """Compute the loss in training, and the output otherwise."""
        with torch.set_grad_enabled(self.model.training), self.autocast:
            return self.compute(self.model, *next(self.batches))

    def step(self) -> None:
        """Run one step, which is timed."""
        output = self.forward()
        if self.model.training:
            output.backward()
            self.optimizer.step()
            # Last, not first: otherwise these gradients would occupy memory while others run.
            self.optimizer.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, float | None]:
        """Return ``peak_mib`` of this model alone, with its optimiser; None on a CPU."""
        if self.device.type == "cpu":
            return {"peak_mib": None}
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated()
        self.step()
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        own = sum(each.nbytes for each in (*self.model.parameters(), *self.model.buffers(), *state))
        return {"peak_mib": short((torch.cuda.max_memory_allocated() - others + own) / 2**20)}


def measure(runs: Mapping[str, Run], rounds: int) -> dict[str, dict[str, Any]]:
    """Measure runs in turns; return their memory and the ``seconds`` of every round by name."""
    torch.compiler.reset()
    for run, _ in itertools.product(runs.values(), range(3)):
        run.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        rows: dict[str, dict[str, Any]] = {name: run.memory() for name, run in runs.items()}
        device = next(iter(runs.values())).device
        steps = {name: run.step for name, run in runs.items()}
        for name, seconds in measure_rounds(steps, rounds, device).items():
            rows[name]["seconds"] = [short(value) for value in seconds]
    return rows


def short(value: float) -> float:
    """Round to six significant digits, enough for a measured time."""
    return float(f"{value:.6g}")
