"""How accurate is a pretrained ViT at a smaller size, without training, and after an epoch?

Fine-tunes a ViT of timm, makes it smaller by each method, and tunes all by the same recipe: rows of
a CSV. Seed 0 finds the rates, on training images that it leaves out; the others use the test data.
If interrupted, the same command resumes a fine-tuning, and skips what has a row. torch-pruning is a
package of PyPI::

    python ablations/any_size.py --data IMAGENETTE --weights FILE
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import from_vit as base
import pandas as pd
import timm
import torch
from timm.utils import reparameterize_model
from torch import Tensor

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, device
from tokenformer_vit.growth import measure_usage, prune
from tokenformer_vit.models import from_vit
from tokenformer_vit.records import environment
from tokenformer_vit.vision.compression import equal_count, flops_of, smaller_models

SIZES = {"image": 98, "epochs": 2, "batch-size": 64}  # an epoch takes two minutes of two cores
RATES = [3e-5, 1e-4, 3e-4]
FIT_IMAGES, HELD_OUT = 400, 1000
COLUMNS = ["date", "commit", "torch", "hardware", "model", "seed", "method", "target", "rate"]
COLUMNS += ["parameters", "flops", "top1", "same_class", "tuned", "n"]


def refitted(vit: Any, images: Tensor, targets: Sequence[float]) -> dict[float, Any]:
    """Do what ``tokenformer-vit compress`` does."""
    return smaller_models(from_vit(vit), [images], targets)


def refitted_equally(vit: Any, images: Tensor, targets: Sequence[float]) -> dict[float, Any]:
    """Do what ``compress --to-vit`` does."""
    return smaller_models(from_vit(vit), [images], targets, like_vit=True)


def by_usage(vit: Any, images: Tensor, targets: Sequence[float]) -> dict[float, Any]:
    """Keep the hidden neurons that add most to the outputs, equally many in each block."""
    model = from_vit(vit)
    usage, counts = measure_usage(model, [images]), {t: equal_count(model, t) for t in targets}
    return {t: prune(copy.deepcopy(model), usage, {"ffn": counts[t]}) for t in targets}


def by_group_norm(
    vit: Any, images: Tensor, targets: Sequence[float], inner: bool = False
) -> dict[float, Any]:
    """Prune by torch-pruning's group L2 norm: all widths, or hidden neurons and heads' channels."""
    import torch_pruning  # type: ignore[import-not-found]

    def pruned(ratio: float) -> Any:
        model = copy.deepcopy(vit)
        fixed = [model.patch_embed.proj] * inner + [model.head]
        for block in model.blocks if inner else ():
            fixed += [block.attn.proj, block.mlp.fc2]
        heads = {block.attn.qkv: block.attn.num_heads for block in model.blocks}
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
        how: Any = {"pruning_ratio": ratio, "num_heads": heads, "ignored_layers": fixed}
        torch_pruning.pruner.BasePruner(model, images[:1], importance, **how).step()
        for block in model.blocks:
            attn = block.attn
            attn.attn_dim = attn.proj.in_features
            attn.head_dim = attn.attn_dim // attn.num_heads
            attn.scale = attn.head_dim**-0.5
        return model

    found, whole = {}, flops_of(vit)
    for target in targets:
        low, high = 0.0, 1.0
        for _ in range(8):
            ratio = (low + high) / 2
            low, high = (ratio, high) if flops_of(pruned(ratio)) > target * whole else (low, ratio)
        found[target] = pruned(high)
    return found


METHODS: dict[str, Callable[..., Any]] = {
    "whole": lambda vit, images, targets: {1.0: vit},
    "refit": refitted,
    "refit equal": refitted_equally,
    "usage": by_usage,
    "torch-pruning": by_group_norm,
    "torch-pruning inner": lambda *args: by_group_norm(*args, inner=True),
}


def read_rows(args: argparse.Namespace) -> pd.DataFrame:
    """Return the rows until now."""
    return pd.read_csv(args.csv) if args.csv.exists() else pd.DataFrame(columns=COLUMNS)


def add_row(args: argparse.Namespace, **found: Any) -> None:
    """Write a row, as a whole."""
    about = {**environment(device=args.device.type), "torch": torch.__version__, "model": args.vit}
    row = pd.DataFrame([{**about, **found}], columns=COLUMNS)
    row.to_csv(args.csv, mode="a", header=not args.csv.exists(), index=False)
    print(row.to_string(), flush=True)


def rates(args: argparse.Namespace, seed: int, method: str) -> list[float]:
    """Return all rates for seed 0, and the one that was best with it for others."""
    if method in args.untuned:
        return [0.0]
    if seed == 0:
        return RATES[1:] if method == "fine-tuning" else RATES
    rows: Any = read_rows(args).query("seed == 0 and method == @method")
    return [float(rows["rate"][rows["tuned"].idxmax()])]


def missing(args: argparse.Namespace, *key: Any) -> list[float]:
    """Return the rates of a seed, a method and a target without a row."""
    rows = read_rows(args)
    same = (rows[["seed", "method", "target"]] == list(key)).all(axis=1)
    return [rate for rate in rates(args, *key[:2]) if rate not in set(rows["rate"][same])]


def measure_seed(args: argparse.Namespace, seed: int, vit: Any, data: Any, test: Any) -> None:
    """Fine-tune a ViT, then make it smaller by each method and tune it for an epoch."""
    steps = len(data[1]) // args.batch_size
    how: dict[str, Any] = {"layer_decay": 0.75}

    def logits_of(model: Any) -> Tensor:
        return base.logits_of(model, test[0], "bfloat16")  # in which it is trained

    about = {"seed": seed, "n": len(test[1])}
    start = copy.deepcopy(vit.state_dict())
    for rate in missing(args, seed, "fine-tuning", 1.0):
        vit.load_state_dict(start)
        base.train(vit, args, data, rate, seed, args.work_dir / f"{seed} {rate:g}.pt", **how)
        top1 = base.top1(logits_of(vit), test[1])
        add_row(args, **about, method="fine-tuning", target=1.0, rate=rate, tuned=top1)
    best = rates(args, 1, "fine-tuning")[0]
    saved = torch.load(args.work_dir / f"{seed} {best:g}.pt", weights_only=True)
    vit.load_state_dict(saved["model"])
    exact = logits_of(vit).argmax(dim=1)
    for method in ("whole", *args.methods):
        targets = [1.0] if method == "whole" else args.targets[-1:] if seed == 0 else args.targets
        left = {t: rates_left for t in targets if (rates_left := missing(args, seed, method, t))}
        models = METHODS[method](vit, data[0][:FIT_IMAGES], [*left]) if left else {}
        for target, model in models.items():
            logits = logits_of(model)
            cost = total(model_costs(reparameterize_model(model)))
            about |= {"method": method, "target": target, "top1": base.top1(logits, test[1])}
            about |= {"same_class": base.top1(logits, exact), "parameters": cost.parameters}
            about |= {"flops": cost.forward_flops, "tuned": None}
            for rate in left[target]:
                tuned = copy.deepcopy(model)
                if rate:
                    base.train(tuned, args, data, rate, 1000 + seed, tune_steps=steps, **how)
                    about["tuned"] = base.top1(logits_of(tuned), test[1])
                add_row(args, **about, rate=rate)


def main(words: Sequence[str]) -> None:
    """Measure each seed."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of Imagenette's parquet files")
    parser.add_argument("--weights", type=Path, required=True, help="of the ViT")
    parser.add_argument("--vit", default="vit_small_patch14_dinov2", help="name of a timm model")
    parser.add_argument("--device", type=device, default="auto", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="first 0")
    parser.add_argument("--targets", type=float, nargs="*", default=[0.67, 0.5], help="of FLOPs")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS][1:])
    what = "methods that are not tuned"
    parser.add_argument("--untuned", nargs="*", default=["whole", "refit equal"], help=what)
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/any_size"))
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=int, help="use only the first images, for a trial")
    args = parser.parse_args(words)
    timm.layers.set_fused_attn(args.device.type != "cpu")  # slower on CPUs in bfloat16
    args.work_dir.mkdir(parents=True, exist_ok=True)
    data, test = base.load(args, "train"), base.load(args, "val")
    count = len(data[1]) - min(HELD_OUT, len(data[1]) // 4)
    held_out: Any
    others: Any
    held_out, others = (
        tuple(each[part] for each in data) for part in (slice(count, None), slice(count))
    )
    for train, measured, seeds in (
        (others, held_out, [seed for seed in args.seeds if seed == 0]),
        (data, test, [seed for seed in args.seeds if seed != 0]),
    ):
        if not seeds:
            continue
        # Weights of fine-tuning replace the probe: if they are there, it may be anything.
        to_do = any(missing(args, seed, "fine-tuning", 1.0) for seed in seeds)
        few: Any = tuple(each[:100] for each in train)
        vit = base.pretrained(args, train if to_do else few)
        for seed in seeds:
            torch.manual_seed(seed)
            measure_seed(args, seed, copy.deepcopy(vit), train, measured)


if __name__ == "__main__":
    run(main)
