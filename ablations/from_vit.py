"""What does a trained ViT keep as a TokenFormer?

Trains timm's ViT on CIFAR-10, converts it with ``from_vit``, and measures both. If interrupted, run
the same command again: it resumes trainings and skips rows that exist.

    python ablations/from_vit.py --data FOLDER --seeds 0 1 2
"""

import argparse
import io
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.records import environment

RESULTS = Path(__file__).parent / "results" / "from_vit.csv"
COLUMNS = ["date", "commit", "torch", "hardware", "model", "seed", "part", "variant", "dtype"]
COLUMNS += ["name", "value", "n"]
MEAN, STD = (0.4913, 0.4821, 0.4465), (0.2452, 0.2428, 0.2606)  # of the training images
CUTOUT = 8
# Patch size, width, depth, epochs, batch size. On one CPU core, three seeds take 45 minutes.
DEFAULTS = {"cuda": (4, 192, 6, 60, 512), "cpu": (8, 96, 5, 40, 128)}


class Table:
    """The CSV: each row is one write of one line, so that several processes can append."""

    def __init__(self, path: Path, device: str, model: str) -> None:
        self.path, self.model = path, model
        now = environment(device=device)
        self.now = [now["date"], now["commit"], now["versions"]["torch"], now["hardware"]]
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def has(self, seed: int, part: str, variant: str = "", dtype: str = "", name: str = "") -> bool:
        """Tell whether a row of this model and hardware exists; empty values match all."""
        rows = pd.read_csv(self.path)
        wanted = {"hardware": self.now[3], "model": self.model, "seed": seed, "part": part}
        wanted |= {"variant": variant, "dtype": dtype, "name": name}
        for column, value in wanted.items():
            rows = rows[rows[column] == value] if value != "" else rows
        return len(rows) > 0

    def add(self, seed: int, part: str, variant: str, dtype: str, n: int, **values: float) -> None:
        """Append a row for each value that has none."""
        for name, value in values.items():
            if self.has(seed, part, variant, dtype, name):
                continue
            row = [*self.now, self.model, seed, part, variant, dtype, name, value, n]
            line = pd.DataFrame([row], columns=COLUMNS).to_csv(index=False, header=False)
            with self.path.open("ab", buffering=0) as file:
                file.write(line.encode())
            print(f"seed {seed}  {part}  {variant}  {dtype}  {name}: {value:.6g}", flush=True)


def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Return uint8 images and labels of both parts on the device; decode them once."""
    cache, data = args.work_dir / "cifar10.pt", {}
    if not cache.exists():
        import pyarrow.parquet
        from PIL import Image

        for part in ("train", "test"):
            file = next(args.data.rglob(f"{part}-*.parquet"), None)
            if file is None:
                raise InputError(f"--data {args.data} has no {part}-*.parquet of CIFAR-10")
            table = pyarrow.parquet.read_table(file)
            column = "image" if "image" in table.column_names else "img"
            files = (row["bytes"] for row in table[column].to_pylist())
            pixels = np.stack([np.asarray(Image.open(io.BytesIO(f)).convert("RGB")) for f in files])
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
            data[part] = images, torch.tensor(table["label"].to_pylist())
        args.work_dir.mkdir(parents=True, exist_ok=True)
        with whole_file(cache) as file:
            torch.save(data, file)
    data = torch.load(cache, weights_only=True)
    return {
        p: (x[: args.limit].to(args.device), y[: args.limit].to(args.device))
        for p, (x, y) in data.items()
    }


def normalize(images: Tensor) -> Tensor:
    """Scale uint8 images to a mean of 0 and a standard deviation of 1 per channel."""
    mean = torch.tensor(MEAN, device=images.device).view(3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(3, 1, 1)
    return (images / 255 - mean) / std


def augment(images: Tensor) -> Tensor:
    """Crop with a padding of 4, flip and cut out a square of each image, all on the device."""
    count, _, size, _ = images.shape
    place = torch.arange(size, device=images.device)
    draw = torch.rand(5, count, 1, device=images.device)
    rows, columns = place + (draw[0] * 9).long(), place + (draw[1] * 9).long()  # (B, 32)
    columns = torch.where(draw[2] < 0.5, columns, columns.flip(1))
    x = F.pad(normalize(images), (4, 4, 4, 4))
    each = torch.arange(count, device=images.device)[:, None, None]
    x = x.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    top, left = ((d * (size + 1)).long() - CUTOUT // 2 for d in draw[3:])  # part may lie outside
    hole_rows, hole_columns = ((place >= o) & (place < o + CUTOUT) for o in (top, left))
    return x.masked_fill((hole_rows[:, :, None] & hole_columns[:, None, :])[:, None], 0.0)


def autocast(device: str, dtype: str = "bfloat16") -> torch.autocast:
    """Return autocast to bfloat16, or a context that does nothing."""
    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return AdamW with a decay of 0.05 on matrices.

    Positions and class tokens are not decayed, nor are one-dimensional parameters: the norm biases
    of 1 carry all offsets of a converted model.
    """
    skip: Any = getattr(model, "no_weight_decay", set)()
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 and name not in skip].append(parameter)
    settings = [{"params": groups[True], "weight_decay": 0.05}]
    settings.append({"params": groups[False], "weight_decay": 0.0})
    return torch.optim.AdamW(settings, lr=rate, betas=(0.9, 0.99), fused=True)


def train_steps(
    forward: Any, optimizer: Any, images: Tensor, labels: Tensor, batch_size: int, rate_at: Any
) -> Tensor:
    """Train over shuffled images once, with a rate for each step; return the mean loss."""
    order = torch.randperm(len(images), device=images.device)
    total = torch.zeros((), device=images.device)
    steps = max(len(images) // batch_size, 1)
    for step in range(steps):
        index = order[step * batch_size : (step + 1) * batch_size]
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        with autocast(images.device.type):
            loss = F.cross_entropy(
                forward(augment(images[index])), labels[index], label_smoothing=0.1
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()  # no wait for the GPU
    return total / steps


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor, dtype: str = "float32") -> Tensor:
    """Return the logits in float32, in batches of 1,000 images, in evaluation mode."""
    model.eval()
    with autocast(images.device.type, dtype):
        return torch.cat([model(normalize(batch)).float() for batch in images.split(1000)])


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the percentage of images whose largest logit is their label's."""
    return (logits.argmax(1) == labels).double().mean().item() * 100


def train(args: argparse.Namespace, seed: int, data: Any, table: Table) -> None:
    """Train a ViT from scratch, or resume it; the checkpoint has all that is needed."""
    path = args.work_dir / f"vit_{seed}.pt"
    shape = {
        "img_size": 32,
        "patch_size": args.patch,
        "embed_dim": args.width,
        "depth": args.depth,
        "num_heads": args.heads,
        "num_classes": 10,
    }
    settings = {"epochs": args.epochs, "batch_size": args.batch_size, "lr": args.lr}
    settings["limit"] = args.limit
    torch.manual_seed(seed)
    model = VisionTransformer(**shape).to(args.device)
    optimizer, start = adamw(model, args.lr), 0
    if path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        if saved["args"] != shape or saved["settings"] != settings:
            raise InputError(
                f"{path} was trained with {saved['args'] | saved['settings']}: give its arguments "
                "or another --work-dir"
            )
        start = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    images, labels = data["train"]
    steps = max(len(images) // args.batch_size, 1)
    warmup, last = max(args.epochs // 12, 1) * steps, args.epochs * steps
    forward = torch.compile(model) if args.compile else model
    began = time.time()
    for epoch in range(start, args.epochs):
        torch.manual_seed(seed * 100_003 + epoch)  # a resumed training draws the same
        model.train()

        def rate_at(step: int, done: int = epoch * steps) -> float:
            at = done + step + 1
            cosine = 0.5 + 0.5 * math.cos(math.pi * max(at - warmup, 0) / max(last - warmup, 1))
            return args.lr * min(at / warmup, 1.0) * cosine

        loss = train_steps(forward, optimizer, images, labels, args.batch_size, rate_at).item()
        done, text = epoch + 1, ""
        if done % args.save_every == 0 or done == args.epochs:
            with whole_file(path) as file:
                torch.save(
                    {
                        "args": shape,
                        "settings": settings,
                        "epoch": done,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    },
                    file,
                )
            text = f"  test {accuracy(logits_of(model, data['test'][0]), data['test'][1]):.2f} %"
        spent = time.time() - began
        left = spent / (done - start) * (args.epochs - done)
        print(
            f"seed {seed}  epoch {done}/{args.epochs}  loss {loss:.4f}{text}  "
            f"{spent / 60:.1f} min, {left / 60:.1f} min left",
            flush=True,
        )
    value = accuracy(logits_of(model, data["test"][0]), data["test"][1])
    table.add(seed, "train", "vit", "float32", len(data["test"][1]), accuracy=value)


PARTS = {"train": train}


def parse() -> argparse.Namespace:
    """Parse the command line; defaults of the training depend on the device."""
    parser = argparse.ArgumentParser(description="Train ViTs on CIFAR-10, convert and measure.")
    parser.add_argument("--data", type=Path, help="folder with the parquet files of CIFAR-10")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/from_vit"))
    parser.add_argument("--csv", type=Path, default=RESULTS)
    for name in ("patch", "width", "depth", "epochs", "batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--lr", type=float, help="default: 1e-3 × √(batch size / 512)")
    parser.add_argument("--save-every", type=int, default=5, metavar="EPOCHS")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=int, help="use only the first images, for a trial")
    args = parser.parse_args()
    for name, value in zip(
        ("patch", "width", "depth", "epochs", "batch_size"), DEFAULTS[args.device], strict=True
    ):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.lr = args.lr or 1e-3 * math.sqrt(args.batch_size / 512)
    return args


def main() -> None:
    """Run the parts in turn for each seed."""
    args = parse()
    if args.data is None:
        raise InputError("give --data, the folder with the parquet files of CIFAR-10")
    if args.device == "cpu":
        set_fused_attn(False)  # in bfloat16, PyTorch's own CPU kernel is 2.5 times slower
    model = f"patch {args.patch} width {args.width} depth {args.depth} epochs {args.epochs}"
    model += f" limit {args.limit}" if args.limit else ""
    table, data = Table(args.csv, args.device, model), load_data(args)
    for part in args.parts:
        for seed in args.seeds:
            PARTS[part](args, seed, data, table)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
