"""How accurate is a trained ViT at a smaller size, without training, by ``refit`` and by others?

MODEL is what `tokenformer-vit compress` takes, such as a fine-tuned ViT; its images are divided as
there. Rows are added to results.csv of the work directory, and models that timm can build are saved
there, to be trained further. torch-pruning is a package of PyPI::

    tokenformer-vit train photos --checkpoint VIT --epochs 2 --work-dir work_dirs/whole --seed 1
    python ablations/any_size.py work_dirs/whole photos --seed 1
    tokenformer-vit train photos --checkpoint work_dirs/any_size/refit_0.5_seed1 --epochs 1
"""

import copy
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import results
import torch
from timm.utils import reparameterize_model
from torch import Tensor

from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, add_model, whole_number
from tokenformer_vit.growth import measure_usage, prune
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.records import environment
from tokenformer_vit.vision import compression
from tokenformer_vit.vision.prediction import load_any

METHODS = ("refit", "refit_equal", "usage", "torch-pruning_inner")
FITTED = ("", "refit", "refit_equal")  # the others vary more: a sweep of their own


def smaller(method: str, vit: Any, images: Sequence[Tensor], share: float) -> Any:
    """Make a model smaller, to a share of its FLOPs, by what fits or ranks with some images."""
    if method == "torch-pruning_inner":
        return by_group_norm(vit, images, share)
    model, like_vit = from_vit(vit), method == "refit_equal"  # as `compress --to-vit`
    if method != "usage":
        return compression.smaller_models(model, images, [share], like_vit=like_vit)[share]
    # The hidden neurons that add most to the outputs stay, equally many in each block.
    count = compression.equal_count(model, share, compression.tokens_of(model, images[0]))
    return prune(model, measure_usage(model, images), {"ffn": count})


def by_group_norm(vit: Any, images: Sequence[Tensor], share: float) -> Any:
    """Prune hidden neurons and heads' channels by torch-pruning's group L2 norm."""
    import torch_pruning  # type: ignore[import-not-found]

    def pruned(ratio: float) -> Any:
        model, importance = copy.deepcopy(vit), torch_pruning.importance.GroupMagnitudeImportance()
        outputs = [each for block in model.blocks for each in (block.attn.proj, block.mlp.fc2)]
        fixed = [model.head, model.patch_embed.proj, *outputs]
        heads = {block.attn.qkv: block.attn.num_heads for block in model.blocks}
        how: Any = {"pruning_ratio": ratio, "num_heads": heads, "ignored_layers": fixed}
        torch_pruning.pruner.BasePruner(model, images[0][:1], importance, **how).step()
        for attn in (block.attn for block in model.blocks):
            attn.attn_dim = attn.proj.in_features
            attn.head_dim = attn.attn_dim // attn.num_heads
            attn.scale = attn.head_dim**-0.5
        return model

    flops = partial(compression.flops_of, tokens=compression.tokens_of(vit, images[0]))
    least = bisect_left(range(256), -share * flops(vit), key=lambda n: -flops(pruned(n / 256)))
    return pruned(least / 256)


def measure(args: Namespace) -> list[dict[str, Any]]:
    """Make models smaller by each method, save those that timm can build, and return the rows."""
    whole = load_any(args.source, args.model, **args.model_kwargs).to(args.device)
    fitted, measured = compression.divide_images(args.images, args.fit_images)
    how = {"batch_size": args.batch_size, "device": args.device}
    images = [*compression.tensor_batches(whole, fitted, **how)]
    models = {"whole": whole}
    for method, share in product(args.methods, args.flops):
        small = models[f"{method}_{share:g}"] = smaller(method, whole, images, share)
        if method != "torch-pruning_inner":
            save_model(small, args.work_dir / f"{method}_{share:g}_seed{args.seed}")
    fused = {name: reparameterize_model(model) for name, model in models.items()}
    batches = compression.tensor_batches(whole, measured, **how)
    points = compression.measure(fused, batches, compression.find_labels(whole, measured))
    machine = environment(args.device.type)
    about = {key: machine[key] for key in ("date", "commit", "hardware")}
    about |= {"torch": torch.__version__, "question": "any_size", "base": Path(args.source).name}
    about |= {"title": str(__doc__).splitlines()[0], "dtype": "float32", "seed": args.seed}
    about |= {"family": "whole", "lr": 0.0, "examples": len(fitted), "batch_size": args.batch_size}
    rows = []
    for point in points:
        name = point.pop("name")
        fit = name.rpartition("_")[0] in FITTED  # "" of the whole model
        row = {**about, "variant": name, "label": name.replace("_", " "), **point}
        row["sweep"] = "any_size" if fit else "any_size_baselines"
        row["forward_flops"], row["same_class"] = row.pop("flops_per_image"), row.pop("agreement")
        rows.append(row)
    return rows


def main(words: list[str]) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("source", metavar="MODEL", help="as for tokenformer-vit compress")
    add("images", metavar="IMAGES", help="as for tokenformer-vit compress")
    add("--seed", type=whole_number(0), required=True, help="of the training of MODEL")
    add("--flops", nargs="+", type=float, default=[0.67, 0.5], help="shares; default: 0.67 0.5")
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--fit-images", type=whole_number(1), default=400, metavar="N", help="default: 400")
    add("--work-dir", type=Path, default=Path("work_dirs/any_size"))
    args = parser.parse_args(words)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    results.append(measure(args), args.work_dir / "results.csv")


if __name__ == "__main__":
    run(main)
