"""What does a trained ViT keep when it becomes a TokenFormer, and what does it cost?

Trains ViTs of timm on CIFAR-10, converts each with ``from_vit``, and measures both: rows of a CSV.
If interrupted, the same command resumes a training, and skips the parts that have rows. Instead of
training, it takes a pretrained ViT with a linear probe for the images, or measures only the speed
of a timm model::

    python ablations/from_vit.py --data CIFAR10
    python ablations/from_vit.py --data IMAGENETTE --vit vit_small_patch14_dinov2 --weights FILE \
        --image 98 --parts accuracy ranks size
    python ablations/from_vit.py --data IMAGENETTE --vit vit_base_patch16_224 --image 224 \
        --depth 2 --batch-size 40 --parts size
"""

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import timm.optim
import timm.scheduler
import torch
from mmpretrain.datasets.transforms import Cutout
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.utils.data import RandomSampler
from torchvision.transforms import v2
from tqdm import tqdm

from tokenformer_vit.benchmarking.benchmark import measure_rounds
from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, device
from tokenformer_vit.files import whole_file
from tokenformer_vit.growth import extract
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.records import environment
from tokenformer_vit.training.data.images import divide
from tokenformer_vit.vision.datasets import open_images
from tokenformer_vit.vision.images import read_pixels

# On one CPU core, three seeds train in about 45 minutes.
SIZES = {"image": 32, "patch": 8, "width": 96, "depth": 5, "epochs": 40, "batch-size": 128}
CIFAR10 = {"mean": [0.4913, 0.4821, 0.4465], "std": [0.2452, 0.2428, 0.2606]}
TUNE_STEPS, ROUNDS, ORDER_IMAGES = 200, 100, 400
FOUND = ["variant", "dtype", "name", "value", "n"]  # what the parts below yield
Images = tuple[Tensor, Tensor]  # normalised images, and labels


def load(args: argparse.Namespace, split: str) -> Images:
    """Return the images of a split and their labels, in the order of the file, on the device."""
    rows = open_images(args.data, split)
    rows.keep(rows.rows.argsort()[: args.limit])
    # The means of a timm model with weights are those of its pretraining.
    found: Any = timm.get_pretrained_cfg(args.vit) if args.vit else None
    config = found.to_dict() if found else CIFAR10
    pixels = (torch.from_numpy(read_pixels(s["img_path"], s["img_bytes"])) for s in rows)
    sized = [v2.functional.resize(each.permute(2, 0, 1), [args.image] * 2) for each in pixels]
    images = v2.functional.normalize(torch.stack(sized) / 255, config["mean"], config["std"])
    return images.to(args.device), rows.labels.to(args.device)


def pretrained(args: argparse.Namespace, data: Images) -> Any:
    """Return a timm model whose head is a linear probe (ridge regression) of the images."""
    how = {} if args.weights else {"depth": args.depth}
    vit: Any = load_model(args.vit, args.weights, img_size=args.image, **how)
    vit.reset_classifier(0)
    features, labels = logits_of(vit.to(args.device), data[0]), data[1]
    mean, number = features.mean(dim=0), int(labels.max()) + 1
    rows = features - mean
    wanted = nn.functional.one_hot(labels, number) - 1 / number
    gram = rows.t() @ rows
    gram += 0.01 * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    weight = torch.linalg.solve(gram, rows.t() @ wanted.to(rows)).t()
    vit.reset_classifier(number)
    vit.head.load_state_dict({"weight": weight, "bias": -weight @ mean})
    return vit.to(args.device)


def train(
    model: Any,
    args: argparse.Namespace,
    data: Images,
    rate: float,
    seed: int,
    path: Any = None,
    tune_steps: int | None = None,
    **how: Any,
) -> None:
    """Train with checkpoints in ``path``, or tune for some steps; ``how`` is for the optimizer."""
    images, labels = data
    epochs, steps = args.epochs, len(images) // args.batch_size or 1
    if tune_steps:
        epochs, steps = 1, tune_steps
    crop, hole = v2.RandomCrop(args.image, args.image // 8), Cutout(args.image // 4, 0, prob=1.0)
    _, augmentations = divide([crop, v2.RandomHorizontalFlip(), hole])
    how = {"weight_decay": 0.05, "betas": (0.9, 0.99), "fused": True, **how}
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=rate, **how)
    start, warmup = 0, epochs // 12 * steps
    how = {"warmup_t": warmup, "warmup_prefix": True, "t_in_epochs": False}
    schedule = timm.scheduler.CosineLRScheduler(optimizer, epochs * steps - warmup, **how)
    if path and path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    torch.compiler.reset()  # it compiles a module's code only eight times
    forward = torch.compile(model.train(), disable=not args.compile)
    for epoch in tqdm(range(start, epochs), "training", epochs, initial=start, unit="epoch"):
        torch.manual_seed(seed + epoch)  # a resumed training draws the same
        order = torch.tensor([*RandomSampler(labels, num_samples=steps * args.batch_size)])
        for step, index in enumerate(order.to(args.device).split(args.batch_size)):
            schedule.step_update(epoch * steps + step)
            batch, target = images[index], labels[index]
            for augment in augmentations:
                batch = augment(batch)
            with torch.autocast(args.device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(forward(batch), target, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if path:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with whole_file(path) as file:
                torch.save({**saved, "epoch": epoch + 1}, file)


def logits_of(model: nn.Module, images: Tensor, dtype: str = "float32") -> Tensor:
    """Return the logits in float64, of evaluation mode, in batches of 1,000 images."""
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, dtype == "bfloat16"):
        return torch.cat([model.eval()(batch).double() for batch in images.split(1000)])


def top1(logits: Tensor, labels: Tensor) -> float:
    """Return the percentage of images whose largest logit is that of their label."""
    return 100 * (logits.argmax(1) == labels).sum().item() / len(labels)


def accuracy(args: argparse.Namespace, data: Images, test: Images, models: Any, seed: int):
    """Compare centred logits of both models, in both dtypes, with the ViT's in float32."""
    images, labels = test
    exact = logits_of(models["vit"], images)
    for (variant, model), dtype in product(models.items(), ("float32", "bfloat16")):
        logits = logits_of(model, images, dtype)
        yield variant, dtype, "accuracy", top1(logits, labels), len(labels)
        if (variant, dtype) != ("vit", "float32"):
            own, true = (each - each.mean(dim=1, keepdim=True) for each in (logits, exact))
            error = ((own - true).norm(dim=1) / true.norm(dim=1)).mean().item()
            yield variant, dtype, "relative_error", error, len(labels)
            yield variant, dtype, "same_class", top1(logits, exact.argmax(dim=1)), len(labels)


def ranks(args: argparse.Namespace, data: Images, test: Images, models: Any, seed: int):
    """Keep the first pairs of q, k, v and o: in the order of σ, or of their inputs' covariance."""
    images, labels = test
    count = models["vit"].embed_dim
    orders = {"σ": from_vit(models["vit"]), "images": models["converted"]}
    for kept in (count, count * 3 // 4, count // 2, count // 3, count // 4, count // 8):
        for variant, model in orders.items():
            cut = extract(model, num_qkv_param_tokens=kept, num_proj_param_tokens=kept)
            value = top1(logits_of(cut, images), labels)
            yield variant, "float32", f"{kept}/{count}", value, len(labels)


def tune(args: argparse.Namespace, data: Images, test: Images, models: Any, seed: int):
    """Train both models further, with the same images; the rate falls to 0 by a cosine."""
    images, labels = test
    for variant in ("vit", "converted"):
        model = copy.deepcopy(original := models[variant])
        for rate, order in product((3e-4, 1e-3), range(3)):
            model.load_state_dict(original.state_dict())
            seed_of_order = 1_000_003 * (order + 1) + seed
            train(model, args, data, rate, seed_of_order, tune_steps=TUNE_STEPS)
            value = top1(logits_of(model, images), labels)
            yield variant, "bfloat16", f"lr {rate:g} data {order}", value, len(labels)


def step(model: nn.Module, forward: Any, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    """Make a training step."""
    nn.functional.cross_entropy(forward(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def size(args: argparse.Namespace, data: Images, test: Images, models: Any, seed: int):
    """Count parameters and FLOPs, and time forward passes and training steps in turn."""
    for variant, model in models.items():
        cost = total(model_costs(model))
        yield variant, "float32", "parameters", cost.parameters, 1
        yield variant, "float32", "flops", cost.forward_flops, 1
    images, labels = (each[: args.batch_size] for each in data)
    for dtype, training in product(("float32", "bfloat16"), (False, True)):
        torch.compiler.reset()
        calls = {}
        for name, model in models.items():
            if training and name == "fused":
                continue
            own = copy.deepcopy(model).train(training)
            forward = torch.compile(own, disable=not args.compile)
            calls[name] = partial(forward, images)
            if training:
                optimizer = torch.optim.AdamW(own.parameters(), 0.0, fused=True)
                calls[name] = partial(step, own, forward, optimizer, images, labels)
        with (
            torch.set_grad_enabled(training),
            torch.autocast(args.device.type, torch.bfloat16, dtype == "bfloat16"),
        ):
            for call in calls.values():
                call()
            seconds = pd.DataFrame(measure_rounds(calls, args.rounds, images.device))
        mode = "training" if training else "inference"
        for name in calls.keys() - {"vit"}:
            ratio = (seconds[name] / seconds["vit"]).median()
            yield f"{name} / vit", dtype, f"{mode}_time", ratio, args.rounds


PARTS = {each.__name__: each for each in (accuracy, ranks, tune, size)}


def main(words: Sequence[str]) -> None:
    """Train, convert and measure for each seed."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of CIFAR-10's parquet files")
    parser.add_argument("--device", type=device, default="auto", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/from_vit"))
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--vit", help="name of a timm model to take in place of trained ViTs")
    parser.add_argument("--weights", type=Path, help="its weights; without, random ones")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the timing")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=int, help="use only the first images, for a trial")
    args = parser.parse_args(words)
    timm.layers.set_fused_attn(args.device.type != "cpu")  # on CPUs 2.5 times slower in bfloat16
    data, test = load(args, "train"), load(args, "val")
    if args.vit:
        name = f"{args.vit} {args.image} px" + ("" if args.weights else f" depth {args.depth}")
    else:
        name = f"patch {args.patch} width {args.width} depth {args.depth} epochs {args.epochs}"
    # Another batch size, or a trial, is another model.
    name += f" batch {args.batch_size}" if args.batch_size != SIZES["batch-size"] else ""
    name += f" limit {args.limit}" if args.limit else ""
    about = {**environment(device=args.device.type), "torch": torch.__version__, "model": name}
    about = {key: about[key] for key in ("date", "commit", "torch", "hardware", "model")}
    for seed in args.seeds:
        torch.manual_seed(seed)
        if args.vit:
            vit = pretrained(args, data)
        else:
            how = {"embed_dim": args.width, "depth": args.depth, "num_heads": 3, "num_classes": 10}
            vit = timm.models.VisionTransformer(args.image, args.patch, **how).to(args.device)
            path = args.work_dir / f"{name} seed {seed}.pt"
            train(vit, args, data, 1e-3 * (args.batch_size / 512) ** 0.5, 100_003 * seed, path)
        converted = from_vit(vit.eval(), data[0][:ORDER_IMAGES])
        models = {"vit": vit, "converted": converted, "fused": reparameterize_model(converted)}
        for part in args.parts:
            about |= {"seed": seed, "part": part}
            key = ["hardware", "model", "seed", "part"]
            known = pd.read_csv(args.csv) if args.csv.exists() else pd.DataFrame(columns=key)
            if (known[key] == pd.Series(about)[key]).all(axis=1).any():
                continue
            found = pd.DataFrame(PARTS[part](args, data, test, models, seed), columns=FOUND)
            rows = found.assign(**about)[[*about, *FOUND]]
            rows.to_csv(args.csv, mode="a", header=not args.csv.exists(), index=False)  # one write
            print(rows.to_string(), flush=True)


if __name__ == "__main__":
    run(main)
