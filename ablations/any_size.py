"""How accurate is a pretrained ViT at a smaller size, without training, and after an epoch?

Fine-tunes a ViT of timm, makes it smaller by each method, and tunes all by the same recipe. Seed 0
finds the rates, on training images that it leaves out; the others use the test data. If
interrupted, the same command goes on. torch-pruning is a package of PyPI::

    python ablations/any_size.py --data IMAGENETTE --weights FILE
"""

import copy
from argparse import BooleanOptionalAction, Namespace
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import results
import torch
import vits
from timm.utils import reparameterize_model
from torch import Tensor

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, device
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import measure_usage, prune
from tokenformer_vit.models import from_vit
from tokenformer_vit.records import environment
from tokenformer_vit.vision.compression import equal_count, flops_of, smaller_models

TITLES = {
    "any_size_tuning": "At which rate is the ViT fine-tuned?",
    "any_size": "How accurate is a pretrained ViT at a smaller size, without training?",
    "any_size_epoch": "How accurate is it after an epoch of training?",
}
RATES = [3e-5, 1e-4, 3e-4]
FIT_IMAGES, HELD_OUT = 400, 1000


def refitted(vit: Any, images: Tensor, share: float, like_vit: bool = False) -> Any:
    """Do what ``tokenformer-vit compress`` does, or with ``--to-vit``."""
    return smaller_models(from_vit(vit), [images], [share], like_vit=like_vit)[share]


def by_usage(vit: Any, images: Tensor, share: float) -> Any:
    """Keep the hidden neurons that add most to the outputs, equally many in each block."""
    model = from_vit(vit)
    return prune(model, measure_usage(model, [images]), {"ffn": equal_count(model, share)})


def by_group_norm(vit: Any, images: Tensor, share: float, inner: bool = False) -> Any:
    """Prune by torch-pruning's group L2 norm: all widths, or hidden neurons and heads' channels."""
    import torch_pruning  # type: ignore[import-not-found]

    def pruned(ratio: float) -> Any:
        model, importance = copy.deepcopy(vit), torch_pruning.importance.GroupMagnitudeImportance()
        outputs = [each for block in model.blocks for each in (block.attn.proj, block.mlp.fc2)]
        fixed = [model.head, *[model.patch_embed.proj, *outputs] * inner]
        heads = {block.attn.qkv: block.attn.num_heads for block in model.blocks}
        how: Any = {"pruning_ratio": ratio, "num_heads": heads, "ignored_layers": fixed}
        torch_pruning.pruner.BasePruner(model, images[:1], importance, **how).step()
        for attn in (block.attn for block in model.blocks):
            attn.attn_dim = attn.proj.in_features
            attn.head_dim = attn.attn_dim // attn.num_heads
            attn.scale = attn.head_dim**-0.5
        return model

    most = share * flops_of(vit)
    return pruned(bisect_left(range(256), -most, key=lambda n: -flops_of(pruned(n / 256))) / 256)


METHODS: dict[str, Callable[..., Any]] = {  # of a ViT, images to fit to, and a share of the FLOPs
    "whole": lambda vit, images, share: vit,
    "refit": refitted,
    "refit_equal": partial(refitted, like_vit=True),
    "usage": by_usage,
    "torch-pruning": by_group_norm,
    "torch-pruning_inner": partial(by_group_norm, inner=True),
}
BASELINES = ("usage", "torch-pruning", "torch-pruning_inner")  # sweeps of their own, with their σ


def best_rate(args: Namespace, sweep: str, method: str) -> float:
    """Return the rate of a method that seed 0 found best."""
    rows = results.read(args.results).query("seed == 0 and sweep == @sweep and base == @args.base")
    rows = rows[rows["variant"].str.rpartition("_")[0] == method]
    if rows.empty:
        raise InputError(f"{args.results} has no rate of {method} by seed 0: give --seeds 0 first")
    return float(rows["lr"][rows["top1"].idxmax()])


def sweep_of(method: str, rate: float) -> str:
    """Return the sweep of a method, without training or after an epoch."""
    return "any_size" + "_baselines" * (method in BASELINES) + "_epoch" * bool(rate)


def fine_tuned(args: Namespace, seed: int, data: vits.Images, rate: float) -> Any:
    """Fine-tune the pretrained ViT, or go on with it."""
    path = args.work_dir / f"{seed} {rate:g}.pt"
    few: Any = [each[:100] for each in data]  # the file replaces the probe
    vit = vits.pretrained(args, few if path.exists() else data)
    vits.train(vit, args, data, rate, seed, path)
    return vit


def measure(args: Namespace, seed: int, data: vits.Images, test: vits.Images) -> None:
    """Fine-tune a ViT, make it smaller by each method, and tune it for an epoch."""

    def missing(**name: Any) -> bool:
        return results.find(results.read(args.results), {**name, "seed": seed}).empty

    def add(model: Any, **name: Any) -> None:
        right = vits.logits_of(model, test[0], bfloat16=True).argmax(dim=1) == test[1]
        cost = total(model_costs(reparameterize_model(model)))
        row = {**args.about, **name, "seed": seed, "family": "whole"}
        row["label"] = name["variant"].replace("_", " ")
        row["title"] = TITLES[name["sweep"].replace("_baselines", "")]
        row["selected_on"] = "held-out" if name["lr"] else ""
        row |= {"parameters": cost.parameters, "forward_flops": cost.forward_flops}
        row |= {"examples": len(data[1]), "top1": 100 * right.double().mean().item()}
        results.append([row], args.results)

    tuning: Any = {"sweep": "any_size_tuning", "variant": "fine-tuned_1"}
    every = seed == 0
    for rate in RATES if every else [best_rate(args, "any_size_tuning", "fine-tuned")]:
        if missing(**tuning, lr=rate):
            add(fine_tuned(args, seed, data, rate), **tuning, lr=rate)
    best = best_rate(args, "any_size_tuning", "fine-tuned")
    whole, once = fine_tuned(args, seed, data, best), Namespace(**{**vars(args), "epochs": 1})
    shares = args.targets[-1:] if every else args.targets
    for method, share in [("whole", 1.0), *product(args.methods, shares)]:
        found = [] if every else [0.0]
        if method in args.tuned:
            found += RATES if every else [best_rate(args, sweep_of(method, 1), method)]
        names = [
            {"sweep": sweep_of(method, rate), "variant": f"{method}_{share:g}", "lr": rate}
            for rate in found
        ]
        left: Any = [name for name in names if missing(**name)]
        small = METHODS[method](whole, data[0][:FIT_IMAGES], share) if left else None
        for name in left:
            model = copy.deepcopy(small)
            if name["lr"]:
                vits.train(model, once, data, name["lr"], 1000 + seed)
            add(model, **name)


def main(words: list[str]) -> None:
    """Measure each seed."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--data", required=True, help="folder of Imagenette's parquet files")
    add("--weights", type=Path, required=True, help="of the ViT")
    add("--vit", default="vit_small_patch14_dinov2", help="name of a timm model")
    add("--image", type=int, default=98, help="pixels")
    add("--epochs", type=int, default=2, help="of fine-tuning; two minutes of two cores each")
    add("--batch-size", type=int, default=64)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="first 0")
    add("--targets", type=float, nargs="+", default=[0.67, 0.5], help="shares of the FLOPs")
    add("--methods", nargs="*", choices=[*METHODS], default=[*METHODS][1:])
    add("--tuned", nargs="*", choices=[*METHODS], default=["refit", *BASELINES])
    add("--device", type=device, default="auto", help="cpu or cuda")
    add("--compile", action=BooleanOptionalAction, default=True)
    add("--limit", type=int, help="use only the first images, for a trial")
    add("--work-dir", type=Path, default=Path("work_dirs/any_size"))
    args = parser.parse_args(words)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    args.results, args.base = args.work_dir / "results.csv", f"{args.vit} {args.image} px"
    args.about = {"question": "any_size", "base": args.base, "dtype": "bfloat16 autocast"}
    machine = {**environment(device=args.device.type), "torch": torch.__version__}
    args.about |= {key: machine[key] for key in ("date", "commit", "torch", "hardware")}
    data, test = vits.load(args, "train"), vits.load(args, "val")
    count = len(data[1]) - min(HELD_OUT, len(data[1]) // 4)
    parts = [(data[0][part], data[1][part]) for part in (slice(count), slice(count, None))]
    for seed in args.seeds:
        measure(args, seed, *((data, test) if seed else parts))


if __name__ == "__main__":
    run(main)
