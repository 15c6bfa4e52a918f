"""What does a trained ViT keep when it becomes a TokenFormer?

Trains ViTs of timm on CIFAR-10, converts each with ``from_vit``, and measures both. Each value is a
row of a CSV, of which ``python ablations/report.py`` renders a table. If interrupted, the same
command goes on: it resumes a training, and skips the parts that have rows.

    python ablations/from_vit.py --data FOLDER --seeds 0 1 2
"""

import argparse
import copy
import io
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from timm.layers import set_fused_attn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.growth import measure_usage, prune
from tokenformer_vit.models import from_vit
from tokenformer_vit.records import environment

FOLDER = Path(__file__).parent
CUTOUT, SAVE_EVERY = 8, 5  # pixels, epochs
# On one CPU core, three seeds train in about 45 minutes.
DEFAULTS = {
    "cuda": {"patch": 4, "width": 192, "depth": 6, "epochs": 60, "batch_size": 512},
    "cpu": {"patch": 8, "width": 96, "depth": 5, "epochs": 40, "batch_size": 128},
}
KEPT = (1, 2, 4, 8, 16)  # all pairs, 1/2, 1/4, ...
TUNE_STEPS, ROUNDS = 200, 20

Images = tuple[Tensor, Tensor]  # normalised images, and labels
Values = Iterator[tuple[str, str, str, float, int]]  # variant, dtype, name, value, n


def load_data(args: argparse.Namespace) -> tuple[Images, Images]:
    """Return the training and the test images on the device; decode them only once."""
    cache = args.work_dir / f"cifar10_{args.limit or 'all'}.pt"
    if not cache.exists():
        from PIL import Image

        parts = []
        for part in ("train", "test"):
            file = next(args.data.rglob(f"{part}-*.parquet"), None) if args.data else None
            if file is None:
                raise InputError(f"--data {args.data} has no {part}-*.parquet of CIFAR-10")
            table = pd.read_parquet(file)[: args.limit]
            files = table["image" if "image" in table else "img"]
            images = (Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in files)
            pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
            labels = torch.tensor(list(table["label"]))
            parts.append((pixels.permute(0, 3, 1, 2).contiguous(), labels))
        args.work_dir.mkdir(parents=True, exist_ok=True)
        with whole_file(cache) as target:
            torch.save(parts, target)
    mean, std = torch.tensor([[0.4913, 0.4821, 0.4465], [0.2452, 0.2428, 0.2606]])[:, :, None, None]
    train, test = torch.load(cache, weights_only=True)
    train, test = (((x / 255 - mean) / std, labels) for x, labels in (train, test))
    return tuple(x.to(args.device) for x in train), tuple(x.to(args.device) for x in test)


def augment(x: Tensor) -> Tensor:
    """Crop with a padding of 4, flip, and cut out a square of each image, all on the device."""
    count, _, size, _ = x.shape
    place = torch.arange(size, device=x.device)
    draw = torch.rand(5, count, 1, device=x.device)
    rows, columns = place + (draw[0] * 9).long(), place + (draw[1] * 9).long()  # (B, 32)
    columns = torch.where(draw[2] < 0.5, columns, columns.flip(1))
    x = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    each = torch.arange(count, device=x.device)[:, None, None]
    x = x[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    top, left = ((d * (size + 1)).long() - CUTOUT // 2 for d in draw[3:])  # part may lie outside
    hole_rows, hole_columns = ((place >= o) & (place < o + CUTOUT) for o in (top, left))
    return x.masked_fill((hole_rows[:, :, None] & hole_columns[:, None, :])[:, None], 0.0)


def autocast(device: torch.device, dtype: str = "bfloat16") -> torch.autocast:
    """Return autocast to bfloat16, or a context that does nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return AdamW with a decay of 0.05 on matrices alone.

    The norm biases of 1 carry all offsets of a converted model: they must not decay.
    """
    skip: Any = getattr(model, "no_weight_decay", set)()
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 and name not in skip].append(parameter)
    decays = [{"params": groups[on], "weight_decay": 0.05 * on} for on in (True, False)]
    return torch.optim.AdamW(decays, lr=rate, betas=(0.9, 0.99), fused=True)


def train_steps(
    forward: Any, optimizer: Any, data: Images, batch: int, rates: Sequence[float]
) -> Tensor:
    """Train for a step per rate, over shuffled images; return the mean loss."""
    images, labels = data
    passes = math.ceil(len(rates) * batch / len(images))
    order = torch.cat([torch.randperm(len(images), device=images.device) for _ in range(passes)])
    total = torch.zeros((), device=images.device)  # nothing here waits for a GPU
    for rate, index in zip(rates, order.split(batch), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast(images.device):
            logits = forward(augment(images[index]))
            loss = F.cross_entropy(logits, labels[index], label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
    return total / len(rates)


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor, dtype: str = "float32") -> Tensor:
    """Return the logits in float32, of evaluation mode, in batches of 1,000 images."""
    model.eval()
    with autocast(images.device, dtype):
        return torch.cat([model(batch).float() for batch in images.split(1000)])


def top1(logits: Tensor, labels: Tensor) -> float:
    """Return the percentage of images whose largest logit is that of their label."""
    return (logits.argmax(1) == labels).double().mean().item() * 100


def trained(args: argparse.Namespace, data: Images, seed: int) -> VisionTransformer:
    """Return a ViT trained from scratch; go on with its training if it was interrupted."""
    path = args.work_dir / f"vit_{seed}.pt"
    shape = {"img_size": 32, "patch_size": args.patch, "embed_dim": args.width}
    shape |= {"depth": args.depth, "num_heads": 3, "num_classes": 10}
    settings = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "limit")}
    torch.manual_seed(seed)
    model = VisionTransformer(**shape).to(args.device)
    optimizer, start = adamw(model, args.lr), 0
    if path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        if (there := saved["args"] | saved["settings"]) != shape | settings:
            raise InputError(f"{path} was trained with {there}: give these, or another --work-dir")
        start = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    steps = max(len(data[0]) // args.batch_size, 1)
    warmup, last = max(args.epochs // 12, 1) * steps, args.epochs * steps
    at = torch.arange(1, last + 1, dtype=torch.float64)
    cosine = 0.5 + 0.5 * torch.cos(math.pi * (at - warmup).clamp(min=0) / max(last - warmup, 1))
    rates = (args.lr * (at / warmup).clamp(max=1) * cosine).tolist()
    forward, began = torch.compile(model) if args.compile else model, time.time()
    for epoch in range(start, args.epochs):
        torch.manual_seed(seed * 100_003 + epoch)  # a resumed training draws the same
        now, done = rates[epoch * steps : (epoch + 1) * steps], epoch + 1
        loss = train_steps(forward, optimizer, data, args.batch_size, now).item()
        if done % SAVE_EVERY == 0 or done == args.epochs:
            saved = {"args": shape, "settings": settings, "epoch": done}
            saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with whole_file(path) as file:
                torch.save(saved, file)
        left = (time.time() - began) / 60 / (done - start) * (args.epochs - done)
        text = f"epoch {done}/{args.epochs}  loss {loss:.4f}  {left:.1f} minutes left"
        print(f"seed {seed}  {text}", flush=True)
    return model.eval()


def accuracy(args: argparse.Namespace, train: Images, test: Images, models: Any, seed: int):
    """Compare the logits of both models, in both dtypes, with the ViT's in float32."""
    images, labels = test
    exact = logits_of(models["vit"], images).double()
    centred = exact - exact.mean(dim=1, keepdim=True)
    for variant, model in models.items():
        for dtype in ("float32", "bfloat16"):
            logits = logits_of(model, images, dtype)
            yield variant, dtype, "accuracy", top1(logits, labels), len(labels)
            if (variant, dtype) != ("vit", "float32"):
                change = logits.double() - exact
                change -= change.mean(dim=1, keepdim=True)  # a common offset changes no class
                error = (change.norm(dim=1) / centred.norm(dim=1)).mean().item()
                same = top1(logits, exact.argmax(dim=1))
                yield variant, dtype, "relative_error", error, len(labels)
                yield variant, dtype, "same_class", same, len(labels)


def pairs(args: argparse.Namespace, train: Images, test: Images, models: Any, seed: int):
    """Keep fewer pairs in q, k and v: by falling σ, or by their usage on training images."""
    model, (images, labels) = models["converted"], test
    count = 2 * model.embed_dim  # all but zero keys that fill up
    usage = measure_usage(model, train[0][:2000].split(500))
    for share in KEPT:
        kept = count // share
        used = prune(copy.deepcopy(model), usage, num_qkv_param_tokens=kept)
        model.set_size({"qkv": kept} if share > 1 else None)
        for variant, each in (("σ", model), ("usage", used)):
            value = top1(logits_of(each, images), labels)
            yield variant, "float32", f"{kept}/{count}", value, len(labels)
        model.set_size(None)


def tune(args: argparse.Namespace, train: Images, test: Images, models: Any, seed: int):
    """Train both models further, with the same images; the rate falls to 0 by a cosine."""
    images, labels = test
    batch = min(args.batch_size, len(train[0]))
    cosine = [0.5 + 0.5 * math.cos(math.pi * step / TUNE_STEPS) for step in range(TUNE_STEPS)]
    for variant, original in models.items():
        model = copy.deepcopy(original)
        forward = torch.compile(model) if args.compile else model
        for rate in (3e-4, 1e-3):
            for order in range(3):
                model.load_state_dict(original.state_dict())
                model.train()
                torch.manual_seed(1_000_003 * (order + 1) + seed)
                rates = [rate * factor for factor in cosine]
                train_steps(forward, adamw(model, rate), train, batch, rates)
                value = top1(logits_of(model, images), labels)
                yield variant, "bfloat16", f"lr {rate:g} data {order}", value, len(labels)


def size(args: argparse.Namespace, train: Images, test: Images, models: Any, seed: int):
    """Count parameters and FLOPs, and time forward passes in turn."""
    for variant, model in models.items():
        plain, image = copy.deepcopy(model).cpu(), torch.zeros(1, 3, 32, 32)
        # Older versions of the counter do not know the fused attention of a CPU.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            plain(image)
        yield variant, "float32", "parameters", sum(p.numel() for p in model.parameters()), 1
        yield variant, "float32", "flops", counter.get_total_flops(), 1
    images = train[0][:128]
    for compiled in (False, True) if args.compile else (False,):
        for dtype in ("float32", "bfloat16"):
            torch.compiler.reset()  # it compiles a module's code only eight times
            calls = [torch.compile(m) if compiled else m for m in models.values()]
            with torch.no_grad(), autocast(images.device, dtype):
                seconds = [[seconds_of(c, images) for c in calls] for _ in range(ROUNDS + 3)]
            ratio = float(np.median([theirs / vit for vit, theirs in seconds[3:]]))
            mode = f"time, {'compiled' if compiled else 'eager'}"
            yield mode, dtype, "converted_over_vit", ratio, ROUNDS


def seconds_of(call: Any, images: Tensor) -> float:
    """Time ten forward passes; on a GPU, until they are done."""
    began = time.perf_counter()
    results = [call(images) for _ in range(10)]
    results[-1][0, 0].item()
    return time.perf_counter() - began


PARTS = {"accuracy": accuracy, "pairs": pairs, "tune": tune, "size": size}


def chart(rows: Any, path: Path) -> None:
    """Draw the accuracy over the pairs that are kept."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis, rows = figure.subplots(), rows[rows["part"] == "pairs"]
    for (_, variant), own in rows.groupby(["model", "variant"], sort=False):
        shares = own["name"].map(lambda name: int(name.split("/")[0]) / int(name.split("/")[1]))
        values = own.groupby(shares)["value"].agg(["mean", "std"]).fillna(0.0)
        axis.errorbar(values.index, values["mean"], values["std"], label=variant, capsize=3)
    axis.set(xscale="log", xlabel="share of pairs kept in q, k and v", ylabel="top-1 (%)")
    axis.set_xticks([1 / share for share in KEPT], ["all", *(f"1/{n}" for n in KEPT[1:])])
    axis.minorticks_off()
    axis.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; sizes depend on the device."""
    parser = Parser(description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--data", type=Path, help="folder with the parquet files of CIFAR-10")
    parser.add_argument("--device", choices=DEFAULTS, default=device)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/from_vit"))
    parser.add_argument("--csv", type=Path, default=FOLDER / "from_vit.csv")
    for name in ("patch", "width", "depth", "epochs", "batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=int, help="use only the first images, for a trial")
    args = parser.parse_args(words)
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, getattr(args, name) or value)
    args.lr = 1e-3 * math.sqrt(args.batch_size / 512)
    return args


def main(words: Sequence[str]) -> None:
    """Train, convert and measure for each seed."""
    args = parse(words)
    now = environment(device=args.device)
    if args.device == "cpu":
        set_fused_attn(False)  # in bfloat16, PyTorch's fused CPU kernel is 2.5 times slower
    train, test = load_data(args)
    model = f"patch {args.patch} width {args.width} depth {args.depth} epochs {args.epochs}"
    model += f" limit {args.limit}" if args.limit else ""  # a trial is another model
    for seed in args.seeds:
        torch.compiler.reset()
        vit = trained(args, train, seed)
        models = {"vit": vit, "converted": from_vit(vit)}
        for part in args.parts:
            known = pd.read_csv(args.csv) if args.csv.exists() else pd.DataFrame()
            about = {"hardware": now["hardware"], "model": model, "seed": seed, "part": part}
            if len(known) and (known[[*about]] == pd.Series(about)).all(axis=1).any():
                continue
            found = PARTS[part](args, train, test, models, seed)
            rows = pd.DataFrame(found, columns=["variant", "dtype", "name", "value", "n"])
            whole = {"date": now["date"], "commit": now["commit"], "torch": torch.__version__}
            for place, (name, value) in enumerate({**whole, **about}.items()):
                rows.insert(place, name, value)
            text = rows.to_csv(index=False, header=not args.csv.exists())
            with args.csv.open("ab", buffering=0) as file:  # one write, for other processes
                file.write(text.encode())
            print(rows.to_string(), flush=True)
    chart(pd.read_csv(args.csv), args.csv.parent / "figures" / "from_vit.png")


if __name__ == "__main__":
    run(main)
