"""Measure a TokenFormer, the authors' formula and a baseline in turns."""

import gc
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torch.profiler import profile
from tqdm import tqdm

from tokenformer_vit.layers import BlockLayerNorm, Pattention
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.models.compilation import blocks_of

from . import measures
from .costs import model_costs, total
from .matched import matched_vit

CLASSES = 1000
MATCHED = "matched-vit"  # a baseline: the ViT of the same width and depth with as many weights
IMPLEMENTATIONS = ("baseline", "released", "auto")
# Dtype of the weights, dtype of the matrix products, and the name in a record.
PRECISIONS = {
    "float32": (torch.float32, torch.float32, "float32"),
    "autocast": (torch.float32, torch.bfloat16, "bfloat16 autocast"),
    "bfloat16": (torch.bfloat16, torch.bfloat16, "bfloat16"),
}


class Group(NamedTuple):
    """What the variants of a group have in common."""

    mode: str
    precision: str
    batch_size: int


class Variant(NamedTuple):
    """``baseline``, ``released`` (the authors' formula) or ``auto`` (ours); compiled or not."""

    implementation: str
    compiled: bool

    def __str__(self) -> str:
        """Return the name in a record."""
        return f"{self.implementation} {'compiled' if self.compiled else 'eager'}"


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


class Images(NamedTuple):
    """Two image models by timm's names, or ``MATCHED``; a depth replaces that of both."""

    model: str
    baseline: str
    img_size: int
    depth: int | None

    unit = "image"
    modes = ("train", "infer")

    def create(self, baseline: bool) -> Any:
        """Build one of the models with random weights."""
        sizes: dict[str, Any] = {"img_size": self.img_size, "num_classes": CLASSES}
        sizes |= {} if self.depth is None else {"depth": self.depth}
        if not baseline or self.baseline != MATCHED:
            return timm.create_model(self.baseline if baseline else self.model, **sizes)
        with torch.device("meta"):
            model: Any = timm.create_model(self.model, **sizes)
        return matched_vit(model)[0]

    def costs(self, baseline: bool) -> tuple[int, dict[str, int]]:
        """Count the parameters, and the FLOPs per image in each mode."""
        with torch.device("meta"), torch.no_grad():
            model = build(self, "baseline" if baseline else "auto").eval()
            images = torch.empty(1, 3, self.img_size, self.img_size)
            flops = measures.counted_flops(lambda: model(images))["Global"]
        count = sum(parameter.numel() for parameter in model.parameters())
        return count, {"train": 3 * flops, "infer": flops}

    def items(self, group: Group) -> int:
        """Return the number of images in a step."""
        return group.batch_size

    def draw(self, group: Group, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw (B, 3, S, S) images and (B,) labels."""
        images = torch.randn(group.batch_size, 3, self.img_size, self.img_size, generator=random)
        return images, torch.randint(CLASSES, (group.batch_size,), generator=random)

    def compute(self, model: Any, mode: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that computes the loss in training, and class scores otherwise."""
        if mode == "infer":
            return lambda images, labels: model(images)
        return lambda images, labels: F.cross_entropy(model(images), labels)


class Language(NamedTuple):
    """Two causal language models of transformers, which functions build; N tokens a sequence."""

    model: Callable[[], nn.Module]
    baseline: Callable[[], nn.Module]
    vocab_size: int
    num_tokens: int

    unit = "token"
    modes = ("train", "prefill", "decode")

    @property
    def decoded(self) -> int:
        """Number of tokens that a decoding step adds to each sequence."""
        return min(32, self.num_tokens // 2)

    def create(self, baseline: bool) -> Any:
        """Build one of the models with random weights."""
        return self.baseline() if baseline else self.model()

    def costs(self, baseline: bool) -> tuple[int, dict[str, int]]:
        """Count the parameters, and the FLOPs per token in each mode; prefill has one logit row."""
        with torch.device("meta"):
            model = self.create(baseline)
        whole, single = (model_costs(model, tokens) for tokens in (self.num_tokens, 1))
        forward, attention = total(whole).forward_flops, single["token_token"].forward_flops
        prompt = forward - whole["head"].forward_flops + single["head"].forward_flops
        others = self.num_tokens - (self.decoded + 1) / 2  # before a decoded token, on average
        return total(whole).parameters, {
            "train": 3 * forward // self.num_tokens,
            "prefill": prompt // self.num_tokens,
            "decode": round(total(single).forward_flops + attention * others),
        }

    def items(self, group: Group) -> int:
        """Return the number of tokens that a step trains on, reads or adds."""
        return group.batch_size * (self.decoded if group.mode == "decode" else self.num_tokens)

    def draw(self, group: Group, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw (B, N) tokens, and the next token of each."""
        shape = (group.batch_size, self.num_tokens + 1)
        rows = torch.randint(self.vocab_size, shape, generator=random)
        return rows[:, :-1], rows[:, 1:]

    def compute(self, model: Any, mode: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that computes the loss in training, and the last logits otherwise."""
        begun: dict[str, Any] = {}

        def train(tokens: Tensor, targets: Tensor) -> Tensor:
            logits = model(tokens, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def prefill(tokens: Tensor, targets: Tensor) -> Tensor:
            return model(tokens, use_cache=False, logits_to_keep=1).logits

        def decode(tokens: Tensor, targets: Tensor) -> Tensor:
            """Continue the first tokens greedily, each time from the same cache."""
            if not begun:  # in the warm-up, which runs in the same precision
                known = self.num_tokens - self.decoded
                start = model(tokens[:, :known], use_cache=True, logits_to_keep=1)
                name = "cache" if "cache" in start else "past_key_values"  # of transformers
                begun.update(cache={name: start[name]}, token=tokens[:, known : known + 1])
            cache, token, logits = begun["cache"], begun["token"], tokens
            for _ in range(self.decoded):
                logits = model(token, use_cache=True, **cache).logits
                token = logits[:, -1].argmax(dim=-1, keepdim=True)
            next(iter(cache.values())).crop(-self.decoded)
            return logits

        return {"train": train, "prefill": prefill, "decode": decode}[mode]


Subject = Images | Language


def variants(group: Group, eager: bool) -> list[Variant]:
    """Return what to measure in a group; decoding is never compiled."""
    compiled = (False,) if eager or group.mode == "decode" else (False, True)
    return [Variant(*each) for each in itertools.product(IMPLEMENTATIONS, compiled)]


def build(subject: Subject, implementation: str, seed: int = 0) -> Any:
    """Build the model of a variant; all but the baseline get the same random weights."""
    torch.manual_seed(seed)
    model: Any = subject.create(implementation == "baseline")
    for parent in list(blocks_of(getattr(model, "base_model", model)).modules()):
        for name, child in list(parent.named_children()) * (implementation == "released"):
            if isinstance(child, Pattention):
                setattr(parent, name, Released(child))
            elif isinstance(child, BlockLayerNorm):
                norm = nn.LayerNorm(child.normalized_shape[0], child.eps, elementwise_affine=False)
                setattr(parent, name, norm)
    return model


class Run:
    """A variant that is ready to run in a group."""

    def __init__(
        self, subject: Subject, device: torch.device, group: Group, variant: Variant
    ) -> None:
        self.subject, self.device = subject, device
        weights, products, _ = PRECISIONS[group.precision]
        # There, PyTorch's kernel is 2.5 times slower than timm's products; so in every variant.
        set_fused_attn(device.type != "cpu" or products != torch.bfloat16)
        model = build(subject, variant.implementation)
        set_fused_attn(True)
        self.model = model.to(device, weights).train(group.mode == "train")
        if variant.compiled:
            # A graph break is an error. Shapes are static, as in a process with one model.
            compile_blocks(getattr(model, "base_model", model), fullgraph=True, dynamic=False)
        self.precision = torch.autocast(device.type, products) if weights != products else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        random, batches = torch.Generator().manual_seed(0), []
        for _ in range(3):
            inputs, targets = subject.draw(group, random)
            inputs = inputs.to(weights) if inputs.is_floating_point() else inputs
            batches.append((inputs.to(device), targets.to(device)))
        self.batches = itertools.cycle(batches)
        self.compute = subject.compute(self.model, group.mode)

    def forward(self) -> Tensor:
        """Compute the loss in training, and the output otherwise."""
        with self.precision or nullcontext():
            return self.compute(*next(self.batches))

    def step(self) -> None:
        """Run one step, which is timed."""
        with torch.set_grad_enabled(self.model.training):
            output = self.forward()
        if self.model.training:
            output.backward()
            self.optimizer.step()
            # Last, not first: otherwise these gradients would occupy memory while others run.
            self.optimizer.zero_grad(set_to_none=True)

    def memory(self, items: int) -> dict[str, float | None]:
        """Return what is kept for the backward pass, and the peak of this variant alone."""
        saved = None
        if self.model.training:
            saved = measures.short(measures.saved_bytes(self.forward, self.model) / items / 1e6)
        rise = measures.peak_bytes(self.step, self.device)
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        own = sum(each.nbytes for each in (*self.model.parameters(), *self.model.buffers(), *state))
        peak = None if rise is None else measures.short((rise + own) / 2**20)
        return {f"saved_mb_per_{self.subject.unit}": saved, "peak_mib": peak}


def measure_group(
    subject: Subject, device: torch.device, group: Group, variants: Sequence[Variant], rounds: int
) -> dict[str, Any]:
    """Measure variants in turns, and return the entry of the group in a record.

    A variant for which the GPU has not enough memory gets ``failed`` instead of figures.
    """
    items = subject.items(group)
    runs: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {}
    torch.compiler.reset()
    for variant in tqdm(variants, desc="variants", leave=False, disable=None):
        row = rows[str(variant)] = {"variant": str(variant), **variant._asdict()}
        try:
            run = Run(subject, device, group, variant)
            for _ in range(3):
                run.step()
            with torch.compiler.set_stance("fail_on_recompile"):
                row |= run.memory(items)
            runs[str(variant)] = run
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        run = None
        if "failed" in row:  # the error has released its tensors
            gc.collect()
            torch.cuda.empty_cache()
    steps = {name: run.step for name, run in runs.items()}
    with torch.compiler.set_stance("fail_on_recompile"):
        seconds = measures.measure_rounds(steps, rounds, device)
    for name, values in seconds.items():
        rows[name]["seconds"] = [measures.short(value) for value in values]
    _, products, dtype = PRECISIONS[group.precision]
    return {
        **group._asdict(),
        "dtype": dtype,
        "items": items,
        "matmul_tflops": measures.short(measures.matmul_rate(device, products) / 1e12),
        "variants": list(rows.values()),
    }


def profile_step(subject: Subject, device: torch.device, group: Group, variant: Variant) -> str:
    """Return the profiler's table of five steps of a variant, the slowest kernels first."""
    run = Run(subject, device, group, variant)
    for _ in range(3):
        run.step()
    with profile() as profiler:
        for _ in range(5):
            run.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    order = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)
