"""How accurate is a trained ViT at a smaller size, without training and after an epoch?

MODEL is what `tokenformer-vit compress` takes, such as a fine-tuned ViT, or a TokenFormer for refit
and usage alone; 400 images of train are fitted to, and those of val are measured with. With --rates
each smaller model is then trained for an epoch; to choose one, seed 0 leaves the last 1,000 rows of
train out and measures with these, so that its MODEL may not know them, and IMAGES must be a data
set in random order, not class folders. Rows are added to results.csv of the work directory, and
what has one is skipped. torch-pruning is a package of PyPI::

    tokenformer-vit train photos --checkpoint VIT --epochs 2 --work-dir work_dirs/whole --seed 1
    python ablations/any_size.py work_dirs/whole photos --seed 1
    python ablations/any_size.py work_dirs/whole photos --seed 1 --methods refit --rates 3e-5
"""

import copy
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import results
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torchvision.transforms import v2
from tqdm import tqdm

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, add_model, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import measure_usage, prune
from tokenformer_vit.growth.refit import LEAST_SCALE, moments, removal_order, solve
from tokenformer_vit.models import TokenFormerViT, from_vit
from tokenformer_vit.records import environment
from tokenformer_vit.training.data.images import divide
from tokenformer_vit.training.engine import stock
from tokenformer_vit.vision import compression
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.prediction import load_any

FIT_IMAGES, HELD_OUT = 400, 1000
FITTED = ("whole", "refit", "refit_equal", "snapvit")  # the others vary more: other sweeps
ABOUT = "How accurate is a pretrained ViT at a smaller size, without training?"
AFTER = "How accurate is it after an epoch of training?"

Batches = Sequence[tuple[Tensor, Tensor]]  # images (B, C, H, W) and labels (B,)


def refit(vit: Any, data: Batches, shares: Sequence[float], **how: Any) -> dict[float, Any]:
    """Do what ``tokenformer-vit compress`` does."""
    images = [batch for batch, _ in data]
    return compression.smaller_models(as_tokenformer(vit), images, shares, **how)


def as_tokenformer(vit: Any) -> Any:
    """Convert a ViT, or copy a TokenFormer, which pruning would change."""
    return copy.deepcopy(vit) if isinstance(vit, TokenFormerViT) else from_vit(vit)


def refit_equal(vit: Any, data: Batches, share: float) -> Any:
    """Do what ``compress --to-vit`` does."""
    return refit(vit, data, [share], like_vit=True)[share]


def usage(vit: Any, data: Batches, share: float) -> Any:
    """Keep the hidden neurons that add most to the outputs, equally many in each block."""
    model, images = as_tokenformer(vit), [batch for batch, _ in data]
    count = compression.equal_count(model, share, compression.tokens_of(model, images[0]))
    return prune(model, measure_usage(model, images), {"ffn": count})


def torch_pruning(vit: Any, data: Batches, share: float, taylor: bool = False) -> Any:
    """Prune hidden neurons and heads' channels by torch-pruning: group L2 norm, or Taylor."""
    import torch_pruning as library  # type: ignore[import-not-found]

    model, first = copy.deepcopy(vit), data[0][0][:1]
    for images, labels in data if taylor else ():
        F.cross_entropy(model(images), labels, reduction="sum").backward()
    of: Any = library.importance
    importance = of.GroupTaylorImportance() if taylor else of.GroupMagnitudeImportance()

    def pruned(ratio: float) -> Any:
        small = copy.deepcopy(model)
        for new, old in zip(small.parameters(), model.parameters(), strict=True):
            new.grad = copy.deepcopy(old.grad)
        outputs = [each for block in small.blocks for each in (block.attn.proj, block.mlp.fc2)]
        fixed = [small.head, small.patch_embed.proj, *outputs]
        heads = {block.attn.qkv: block.attn.num_heads for block in small.blocks}
        how: Any = {"pruning_ratio": ratio, "num_heads": heads, "ignored_layers": fixed}
        library.pruner.BasePruner(small, first, importance, **how).step()
        for attn in (block.attn for block in small.blocks):
            attn.attn_dim = attn.proj.in_features
            attn.head_dim = attn.attn_dim // attn.num_heads
            attn.scale = attn.head_dim**-0.5
        return small

    flops = partial(compression.flops_of, tokens=compression.tokens_of(vit, first))
    least = bisect_left(range(256), -share * flops(vit), key=lambda n: -flops(pruned(n / 256)))
    return pruned(least / 256)


@torch.no_grad()
def snapvit(vit: Any, data: Batches, share: float) -> Any:
    """Remove heads and hidden neurons, and fit proj and fc2 anew: the form of SnapViT.

    Each block loses as many: of its heads about half the share of the FLOPs (SnapViT too removes
    fewer heads), of its neurons the rest. Which of them, and what to fit to, is as for ``refit``.
    """
    stream = whole = vit.norm_pre(vit._pos_embed(vit.patch_embed(torch.cat([x for x, _ in data]))))
    tokens, small, attn = whole.shape[1], copy.deepcopy(vit), vit.blocks[0].attn
    channels = torch.arange(attn.attn_dim).view(attn.num_heads, -1)  # by head
    heads = round(attn.num_heads * (1 + share) / 2)
    for block in small.blocks:
        keep_heads(block.attn, channels[:heads])
    missing = share * compression.flops_of(vit, tokens) - compression.flops_of(small, tokens)
    neurons = vit.blocks[0].mlp.fc1.out_features
    neurons += int(missing // (4 * tokens * vit.embed_dim * len(vit.blocks)))
    small = copy.deepcopy(vit)
    for old, new in zip(vit.blocks, small.blocks, strict=True):
        own, true = new.norm1(stream), old.attn(old.norm1(whole))
        scale, found = moments_of(new.attn.proj, new.attn, own, true, whole - stream, old.ls1)
        kept = channels

        def explained(rows: Tensor, found: Any = found, scale: Tensor = scale) -> Tensor:
            gram, product = found[0][rows][:, rows], found[1][rows] * scale
            return (product * solve(gram, product, torch.zeros_like(product))).sum()

        while len(kept) > heads:  # without the head that the others replace best
            rests = (torch.cat((kept[:n], kept[n + 1 :])) for n in range(len(kept)))
            kept = max(rests, key=lambda rest: explained(rest.flatten()))
        keep_heads(new.attn, kept)
        fit(new.attn.proj, found, kept.flatten())
        stream, whole = stream + new.ls1(new.attn(own)), whole + old.ls1(true)
        own, true = new.norm2(stream), old.mlp(old.norm2(whole))
        scale, found = moments_of(new.mlp.fc2, new.mlp, own, true, whole - stream, old.ls2)
        best = removal_order(found[0], found[1] * scale)[0][:neurons]
        keep(new.mlp.fc1, rows=best)
        keep(new.mlp.fc2, columns=best)
        fit(new.mlp.fc2, found, best)
        stream, whole = stream + new.ls2(new.mlp(own)), whole + old.ls2(true)
    return small


def moments_of(
    linear: nn.Linear, part: Any, own: Tensor, true: Tensor, lost: Tensor, scale: Any
) -> tuple[Tensor, Any]:
    """Return LayerScale, and moments of a layer's inputs and of the outputs that it should have.

    ``part`` with this layer has the inputs ``own``; ``true`` are its outputs in the whole model.
    """
    gamma = getattr(scale, "gamma", torch.ones_like(linear.weight[:, 0]))
    wanted = true + (lost / gamma).where(gamma.abs() >= LEAST_SCALE, 0)
    seen: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    part(own)
    hook.remove()
    found = moments(nn.Identity(), seen[0], wanted.flatten(0, 1), centred=True)
    return gamma.double().abs().clamp(min=LEAST_SCALE), found


def keep_heads(attn: Any, channels: Tensor) -> None:
    """Keep these heads of an attention, given by their channels (heads, channels of one)."""
    rows = channels.flatten()
    keep(attn.qkv, rows=torch.cat([rows + n * attn.attn_dim for n in range(3)]))
    keep(attn.proj, columns=rows)
    attn.num_heads, attn.attn_dim = len(channels), len(rows)


def keep(linear: nn.Linear, rows: Any = slice(None), columns: Any = slice(None)) -> None:
    """Keep outputs or inputs of a linear layer."""
    linear.weight = nn.Parameter(linear.weight[rows][:, columns])
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[rows])
    linear.out_features, linear.in_features = linear.weight.shape


def fit(linear: nn.Linear, found: Any, kept: Tensor) -> None:
    """Fit a layer to the moments of the inputs that it keeps."""
    gram, product, mean, target = found
    weight = solve(gram[kept][:, kept], product[kept], linear.weight.t())
    linear.weight.copy_(weight.t())
    linear.bias.copy_(target - mean[kept] @ weight)


def each(
    method: Callable[..., Any], vit: Any, data: Batches, shares: Sequence[float], **how: Any
) -> dict[float, Any]:
    """Make a model of each share that the method can reach."""
    found, tokens = {}, compression.tokens_of(vit, data[0][0])
    for share in shares:
        try:
            small = method(vit, data, share, **how)
            if compression.flops_of(small, tokens) > share * compression.flops_of(vit, tokens):
                raise InputError(f"what stays whole is more than {share:g} of the FLOPs")
            found[share] = small
        except InputError as error:
            print(error)
    return found


METHODS: Mapping[str, Callable[[Any, Batches, Sequence[float]], dict[float, Any]]] = {
    "refit": refit,
    "refit_equal": partial(each, refit_equal),
    "snapvit": partial(each, snapvit),
    "usage": partial(each, usage),
    "torch-pruning_l2": partial(each, torch_pruning),
    "torch-pruning_taylor": partial(each, torch_pruning, taylor=True),
}


def tune(model: Any, data: Batches, rate: float, seed: int) -> Any:
    """Train a copy for an epoch: AdamW with layer decay, a cosine; crops, flips and cut-outs."""
    model, size = copy.deepcopy(model).train(), data[0][0].shape[-1]
    crop, hole = v2.RandomCrop(size, size // 8), stock.Cutout(size // 4, 0, prob=1.0)
    _, augmentations = divide([crop, v2.RandomHorizontalFlip(), hole])
    how: Any = {"weight_decay": 0.05, "layer_decay": 0.75, "betas": (0.9, 0.99), "fused": True}
    optimizer = create_optimizer_v2(model, "adamw", lr=rate, **how)
    images, labels, batch = *map(torch.cat, zip(*data, strict=True)), len(data[0][1])
    torch.manual_seed(1000 + seed)
    steps = torch.randperm(len(images)).split(batch)[: max(1, len(images) // batch)]
    # PyTorch's would undo the layer decay.
    schedule = CosineLRScheduler(optimizer, len(steps), t_in_epochs=False)
    torch.compiler.reset()  # it compiles a module's code only eight times
    forward = torch.compile(model)
    for step, index in enumerate(tqdm(steps, "training", unit="step", disable=None)):
        schedule.step_update(step)
        rows = images[index]
        for augment in augmentations:
            rows = augment(rows)
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(rows), labels[index], label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.inference_mode()
def classes(model: Any, data: Batches) -> Tensor:
    """Return the class of each image, in the precision in which the models are trained."""
    model = reparameterize_model(model)
    with torch.autocast(data[0][0].device.type, torch.bfloat16):
        return torch.cat([model(images).argmax(dim=1) for images, _ in data])


def main(words: list[str]) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("source", metavar="MODEL", help="as for tokenformer-vit compress")
    add("images", metavar="IMAGES", help="folder or data set with train and val")
    add("--seed", type=whole_number(0), required=True, help="of the training of MODEL")
    add("--flops", nargs="+", type=float, default=[0.83, 0.67, 0.5, 0.33], help="shares")
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    add("--rates", nargs="*", type=float, default=[], help="learning rates of an epoch")
    add("--name", default="any_size", help="of the sweep in the results")
    add("--work-dir", type=Path, default=Path("work_dirs/any_size"))
    args = parser.parse_args(words)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    timm.layers.set_fused_attn(args.device.type != "cpu")  # slower on CPUs in bfloat16
    measure(args, args.work_dir / "results.csv")


def measure(args: Namespace, path: Path) -> None:
    """Make models smaller, train them, and add the rows that are not there."""
    whole = load_any(args.source, args.model, **dict(args.model_kwargs)).to(args.device)

    def read(samples: Any) -> Batches:
        how = {"batch_size": args.batch_size, "device": args.device}
        images = [*compression.tensor_batches(whole, samples, **how)]
        labels = compression.find_labels(whole, samples).to(args.device).split(args.batch_size)
        return [*zip(images, labels, strict=True)]

    train, test = open_images(args.images, "train"), open_images(args.images, "val")
    if args.seed == 0:
        late, test = train.rows >= len(train) - HELD_OUT, copy.copy(train)
        test.keep(late)
        train.keep(~late)
    few, generator = copy.copy(train), torch.Generator().manual_seed(0)
    few.keep(torch.randperm(len(train), generator=generator)[:FIT_IMAGES])
    fitted, measured, trained = read(few), read(test), read(train) if args.rates else []
    labels, exact = torch.cat([own for _, own in measured]), classes(whole, measured)
    tokens, size = compression.tokens_of(whole, measured[0][0]), measured[0][0].shape[-1]
    machine = environment(args.device.type)
    about = {key: machine[key] for key in ("date", "commit", "hardware")}
    base = f"{whole.pretrained_cfg['architecture']} {size} px, {Path(args.images).name}"
    about |= {"torch": torch.__version__, "question": "any_size", "base": base, "seed": args.seed}
    about |= {"dtype": "bfloat16 autocast", "family": "whole", "batch_size": args.batch_size}
    about |= {"examples": len(train)}

    def name(method: str, share: float, rate: float) -> dict[str, Any]:
        sweep = args.name if method in FITTED else f"{args.name}_baselines"
        variant = method if share == 1 else f"{method}_{share:g}"
        found = (f"{sweep}_epoch" if rate else sweep, variant, rate, args.seed)
        return dict(zip(results.RUN, found, strict=True))

    for method in ("whole", *args.methods):
        shares, rates = (args.flops, [0.0, *args.rates]) if method in METHODS else ([1.0], [0.0])
        rows, left = results.read(path), dict[float, list[float]]()
        for share, rate in product(shares, rates):
            if results.find(rows, name(method, share, rate)).empty:
                left.setdefault(share, []).append(rate)
        if method in METHODS:
            models: Any = METHODS[method](whole, fitted, [*left]) if left else {}
        else:
            models = dict.fromkeys(left, whole)
        for share, rate in ((own, rate) for own in models for rate in left[own]):
            model = models[share]
            cost = total(model_costs(reparameterize_model(copy.deepcopy(model)), tokens))
            found = classes(tune(model, trained, rate, args.seed) if rate else model, measured)
            row = {**about, **name(method, share, rate), "epochs": int(rate > 0)}
            row["label"] = method
            if share < 1:
                row["label"] = f"{method}, {share:g} of the FLOPs"
                row["compare"] = "whole" if method == "refit" else f"refit_{share:g}"
            row |= {"title": AFTER if rate else ABOUT, "parameters": cost.parameters}
            row |= {"forward_flops": cost.forward_flops}
            row["selected_on"] = "held-out" if rate or not args.seed else ""
            row["top1"] = 100 * (found == labels).double().mean().item()
            row["same_class"] = 100 * (found == exact).double().mean().item()
            results.append([row], path)
            print("{variant}, rate {lr:g}, seed {seed}: {top1:.2f} %".format(**row), flush=True)


if __name__ == "__main__":
    run(main)
