"""Measure the variants of a model in turns: baseline, authors' formula, backends."""

import gc
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tokenformer_vit.errors import one_line
from tokenformer_vit.layers import BlockLayerNorm, BlockNorm, Pattention
from tokenformer_vit.models import compile_blocks

from . import measures

if TYPE_CHECKING:
    from .images import Images
    from .language import Language

BACKENDS = ("reference", "auto")
OUT_OF_MEMORY = "out of memory"


class Precision(NamedTuple):
    """Dtype of the weights, dtype of the matrix products, and the name in a record."""

    weights: torch.dtype
    products: torch.dtype
    words: str


PRECISIONS = {
    "float32": Precision(torch.float32, torch.float32, "float32"),
    "autocast": Precision(torch.float32, torch.bfloat16, "bfloat16 autocast"),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, "bfloat16"),
}


class Group(NamedTuple):
    """Mode, precision and batch size of variants that are compared."""

    mode: str
    precision: str
    batch_size: int


class Setting(NamedTuple):
    """Settings of all groups."""

    subject: "Images | Language"
    device: torch.device
    seed: int
    rounds: int


class BenchmarkVariant(NamedTuple):
    """One of ``BACKENDS``, ``released`` or ``baseline``; eager or compiled."""

    implementation: str
    compiled: bool

    @property
    def name(self) -> str:
        """Name in a record."""
        return f"{self.implementation} {'compiled' if self.compiled else 'eager'}"


def short(value: float) -> float:
    """Round to six significant digits, enough for a measured time."""
    return float(f"{value:.6g}")


class Released(nn.Module):
    """Pattention by the formula of the authors' language code, with the parameters of a layer.

    It has no eps, computes nothing in float32, and its scale depends on the number of pairs.
    """

    def __init__(self, layer: Pattention) -> None:
        super().__init__()
        self.key_param_tokens = layer.key_param_tokens
        self.value_param_tokens = layer.value_param_tokens

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C_in) tokens to (..., C_out)."""
        scores = x @ self.key_param_tokens.T  # (..., P)
        directions = scores / torch.norm(scores, dim=-1, keepdim=True)
        return F.gelu(directions * math.sqrt(scores.shape[-1])) @ self.value_param_tokens


def set_backend(model: Any, backend: str) -> Any:
    """Choose one of ``BACKENDS`` for the blocks of a model, in place."""
    for module in model.blocks.modules():
        if isinstance(module, BlockNorm | Pattention):
            module.backend = backend  # type: ignore[assignment]
    return model


def as_released(model: Any) -> Any:
    """Replace the formula in the blocks of a model by the authors' formula, in place."""
    for parent in list(model.blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Pattention):
                setattr(parent, name, Released(child))
            elif isinstance(child, BlockLayerNorm):
                norm = nn.LayerNorm(child.normalized_shape[0], child.eps, elementwise_affine=False)
                setattr(parent, name, norm)
    return model


class PreparedVariant:
    """A variant that is ready to run in a group."""

    def __init__(
        self,
        setting: Setting,
        group: Group,
        variant: BenchmarkVariant,
        batches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.training = group.mode == "train"
        weights, products, _ = PRECISIONS[group.precision]
        self.precision = (
            nullcontext() if weights == products else torch.autocast(setting.device.type, products)
        )
        model = setting.subject.create(variant.implementation, setting.seed)
        self.model = model.to(setting.device, weights).train(self.training)
        if variant.compiled:
            # A graph break is an error. Shapes are static, as in a process with one model.
            compile_blocks(self.model, fullgraph=True, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self._compute = setting.subject.bind(self.model, group, batches)

    def forward(self) -> Tensor:
        """Compute the loss in training, and the output otherwise."""
        with self.precision:
            return self._compute()

    def step(self) -> None:
        """Run one step, which is timed."""
        if self.training:
            self.forward().backward()
            self.optimizer.step()
            # Last, not first: otherwise these gradients would occupy memory while others run.
            self.optimizer.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                self.forward()

    def own_bytes(self) -> int:
        """Count the bytes between steps: parameters, buffers and optimizer state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return measures.tensor_bytes([*self.model.parameters(), *self.model.buffers(), *state])


def _draw(setting: Setting, group: Group) -> list[tuple[Tensor, Tensor]]:
    """Draw three batches for a group."""
    random, batches = torch.Generator().manual_seed(setting.seed), []
    for _ in range(3):
        inputs, targets = setting.subject.draw(group, random)
        dtype = PRECISIONS[group.precision].weights if inputs.is_floating_point() else inputs.dtype
        batches.append((inputs.to(setting.device, dtype), targets.to(setting.device)))
    return batches


def profile_step(setting: Setting, group: Group, variant: BenchmarkVariant) -> str:
    """Return the profiler's table of five steps of a variant, the slowest kernels first."""
    on_gpu = setting.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with measures.many_compilations():
        run = PreparedVariant(setting, group, variant, _draw(setting, group))
        for _ in range(3):
            run.step()
        with profile(activities=activities) as profiler:
            for _ in range(5):
                run.step()
            if on_gpu:
                torch.cuda.synchronize()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)


def measure_group(
    setting: Setting,
    group: Group,
    variants: Sequence[BenchmarkVariant],
    tick: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Measure the variants of a group in turns.

    Args:
        setting: Settings of all groups.
        group: Mode, precision and batch size.
        variants: Variants to measure.
        tick: Function that gets the name of a variant after its warm-up and after each round.

    Returns:
        Entry of the group in the record, with the seconds and the memory of its variants. A variant
        that needs more memory than the GPU has gets ``failed`` instead; so does one with another
        error, such as a kernel that does not compile, whose traceback is printed.
    """
    precision = PRECISIONS[group.precision]
    subject, device = setting.subject, setting.device
    batches = _draw(setting, group)
    runs: dict[str, PreparedVariant] = {}
    rows: dict[str, dict[str, Any]] = {
        v.name: {"variant": v.name, "implementation": v.implementation, "compiled": v.compiled}
        for v in variants
    }

    def build(variant: BenchmarkVariant) -> None:
        runs[variant.name] = PreparedVariant(setting, group, variant, batches)

    def warm_up(variant: BenchmarkVariant) -> None:
        graphs = measures.compiled_graphs()
        for _ in range(3):
            runs[variant.name].step()
        if variant.compiled and measures.compiled_graphs() == graphs:
            raise RuntimeError(f"torch.compile did nothing for {variant.name}")
        tick(variant.name)

    def weigh(variant: BenchmarkVariant) -> None:
        run, row = runs[variant.name], rows[variant.name]
        saved = measures.saved_bytes(run.forward, run.model) if run.training else None
        rise = measures.peak_bytes(run.step, device)
        kept = None if saved is None else short(saved / subject.items(group) / 1e6)
        row[f"saved_mb_per_{subject.unit}"] = kept
        row["peak_mib"] = None if rise is None else short((rise + run.own_bytes()) / 2**20)

    def for_each(do: Callable[[BenchmarkVariant], None]) -> None:
        for variant in variants:
            row = rows[variant.name]
            if "failed" in row:
                continue
            try:
                do(variant)
            except torch.OutOfMemoryError:
                row["failed"] = OUT_OF_MEMORY
            except Exception as error:  # it must not cost the measurements of the others
                traceback.print_exc()
                row["failed"] = one_line(error, 100)
            if "failed" in row:  # after the error has released its tensors
                runs.pop(variant.name, None)
                gc.collect()
                torch.cuda.empty_cache()  # raises again if no other kernel can run either

    with measures.many_compilations():
        for_each(build)
        for_each(warm_up)
        with measures.frozen_compilations():
            for_each(weigh)
            steps = {name: run.step for name, run in runs.items()}
            seconds = measures.measure_rounds(steps, setting.rounds, device, tick)
    for name, values in seconds.items():
        rows[name]["seconds"] = [short(value) for value in values]
    return {
        **group._asdict(),
        "dtype": precision.words,
        "input_shape": subject.shape(group),
        "items": subject.items(group),
        "variants": list(rows.values()),
    }
