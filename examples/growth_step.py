"""Grow a trained model and continue training: zero keys against random pairs.

A small TokenFormer learns scikit-learn's handwritten digits, gets three times as many pairs, and
continues: once with each kind of new pairs and once without growth. Before and after growth, the
learning rate has its own warm-up and cosine, as in the paper. One seed takes two minutes on
one CPU core. Needs scikit-learn and matplotlib::

    python examples/growth_step.py --seeds 3 --out growth_step.json
    python examples/growth_step.py --draw growth_step.json      # only draw the chart again
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import tokenformer_vit  # noqa: F401  registers the models
from tokenformer_vit.command_line import command_parser, run_tool, typed_command, whole_number
from tokenformer_vit.files import write_figure
from tokenformer_vit.growth import grow
from tokenformer_vit.records import environment, write_record

SIZES: dict[str, Any] = {
    **{"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 96, "depth": 4, "num_heads": 3}
}
SMALL: dict[str, Any] = {
    **{"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 128}
}
LARGE: dict[str, Any] = {key: 3 * pairs for key, pairs in SMALL.items()}
BATCH_SIZE, LR = 64, 1e-3
BRANCHES = {"zero_key": "zero keys", "random": "random pairs", "none": "no growth"}
COLOURS = {"zero_key": "C0", "random": "C3", "none": "0.5"}

Data = tuple[Tensor, Tensor]


def main() -> None:
    """Run the command."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=whole_number(1), default=3, metavar="N", help="default: 3")
    add(
        "--epochs",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="before growth, and again after",
    )
    add("--out", type=Path, default=Path("growth_step.json"), metavar="FILE.json")
    add("--draw", type=Path, metavar="RECORD", help="only draw this record's chart")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text(encoding="utf-8")), args.draw.with_suffix(".png"))
        return
    train, val = digits()
    runs = [run(seed, args.epochs, train, val) for seed in range(args.seeds)]
    record = {
        "command": typed_command(),
        **environment(("torch", "timm", "sklearn"), "cpu"),
        "sizes": SIZES,
        "small": SMALL,
        "large": LARGE,
        "steps": steps_of(args.epochs, train),
        "runs": runs,
    }
    write_record(args.out, record)
    draw(record, args.out.with_suffix(".png"))


def digits() -> tuple[Data, Data]:
    """Load the digits, four fifths for training and a fifth held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split  # not needed to draw

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, val_x = (
        (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) - 4.9) / 6.0
        for part in parts[:2]
    )
    train_y, val_y = (torch.tensor(part) for part in parts[2:])
    return (train_x, train_y), (val_x, val_y)


def steps_of(epochs: int, data: Data) -> list[int]:
    """Return the number of steps of a training, and how many of them are the warm-up."""
    steps = epochs * -(-len(data[0]) // BATCH_SIZE)
    return [steps, steps * 3 // 20]


def run(seed: int, epochs: int, train: Data, val: Data) -> dict[str, Any]:
    """Train, then grow in each way and continue; return losses and changes of the logits."""
    torch.manual_seed(seed)
    model = timm.create_model("tokenformer_tiny", num_classes=10, **SIZES, **SMALL)
    optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    order = torch.Generator().manual_seed(seed)
    before = train_on(model, optimizer, epochs, train, val, order, every=10)
    logits = logits_of(model, val[0])
    result: dict[str, Any] = {"seed": seed, "before": before}
    for branch in BRANCHES:
        # Copied together, the optimizer holds the parameters of the copied model.
        grown, its_optimizer = copy.deepcopy((model, optimizer))
        if branch != "none":
            grow(grown, **LARGE, init=branch, seed=seed, optimizer=its_optimizer)
        change = (logits_of(grown, val[0]) - logits).abs().max().item()
        again = torch.Generator().manual_seed(seed + 1000)
        after = train_on(grown, its_optimizer, epochs, train, val, again, every=1)
        accuracy = (logits_of(grown, val[0]).argmax(-1) == val[1]).double().mean().item()
        result[branch] = {"largest_change_of_logits": change, "top1": 100 * accuracy, **after}
        print(f"seed {seed}, {BRANCHES[branch]}: logits change by at most {change:.3g}")
    return result


def train_on(
    model: nn.Module,
    optimizer: Optimizer,
    epochs: int,
    train: Data,
    val: Data,
    order: torch.Generator,
    every: int,
) -> dict[str, list[float]]:
    """Train for some epochs; return the held-out loss at the start and at later steps.

    It is measured after every ``every`` steps in the warm-up, then after every ten steps.
    """
    step, losses = 0, {"step": [0], "loss": [loss_of(model, val)]}
    steps, warmup = steps_of(epochs, train)
    for _ in range(epochs):
        for rows in torch.randperm(len(train[0]), generator=order).split(BATCH_SIZE):
            cosine = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
            for group in optimizer.param_groups:
                group["lr"] = LR * (cosine if step >= warmup else (step + 1) / warmup)
            F.cross_entropy(model.train()(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % (every if step < warmup else 10) == 0:
                losses["step"].append(step)
                losses["loss"].append(loss_of(model, val))
    return losses


def loss_of(model: nn.Module, data: Data) -> float:
    """Return the mean cross entropy, rounded for a record."""
    return round(F.cross_entropy(logits_of(model, data[0]), data[1]).item(), 5)


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Return the (B, 10) logits."""
    return model.eval()(images)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the held-out loss before and after growth into a PNG file: the mean, least and most."""
    from matplotlib.figure import Figure  # not needed to train

    runs, steps = record["runs"], record["steps"][0]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    times = record["large"]["num_qkv_param_tokens"] // record["small"]["num_qkv_param_tokens"]
    figure.suptitle(f"Growth to {times} times as many pairs: handwritten digits, {len(runs)} seeds")
    whole, close = figure.subplots(1, 2, sharey=True)
    for axes in (whole, close):
        axes.axvline(0, color="0.7", linestyle=":")
        axes.set(xlabel="optimizer steps after growth", yscale="log")
        axes.grid(alpha=0.3)
    curve(whole, [each["before"] for each in runs], "0.3", "before growth", -steps)
    for branch, words in BRANCHES.items():
        change = max(each[branch]["largest_change_of_logits"] for each in runs)
        told = f"change by up to {change:.2g}" if change else "do not change"
        label = words if branch == "none" else f"{words}: logits {told}"
        for axes in (whole, close):
            curve(axes, [each[branch] for each in runs], COLOURS[branch], label)
    whole.set(title="the whole training", ylabel="held-out loss")
    close.set(title="the first 20 steps after growth", xlim=(-1, 20), ylim=(None, 9))
    close.legend(loc="upper right", fontsize="small")
    write_figure(path, figure, dpi=120)
    print(f"chart: {path}")


def curve(axes: Any, runs: list[dict[str, Any]], colour: str, label: str, shift: int = 0) -> None:
    """Draw the mean of runs as a line in a band from the least to the most."""
    losses = torch.tensor([each["loss"] for each in runs])  # (runs, steps)
    steps = [shift + step for step in runs[0]["step"]]
    axes.plot(steps, losses.mean(0), color=colour, label=label)
    axes.fill_between(steps, losses.amin(0), losses.amax(0), color=colour, alpha=0.2, linewidth=0)


if __name__ == "__main__":
    run_tool(main)
