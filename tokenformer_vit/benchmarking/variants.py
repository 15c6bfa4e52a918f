"""The ways to compute a model that are measured against each other, and the measuring."""

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer_vit.layers import BlockLayerNorm, Pattention
from tokenformer_vit.models import compile_blocks

from . import measures

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "Group",
    "Released",
    "Setting",
    "Subject",
    "Variant",
    "as_released",
    "measure_group",
    "short",
]

BACKENDS = ("reference", "fused", "triton")


class Precision(NamedTuple):
    """Dtype of the weights, that of the matrix products, and how a record says it."""

    weights: torch.dtype
    products: torch.dtype
    words: str


PRECISIONS = {
    "float32": Precision(torch.float32, torch.float32, "float32"),
    "autocast": Precision(torch.float32, torch.bfloat16, "bfloat16 autocast"),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, "bfloat16"),
}


class Group(NamedTuple):
    """What variants have in common that are measured against each other."""

    mode: str
    precision: str
    batch_size: int


class Subject(Protocol):
    """What is measured: a model of ours, and the baseline that it is compared with."""

    @property
    def unit(self) -> str:
        """What speed is counted in: ``image`` or ``token``."""
        ...

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways in which the models can run; ``train`` is one of them."""
        ...

    def create(self, implementation: str, seed: int) -> Any:
        """Build the baseline, or our model with one of its backends, always of the same weights.

        Its blocks are in ``blocks``.
        """
        ...

    def costs(self, implementation: str) -> tuple[int, dict[str, int]]:
        """Count a model's parameters, and the FLOPs of an image or a token in each mode."""
        ...

    def shape(self, group: Group) -> list[int]:
        """Return that of a step's inputs."""
        ...

    def items(self, group: Group) -> int:
        """Return how many images or tokens a step is about."""
        ...

    def draw(self, group: Group, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets."""
        ...

    def bind(
        self, model: nn.Module, group: Group, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> Callable[[], Tensor]:
        """Return what computes the loss in mode ``train``, and what is timed in another."""
        ...


class Setting(NamedTuple):
    """What all groups have in common."""

    subject: Subject
    device: torch.device
    seed: int
    rounds: int


class Variant(NamedTuple):
    """``implementation`` is one of ``BACKENDS``, ``released`` or ``baseline``."""

    implementation: str
    compiled: bool

    @property
    def name(self) -> str:
        """What a record calls it."""
        return f"{self.implementation} {'compiled' if self.compiled else 'eager'}"


def short(value: float) -> float:
    """Round to six significant digits, as many as a measured time deserves."""
    return float(f"{value:.6g}")


class Released(nn.Module):
    """Pattention as the authors' language code computes it, over the parameters of a layer.

    Unlike ours it has no eps and no float32 in between, and its scale follows the number of pairs.
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


def as_released(model: Any) -> Any:
    """Let the blocks of a model compute as the authors' language code does, in place."""
    for parent in list(model.blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Pattention):
                setattr(parent, name, Released(child))
            elif isinstance(child, BlockLayerNorm):
                norm = nn.LayerNorm(child.normalized_shape[0], child.eps, elementwise_affine=False)
                setattr(parent, name, norm)
    return model


class Run:
    """A variant, ready to be run in a group over and over."""

    def __init__(
        self,
        setting: Setting,
        group: Group,
        variant: Variant,
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
            # A graph break is an error; and as in a process of its own, no shape is seen to vary.
            compile_blocks(self.model, fullgraph=True, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self._compute = setting.subject.bind(self.model, group, batches)

    def forward(self) -> Tensor:
        """Compute the loss in training, and what is timed otherwise."""
        with self.precision:
            return self._compute()

    def step(self) -> None:
        """Do what is timed."""
        if self.training:
            self.forward().backward()
            self.optimizer.step()
            # Last rather than first, so that no other variant runs beside these gradients.
            self.optimizer.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                self.forward()

    def own_bytes(self) -> int:
        """Count what stays between steps: parameters, buffers, the optimiser's state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return measures.tensor_bytes([*self.model.parameters(), *self.model.buffers(), *state])


def measure_group(
    setting: Setting,
    group: Group,
    variants: Sequence[Variant],
    tick: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Measure variants against each other.

    Args:
        setting: What all groups have in common.
        group: The group.
        variants: What is measured in it.
        tick: Told the name of a variant after its warm-up and after each of its rounds.

    Returns:
        The group's entry in the record, with the seconds and the memory of its variants; a variant
        that the GPU has no room for has ``failed`` instead.

    Raises:
        RuntimeError: If a variant that is to be compiled is not, or not as a whole.
    """
    precision = PRECISIONS[group.precision]
    subject, device = setting.subject, setting.device
    random = torch.Generator().manual_seed(setting.seed)
    batches = []
    for _ in range(3):
        inputs, targets = subject.draw(group, random)
        dtype = precision.weights if inputs.is_floating_point() else inputs.dtype
        batches.append((inputs.to(device, dtype), targets.to(device)))
    runs: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {
        v.name: {"variant": v.name, "implementation": v.implementation, "compiled": v.compiled}
        for v in variants
    }

    def build(variant: Variant) -> None:
        runs[variant.name] = Run(setting, group, variant, batches)

    def warm_up(variant: Variant) -> None:
        graphs = measures.compiled_graphs()
        for _ in range(3):
            runs[variant.name].step()
        if variant.compiled and measures.compiled_graphs() == graphs:
            raise RuntimeError(f"torch.compile did nothing for {variant.name}")
        tick(variant.name)

    def weigh(variant: Variant) -> None:
        run, row = runs[variant.name], rows[variant.name]
        saved = measures.saved_bytes(run.forward, run.model) if run.training else None
        rise = measures.peak_bytes(run.step, device)
        kept = None if saved is None else short(saved / subject.items(group) / 1e6)
        row[f"saved_mb_per_{subject.unit}"] = kept
        row["peak_mib"] = None if rise is None else short((rise + run.own_bytes()) / 2**20)

    def for_each(do: Callable[[Variant], None]) -> None:
        for variant in variants:
            row = rows[variant.name]
            if "failed" in row:
                continue
            try:
                do(variant)
            except torch.OutOfMemoryError:
                row["failed"] = "out of memory"
            if "failed" in row:  # only here has the error let go of the tensors
                runs.pop(variant.name, None)
                gc.collect()
                torch.cuda.empty_cache()

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
