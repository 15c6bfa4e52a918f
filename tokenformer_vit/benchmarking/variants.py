"""The ways to compute a model that are measured against each other, and the measuring."""

import gc
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer_vit.layers import BlockLayerNorm, Pattention
from tokenformer_vit.models import compile_blocks

from . import measures

__all__ = [
    "BACKENDS",
    "MODES",
    "PRECISIONS",
    "Group",
    "Released",
    "Setting",
    "Variant",
    "as_released",
    "create",
    "measure_group",
    "short",
]

BACKENDS = ("reference", "fused", "triton")
MODES = ("train", "infer")
CLASSES = 1000


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


class Setting(NamedTuple):
    """What all groups have in common; ``depth`` is None for as many blocks as a model has."""

    model: str
    baseline: str
    img_size: int
    depth: int | None
    device: torch.device
    seed: int
    rounds: int


class Group(NamedTuple):
    """What variants have in common that are measured against each other."""

    mode: str
    precision: str
    batch_size: int


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


def create(setting: Setting, implementation: str) -> Any:
    """Build the baseline, or the model with one of its backends, always with the same weights."""
    sizes: dict[str, Any] = {"img_size": setting.img_size, "num_classes": CLASSES}
    if setting.depth is not None:
        sizes["depth"] = setting.depth
    torch.manual_seed(setting.seed)
    if implementation == "baseline":
        return timm.create_model(setting.baseline, **sizes)
    model: Any = timm.create_model(setting.model, **sizes)
    if implementation == "released":
        return as_released(model)
    model.set_backend(implementation)
    return model


class Run:
    """A variant, ready to be run in a group over and over."""

    def __init__(
        self,
        setting: Setting,
        group: Group,
        variant: Variant,
        inputs: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.training = group.mode == "train"
        weights, products, _ = PRECISIONS[group.precision]
        self.precision = (
            nullcontext() if weights == products else torch.autocast(setting.device.type, products)
        )
        self.model = (
            create(setting, variant.implementation).to(setting.device, weights).train(self.training)
        )
        if variant.compiled:
            # A graph break is an error; and as in a process of its own, no shape is seen to vary.
            compile_blocks(self.model, fullgraph=True, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.inputs = itertools.cycle(inputs)

    def forward(self) -> Tensor:
        """Compute the loss in training, the scores of the classes otherwise."""
        images, labels = next(self.inputs)
        with self.precision:
            scores = self.model(images)
            return F.cross_entropy(scores, labels) if self.training else scores

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
    shape = (group.batch_size, 3, setting.img_size, setting.img_size)
    random = torch.Generator().manual_seed(setting.seed)
    inputs = [
        (
            torch.randn(shape, generator=random).to(setting.device, precision.weights),
            torch.randint(CLASSES, shape[:1], generator=random).to(setting.device),
        )
        for _ in range(3)
    ]
    runs: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {
        v.name: {"variant": v.name, "implementation": v.implementation, "compiled": v.compiled}
        for v in variants
    }

    def build(variant: Variant) -> None:
        runs[variant.name] = Run(setting, group, variant, inputs)

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
        rise = measures.peak_bytes(run.step, setting.device)
        row["saved_mb_per_image"] = None if saved is None else short(saved / group.batch_size / 1e6)
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
            seconds = measures.measure_rounds(steps, setting.rounds, setting.device, tick)
    for name, values in seconds.items():
        rows[name]["seconds"] = [short(value) for value in values]
    return {
        **group._asdict(),
        "dtype": precision.words,
        "input_shape": list(shape),
        "variants": list(rows.values()),
    }
