"""What does a trained ViT keep when it becomes a TokenFormer?

Trains ViTs of timm on CIFAR-10, converts each with ``from_vit``, and measures both. Each value is a
row of a CSV. If interrupted, run the same command again: it resumes trainings and skips rows that
exist. Several processes may add to one CSV.

    python ablations/from_vit.py --data FOLDER --seeds 0 1 2
    python ablations/from_vit.py --report
"""

import argparse
import copy
import functools
import io
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from report import converted
from timm.layers import set_fused_attn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.growth import measure_usage, prune
from tokenformer_vit.models import from_vit
from tokenformer_vit.records import environment

RESULTS = Path(__file__).with_suffix(".csv")
COLUMNS = ["date", "commit", "torch", "hardware", "model", "seed", "part", "variant", "dtype"]
COLUMNS += ["name", "value", "n"]
CUTOUT = 8
# On one CPU core, three seeds train in about 45 minutes.
DEFAULTS = {
    "cuda": {"patch": 4, "width": 192, "depth": 6, "epochs": 60, "batch_size": 512},
    "cpu": {"patch": 8, "width": 96, "depth": 5, "epochs": 40, "batch_size": 128},
}
KEPT = (1, 2, 4, 8, 16)  # all pairs, 1/2, 1/4, ...
TUNE_STEPS, ROUNDS = 200, 20


class Rows:
    """The rows of one trained ViT in the CSV."""

    def __init__(self, path: Path, device: str, model: str, seed: int) -> None:
        now = environment(device)
        where = now["date"], now["commit"], now["versions"]["torch"], now["hardware"]
        self.path, self.start, self.seed = path, [*where, model, seed], seed
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def has(self, *words: str) -> bool:
        """Tell whether there is a row of this hardware, model and seed with these words."""
        rows, wanted = read_rows(self.path), [*self.start[3:], *words]
        for column, word in zip(COLUMNS[3:], wanted, strict=False):
            rows = rows[rows[column] == word]
        return len(rows) > 0

    def add(self, part: str, variant: str, dtype: str, n: int, **values: float) -> None:
        """Append a row for each value that has none; each is one write, for other processes."""
        for name, value in values.items():
            if self.has(part, variant, dtype, name):
                continue
            row = [*self.start, part, variant, dtype, name, value, n]
            line = pd.DataFrame([row]).to_csv(index=False, header=False)
            with self.path.open("ab", buffering=0) as file:
                file.write(line.encode())
            print(f"seed {self.seed}  {part}  {variant}  {dtype}  {name}: {value:.6g}", flush=True)


def read_rows(path: Path) -> Any:
    """Read the CSV; empty cells are empty strings."""
    return pd.read_csv(path, keep_default_na=False)


def load_data(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Return uint8 images and labels of both parts on the device; decode them only once."""
    first = f"_first_{args.limit}" if args.limit else ""
    cache, data = args.work_dir / f"cifar10{first}.pt", {}
    if not cache.exists():
        import pyarrow.parquet
        from PIL import Image

        for part in ("train", "test"):
            file = next(args.data.rglob(f"{part}-*.parquet"), None) if args.data else None
            if file is None:
                raise InputError(f"--data {args.data} has no {part}-*.parquet of CIFAR-10")
            table = pyarrow.parquet.read_table(file).slice(0, args.limit)
            column = "image" if "image" in table.column_names else "img"
            files = (io.BytesIO(row["bytes"]) for row in table[column].to_pylist())
            pixels = np.stack([np.asarray(Image.open(each).convert("RGB")) for each in files])
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
            data[part] = images, torch.tensor(table["label"].to_pylist())
        args.work_dir.mkdir(parents=True, exist_ok=True)
        with whole_file(cache) as file:
            torch.save(data, file)
    data = torch.load(cache, weights_only=True)
    return {name: (x.to(args.device), y.to(args.device)) for name, (x, y) in data.items()}


@functools.cache
def moments(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel; a copy in each step would wait for a GPU."""
    mean, std = (0.4913, 0.4821, 0.4465), (0.2452, 0.2428, 0.2606)  # of the training images
    return torch.tensor(mean, device=device).view(3, 1, 1), torch.tensor(std, device=device).view(
        3, 1, 1
    )


def normalize(images: Tensor) -> Tensor:
    """Scale uint8 images to a mean of 0 and a standard deviation of 1 per channel."""
    mean, std = moments(images.device)
    return (images / 255 - mean) / std


def augment(images: Tensor) -> Tensor:
    """Crop with a padding of 4, flip, and cut out a square of each image, all on the device."""
    count, _, size, _ = images.shape
    place = torch.arange(size, device=images.device)
    draw = torch.rand(5, count, 1, device=images.device)
    rows, columns = place + (draw[0] * 9).long(), place + (draw[1] * 9).long()  # (B, 32)
    columns = torch.where(draw[2] < 0.5, columns, columns.flip(1))
    x = F.pad(normalize(images), (4, 4, 4, 4)).permute(0, 2, 3, 1)
    each = torch.arange(count, device=images.device)[:, None, None]
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
    forward: Any, optimizer: Any, data: tuple[Tensor, Tensor], batch: int, rates: Sequence[float]
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
        return torch.cat([model(normalize(batch)).float() for batch in images.split(1000)])


def top1(logits: Tensor, labels: Tensor) -> float:
    """Return the percentage of images whose largest logit is that of their label."""
    return (logits.argmax(1) == labels).double().mean().item() * 100


def label(shape: dict[str, Any], epochs: int, limit: int | None) -> str:
    """Describe a ViT for the column ``model``; a trial with few images is another model."""
    text = f"patch {shape['patch_size']} width {shape['embed_dim']} depth {shape['depth']}"
    return f"{text} epochs {epochs}" + (f" limit {limit}" if limit else "")


def train(args: argparse.Namespace, data: Any, seed: int) -> None:
    """Train a ViT from scratch, or resume it."""
    path = args.work_dir / f"vit_{seed}.pt"
    shape = {"img_size": 32, "patch_size": args.patch, "embed_dim": args.width}
    shape |= {"depth": args.depth, "num_heads": 3, "num_classes": 10}
    settings = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "limit")}
    torch.manual_seed(seed)
    model = VisionTransformer(**shape).to(args.device)
    optimizer, start = adamw(model, args.lr), 0
    if path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        if saved["args"] != shape or saved["settings"] != settings:
            raise InputError(
                f"{path} was trained with {saved['args'] | saved['settings']}: give these "
                "arguments, other --parts, or another --work-dir"
            )
        start = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    steps = max(len(data["train"][0]) // args.batch_size, 1)
    warmup, last = max(args.epochs // 12, 1) * steps, args.epochs * steps
    at = torch.arange(1, last + 1, dtype=torch.float64)
    cosine = 0.5 + 0.5 * torch.cos(math.pi * (at - warmup).clamp(min=0) / max(last - warmup, 1))
    rates = (args.lr * (at / warmup).clamp(max=1) * cosine).tolist()
    forward = torch.compile(model) if args.compile else model
    began = time.time()
    for epoch in range(start, args.epochs):
        torch.manual_seed(seed * 100_003 + epoch)  # a resumed training draws the same
        now, text = rates[epoch * steps : (epoch + 1) * steps], ""
        model.train()
        loss = train_steps(forward, optimizer, data["train"], args.batch_size, now).item()
        done = epoch + 1
        if done % args.save_every == 0 or done == args.epochs:
            saved = {"args": shape, "settings": settings, "epoch": done}
            saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with whole_file(path) as file:
                torch.save(saved, file)
            text = f"  test {top1(logits_of(model, data['test'][0]), data['test'][1]):.2f} %"
        spent = (time.time() - began) / 60
        left = spent / (done - start) * (args.epochs - done)
        print(
            f"seed {seed}  epoch {done}/{args.epochs}  loss {loss:.4f}{text}  "
            f"{spent:.1f} min, {left:.1f} min left",
            flush=True,
        )
    rows = Rows(args.csv, args.device, label(shape, args.epochs, args.limit), seed)
    images, labels = data["test"]
    if not rows.has("train"):
        accuracy = top1(logits_of(model, images), labels)
        rows.add("train", "vit", "float32", len(labels), accuracy=accuracy)


def load_vit(args: argparse.Namespace, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return a trained ViT in evaluation mode, and its checkpoint."""
    path = args.work_dir / f"vit_{seed}.pt"
    if not path.exists():
        raise InputError(f"{path} does not exist: run --parts train")
    saved = torch.load(path, map_location=args.device, weights_only=True)
    if saved["epoch"] < saved["settings"]["epochs"]:
        raise InputError(f"{path} is of epoch {saved['epoch']}: finish --parts train")
    model = VisionTransformer(**saved["args"]).to(args.device)
    model.load_state_dict(saved["model"])
    return model.eval(), saved


def accuracy(args: argparse.Namespace, data: Any, rows: Rows, models: dict[str, Any]) -> None:
    """Compare the logits of both models, in both dtypes, with the ViT's in float32."""
    if rows.has("accuracy", "converted", "bfloat16", "same_class"):
        return
    images, labels = data["test"]
    exact = logits_of(models["vit"], images).double()
    centred = exact - exact.mean(dim=1, keepdim=True)
    for variant, model in models.items():
        for dtype in ("float32", "bfloat16"):
            logits = logits_of(model, images, dtype)
            values = {"accuracy": top1(logits, labels)}
            if (variant, dtype) != ("vit", "float32"):
                change = logits.double() - exact
                change -= change.mean(dim=1, keepdim=True)  # a common offset changes no class
                error = (change.norm(dim=1) / centred.norm(dim=1)).mean().item()
                same = top1(logits, exact.argmax(dim=1))
                values |= {"relative_error": error, "same_class": same}
            rows.add("accuracy", variant, dtype, len(labels), **values)


def pairs(args: argparse.Namespace, data: Any, rows: Rows, models: dict[str, Any]) -> None:
    """Keep fewer pairs in q, k and v: by falling σ, or by their usage on training images."""
    model = models["converted"]
    count = 2 * model.embed_dim  # all but zero keys that fill up
    if rows.has("pairs", "usage", "float32", f"{count // KEPT[-1]}/{count}"):
        return
    images, labels = data["test"]
    usage = measure_usage(model, [normalize(b) for b in data["train"][0][:2000].split(500)])
    for share in KEPT:
        kept = count // share
        model.set_size({"qkv": kept} if share > 1 else None)
        whole = copy.deepcopy(model)
        whole.set_size(None)
        used = prune(whole, usage, num_qkv_param_tokens=kept)
        for variant, each in (("σ", model), ("usage", used)):
            value = top1(logits_of(each, images), labels)
            rows.add("pairs", variant, "float32", len(labels), **{f"{kept}/{count}": value})
    model.set_size(None)


def tune(args: argparse.Namespace, data: Any, rows: Rows, models: dict[str, Any]) -> None:
    """Train both models further, with the same images; the rate falls to 0 by a cosine."""
    images, labels = data["test"]
    batch = min(args.batch_size, len(data["train"][0]))
    cosine = [0.5 + 0.5 * math.cos(math.pi * step / TUNE_STEPS) for step in range(TUNE_STEPS)]
    for variant, original in models.items():
        model = copy.deepcopy(original)
        forward = torch.compile(model) if args.compile else model
        for rate in (3e-4, 1e-3):
            for order in range(3):
                name = f"lr {rate:g} data {order}"
                if rows.has("tune", variant, "bfloat16", name):
                    continue
                model.load_state_dict(original.state_dict())
                model.train()
                torch.manual_seed(1_000_003 * (order + 1) + rows.seed)
                rates = [rate * factor for factor in cosine]
                train_steps(forward, adamw(model, rate), data["train"], batch, rates)
                value = top1(logits_of(model, images), labels)
                rows.add("tune", variant, "bfloat16", len(labels), **{name: value})


def size(args: argparse.Namespace, data: Any, rows: Rows, models: dict[str, Any]) -> None:
    """Count parameters and FLOPs, and time forward passes in turn."""
    for variant, model in models.items():
        parameters = sum(each.numel() for each in model.parameters())
        plain, image = copy.deepcopy(model).cpu(), torch.zeros(1, 3, 32, 32)
        # Older versions of the counter do not know the fused attention of a CPU.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            plain(image)
        flops = counter.get_total_flops()
        rows.add("size", variant, "float32", 1, parameters=parameters, flops=flops)
    images = normalize(data["train"][0][:128])
    for compiled in (False, True) if args.compile else (False,):
        for dtype in ("float32", "bfloat16"):
            mode = f"time, {'compiled' if compiled else 'eager'}"
            if rows.has("size", mode, dtype):
                continue
            torch.compiler.reset()  # it compiles a module's code only eight times
            calls = [torch.compile(m) if compiled else m for m in models.values()]
            with torch.no_grad(), autocast(images.device, dtype):
                seconds = torch.tensor([seconds_of(calls, images) for _ in range(ROUNDS + 3)])
            ratio = (seconds[3:, 1] / seconds[3:, 0]).median().item()
            rows.add("size", mode, dtype, ROUNDS, converted_over_vit=ratio)


def seconds_of(calls: Sequence[Any], images: Tensor) -> list[float]:
    """Time ten forward passes of each model; on a GPU, until it is done."""
    seconds = []
    for call in calls:
        began = time.perf_counter()
        for _ in range(10):
            result = call(images)
        result[0, 0].item()  # type: ignore[possibly-unbound]
        seconds.append(time.perf_counter() - began)
    return seconds


PARTS = {"accuracy": accuracy, "pairs": pairs, "tune": tune, "size": size}


def chart(path: Path) -> None:
    """Draw the accuracy over the pairs that are kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis, rows = figure.subplots(), read_rows(path)
    rows = rows[rows["part"] == "pairs"]
    several = rows["model"].nunique() > 1
    for (model, variant), own in rows.groupby(["model", "variant"], sort=False):
        shares = own["name"].map(lambda name: int(name.split("/")[0]) / int(name.split("/")[1]))
        values = own.groupby(shares)["value"].agg(["mean", "std"]).fillna(0.0)
        name = f"{variant}, {model}" if several else variant
        axis.errorbar(values.index, values["mean"], values["std"], label=name, capsize=3)
    axis.set(xscale="log", xlabel="share of pairs kept in q, k and v", ylabel="top-1 (%)")
    axis.set_xticks(
        [1 / share for share in KEPT], [f"1/{share}" if share > 1 else "all" for share in KEPT]
    )
    axis.minorticks_off()
    axis.legend()
    figures = path.with_name("figures")
    figures.mkdir(exist_ok=True)
    figure.savefig(figures / "from_vit.png", dpi=80)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; sizes depend on the device."""
    parser = argparse.ArgumentParser(description="Train ViTs on CIFAR-10, convert and measure.")
    parser.add_argument("--data", type=Path, help="folder with the parquet files of CIFAR-10")
    parser.add_argument(
        "--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    every = ["train", *PARTS]
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/from_vit"))
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="print and draw what the CSV has")
    for name in ("patch", "width", "depth", "epochs", "batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float, help="default: 1e-3 × √(batch size / 512)")
    parser.add_argument("--save-every", type=int, default=5, metavar="EPOCHS")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=int, help="use only the first images, for a trial")
    args = parser.parse_args(words)
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, getattr(args, name) or value)
    args.lr = args.lr or 1e-3 * math.sqrt(args.batch_size / 512)
    return args


def main(words: Sequence[str] | None = None) -> None:
    """Train, convert and measure for each seed; or report what the CSV has."""
    args = parse(words)
    if args.report:
        chart(args.csv)
        return print(converted(path=args.csv))
    if args.device == "cpu":
        set_fused_attn(False)  # in bfloat16, PyTorch's fused CPU kernel is 2.5 times slower
    data = load_data(args)
    for seed in args.seeds:
        torch.compiler.reset()
        if "train" in args.parts:
            train(args, data, seed)
        if measured := [PARTS[part] for part in args.parts if part in PARTS]:
            vit, saved = load_vit(args, seed)
            args.batch_size, epochs = saved["settings"]["batch_size"], saved["settings"]["epochs"]
            rows = Rows(args.csv, args.device, label(saved["args"], epochs, args.limit), seed)
            models = {"vit": vit, "converted": from_vit(vit)}
            for part in measured:
                part(args, data, rows, models)
    print(converted(path=args.csv), f"All values: {args.csv}", sep="\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
