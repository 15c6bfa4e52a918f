"""Measure all about speed and memory of a TokenFormer and a baseline, and keep a record.

One process measures both, eager and with compiled blocks, in turns::

    python tools/benchmark.py --depth 2 --precisions float32       # minutes on two CPU cores
    python tools/benchmark.py --batch-sizes 128 256 --precisions autocast
    python tools/benchmark.py --lm 150m --num-tokens 1024          # needs transformers
    python tools/benchmark.py --profile                            # kernels of a training step

--baseline is a timm name, or matched-vit: of the same width, depth and weights. With --lm it is a
GPT-2, or with --positions rotary a GPT-NeoX. Mode train is forward and backward pass and a step of
AdamW; prefill is the forward pass up to the last token's logits; decode adds the last 32 tokens
(half of a sequence below 64) with the cache, and is never compiled. autocast is to bfloat16.

A record has ``parameters`` and ``flops_per_UNIT`` of model and baseline (UNIT: image or token), and
``groups``: mode, dtype, batch size, ``items`` (images or tokens of a step), ``matmul_tflops`` of a
large product, and ``variants``: ``baseline`` and ``auto``, which is ours, with

- ``seconds`` of every round, ``seconds_p20``, ``_p50``, ``_p80``, and the median ``UNITs_per_s``;
- ``ratio_p20``, ``_p50``, ``_p80``: seconds of the compiled baseline (in decoding: of the eager
  one) divided by those of the variant in the same round; above 1 is faster;
- ``saved_mb_per_UNIT``: memory kept for the backward pass, 10^6 bytes; null if not training;
- ``peak_mib``: parameters, optimiser state and the rise during a step; null on a CPU;
- ``mfu``: counted FLOPs, divided by those of ``matmul_tflops`` in the same time.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

from tokenformer_vit.benchmarking.benchmark import Run, measure, seconds_of, short
from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, device, whole_number
from tokenformer_vit.models import LM_PRESETS, lm_config
from tokenformer_vit.records import environment, write_record

CLASSES = 1000
DTYPES = {"float32": "float32", "autocast": "bfloat16 autocast"}  # in a record


class Images(NamedTuple):
    """Two image models by timm's names, or ``matched-vit``; a depth replaces that of both."""

    model: str
    baseline: str
    img_size: int
    depth: int | None

    unit = "image"
    modes = ("train", "infer")

    def create(self, baseline: bool) -> Any:
        """Build one of the models with random weights."""
        matched = baseline and self.baseline == "matched-vit"
        name = self.baseline if baseline and not matched else self.model
        depth: Any = {"depth": self.depth} if self.depth else {}
        model = timm.create_model(name, img_size=self.img_size, num_classes=CLASSES, **depth)
        return matched_vit(model)[0] if matched else model

    def costs(self, model: nn.Module) -> tuple[int, dict[str, int]]:
        """Count the parameters, and the FLOPs per image in each mode."""
        cost = total(model_costs(model))
        return cost.parameters, {"train": 3 * cost.forward_flops, "infer": cost.forward_flops}

    def items(self, mode: str, batch_size: int) -> int:
        """Return the number of images in a step."""
        return batch_size

    def draw(self, batch_size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw (B, 3, S, S) images and (B,) labels."""
        images = torch.randn(batch_size, 3, self.img_size, self.img_size, generator=random)
        return images, torch.randint(CLASSES, (batch_size,), generator=random)

    def compute(self, mode: str) -> Callable[..., Tensor]:
        """Return what computes the loss in training, and class scores otherwise."""
        if mode == "infer":
            return lambda model, images, labels: model(images)
        return lambda model, images, labels: F.cross_entropy(model(images), labels)


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

    def costs(self, model: nn.Module) -> tuple[int, dict[str, int]]:
        """Count the parameters, and the FLOPs per token in each mode; prefill has one logit row."""
        whole, single = (model_costs(model, tokens) for tokens in (self.num_tokens, 1))
        forward, attention = total(whole).forward_flops, single["token_token"].forward_flops
        prompt = forward - whole["head"].forward_flops + single["head"].forward_flops
        others = self.num_tokens - (self.decoded + 1) / 2  # before a decoded token, on average
        return total(whole).parameters, {
            "train": 3 * forward // self.num_tokens,
            "prefill": prompt // self.num_tokens,
            "decode": round(total(single).forward_flops + attention * others),
        }

    def items(self, mode: str, batch_size: int) -> int:
        """Return the number of tokens that a step trains on, reads or adds."""
        return batch_size * (self.decoded if mode == "decode" else self.num_tokens)

    def draw(self, batch_size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw (B, N) tokens, and the next token of each."""
        shape = (batch_size, self.num_tokens + 1)
        rows = torch.randint(self.vocab_size, shape, generator=random)
        return rows[:, :-1], rows[:, 1:]

    def compute(self, mode: str) -> Callable[..., Tensor]:
        """Return what computes the loss in training, and the last logits otherwise."""
        begun: dict[str, Any] = {}

        def train(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = model(tokens, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def prefill(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            return model(tokens, use_cache=False, logits_to_keep=1).logits

        def decode(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            """Continue the first tokens greedily, each time from the same cache."""
            if not begun:  # in the warm-up
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


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Count the bytes that a forward call keeps for the backward pass, views as their storage.

    Parameters, buffers and their copies in another precision do not count: their size does not
    depend on the batch. What an autograd function keeps without ``save_for_backward`` is not seen.
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


def matmul_rate(place: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square product of random numbers: 8192 on a GPU, 1024 on a CPU."""
    size = 8192 if place.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=place, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    # The minimum, not the median, because disturbances only make a measurement slower.
    return 2 * size**3 / min(seconds_of(lambda: torch.mm(a, b, out=out), place) for _ in range(14))


class Measured(Run):
    """A run that also knows what it keeps for the backward pass."""

    def __init__(self, subject: Subject, side: str, compiled: bool, group: Any, place: Any) -> None:
        torch.manual_seed(0)
        random = torch.Generator().manual_seed(0)
        draws = (subject.draw(group["batch_size"], random) for _ in range(3))
        batches = [[tensor.to(place) for tensor in draw] for draw in draws]
        self.key = f"saved_mb_per_{subject.unit}", group["items"]
        how = (group["mode"] == "train", group["dtype"] != "float32")
        create = partial(subject.create, side == "baseline")
        super().__init__(create, compiled, subject.compute(group["mode"]), batches, *how)

    def memory(self) -> dict[str, float | None]:
        """Return both kinds of memory."""
        (name, items), saved = self.key, None
        if self.model.training:
            saved = short(saved_bytes(self.forward, self.model) / items / 1e6)
        return {name: saved, **super().memory()}


def runs_of(subject: Subject, group: dict[str, Any], place: Any, eager: bool) -> dict[str, Run]:
    """Build the variants of a group by name."""
    ways = ("eager",) if eager or group["mode"] == "decode" else ("eager", "compiled")
    return {
        f"{side} {way}": Measured(subject, side, way == "compiled", group, place)
        for side, way in itertools.product(("baseline", "auto"), ways)
    }


def add_figures(group: dict[str, Any], record: dict[str, Any]) -> None:
    """Add percentiles, speeds, ratios and MFU to the variants of a group."""
    unit, rows = record["unit"], {row["variant"]: row for row in group["variants"]}
    seconds = pd.DataFrame({name: row["seconds"] for name, row in rows.items()})
    how = "eager" if group["mode"] == "decode" else "compiled"
    baseline = seconds.get(f"baseline {how}")
    for name, row in rows.items():
        row |= percentiles("seconds", seconds[name])
        speed = group["items"] / row["seconds_p50"]
        row[f"{unit}s_per_s"] = short(speed)
        row |= {} if baseline is None else percentiles("ratio", baseline / seconds[name])
        side = "baseline" if name.startswith("baseline") else "model"
        flops = record[f"flops_per_{unit}"][side][group["mode"]]
        row["mfu"] = short(flops * speed / group["matmul_tflops"] / 1e12)


def percentiles(name: str, values: pd.Series) -> dict[str, float]:
    """Return ``NAME_p20``, ``NAME_p50`` and ``NAME_p80`` of values, interpolated linearly."""
    return {f"{name}_p{p}": short(values.quantile(p / 100)) for p in (20, 50, 80)}


def profile_step(one: Run) -> str:
    """Return the profiler's table of five steps, the slowest kernels first."""
    for _ in range(3):
        one.step()
    with profile() as profiler:
        for _ in range(5):
            one.step()
        if one.device.type == "cuda":
            torch.cuda.synchronize()
    order = f"self_{'device' if one.device.type == 'cuda' else 'cpu'}_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)


def language_of(args: Any) -> tuple[Language, dict[str, Any]]:
    """Return the models for language, and their entries in the record."""
    from tokenformer_vit import language  # needs transformers

    config = lm_config(args.lm, **({"depth": args.depth} if args.depth else {}))
    own = partial(language.TokenFormerConfig, **asdict(config))
    subject = Language(
        lambda: language.TokenFormerForCausalLM(own()),
        lambda: language.matched_transformer(config, args.positions),
        config.vocab_size,
        args.num_tokens or config.context_length,
    )
    baseline = "transformer" + ", rotary" * (args.positions == "rotary")
    about = {"model": args.lm, "baseline": baseline, "depth": args.depth}
    return subject, {**about, "num_tokens": subject.num_tokens, "config": asdict(config)}


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser, number = Parser(description=__doc__), whole_number(1)
    add = parser.add_argument
    add("--model", default="tokenformer_base_matched", metavar="NAME", help="default: %(default)s")
    add("--baseline", default="vit_base_patch16_224", metavar="NAME", help="also matched-vit")
    add("--img-size", type=number, default=224, metavar="S", help="default: %(default)s")
    add("--lm", choices=LM_PRESETS, metavar="PRESET", help=f"one of {', '.join(LM_PRESETS)}")
    add("--num-tokens", type=whole_number(2), metavar="N", help="default: the context length")
    add("--positions", choices=["learned", "rotary"], default="learned", help="of the Transformer")
    add("--modes", nargs="+", metavar="MODE", choices=[*Images.modes, *Language.modes])
    add("--precisions", nargs="+", choices=DTYPES, default=[*DTYPES], help="default: both")
    add("--batch-sizes", nargs="+", type=number, metavar="B", help="default: 1 to 128, by device")
    add("--rounds", type=number, default=11, metavar="N", help="default: %(default)s")
    add("--depth", type=number, metavar="N", help="blocks; default: the depth of each model")
    add("--device", type=device, default="auto", help="default: cuda if it is there, else cpu")
    add("--out", type=Path, metavar="FILE", help="default: work_dirs/speed_MODEL_DEVICE.json")
    add("--eager", action="store_true", help="compile nothing: no C++ compiler, no ratios")
    add("--profile", action="store_true", help="print the kernels of the first group")
    args = parser.parse_args(argv)
    images = Images(args.model, args.baseline, args.img_size, args.depth)
    subject, about = language_of(args) if args.lm else (images, images._asdict())
    record = {**environment(args.device.type), "device": args.device.type, **about}
    record |= {"threads": torch.get_num_threads(), "unit": subject.unit, "n": args.rounds}
    with torch.device("meta"):
        costs = {s: subject.costs(subject.create(s == "baseline")) for s in ("model", "baseline")}
    record["parameters"] = {side: count for side, (count, _) in costs.items()}
    record[f"flops_per_{subject.unit}"] = {side: flops for side, (_, flops) in costs.items()}
    record["groups"] = []
    out = args.out or Path("work_dirs", f"speed_{args.lm or args.model}_{args.device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    few, many = (1, 8) if args.lm else (4, 128)
    sizes = args.batch_sizes or [few if args.device.type == "cpu" else many]
    groups: Any = itertools.product(args.modes or subject.modes, args.precisions, sizes)
    for mode, precision, batch in groups:
        group: dict[str, Any] = {"mode": mode, "dtype": DTYPES[precision], "batch_size": batch}
        group["items"] = subject.items(mode, batch)
        runs = runs_of(subject, group, args.device, args.eager)
        if args.profile:
            print(*(f"{name}\n{profile_step(each)}" for name, each in runs.items()), sep="\n")
            return
        rows = measure(runs, args.rounds)
        del runs  # before those of the next group are built
        kind = torch.float32 if precision == "float32" else torch.bfloat16
        group["matmul_tflops"] = short(matmul_rate(args.device, kind) / 1e12)
        group["variants"] = [{"variant": name, **row} for name, row in rows.items()]
        add_figures(group, record)
        record["groups"].append(group)
        write_record(out, record)
        shown = pd.DataFrame(group["variants"]).set_index("variant")
        shown = shown.filter(regex="per_s|ratio|saved|peak|mfu")
        print(f"{mode}, {group['dtype']}, batch {batch}\n{shown.to_string()}\n", flush=True)
    print(f"Done. Record: {out}")


if __name__ == "__main__":
    run(main)
