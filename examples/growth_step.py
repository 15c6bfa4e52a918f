"""Measure the loss around growth: zero keys, random pairs, no growth. Needs matplotlib.

A small model learns handwritten digits, gets three times as many pairs and trains on, each time
with a warm-up and a cosine. Two minutes a seed on one core; draws growth_step.png::

    python examples/growth_step.py --seeds 3
"""

import argparse
import copy
import math

import timm
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tokenformer_vit.growth import grow

PAIRS: dict = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 128}
COLOURS = {"zero_key": "C0", "random": "C3", "no growth": "0.5"}


def train(model: nn.Module, optimizer: Optimizer, data: list[Tensor], epochs: int) -> list[float]:
    """Train; return the held-out loss before and after each step."""
    images, labels, val_images, val_labels = data
    losses, steps = [], epochs * math.ceil(len(images) / 64)
    for step in range(steps + 1):
        with torch.no_grad():
            losses.append(F.cross_entropy(model.eval()(val_images), val_labels).item())
        batch = torch.randint(len(images), (64,))
        warmup = min(1.0, (step + 1) / (0.15 * steps))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmup * 0.5 * (1 + math.cos(math.pi * step / steps))
        F.cross_entropy(model.train()(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(seed: int, epochs: int) -> dict[str, list[float]]:
    """Train, then grow in each way and train on; return the losses."""
    torch.manual_seed(seed)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 4.9) / 6.0
    train_set, held_out = torch.randperm(1797).split([1437, 360])
    data = [images[train_set], labels[train_set], images[held_out], labels[held_out]]
    size: dict = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 96, "depth": 4}
    model = timm.create_model("tokenformer_tiny", num_classes=10, **size, **PAIRS)
    optimizer = AdamW(model.parameters(), weight_decay=0.05)
    losses = {"before growth": train(model, optimizer, data, epochs)}
    for branch in COLOURS:
        # Copied together, the optimizer holds the parameters of the copied model.
        grown, own = copy.deepcopy((model, optimizer))
        if branch != "no growth":
            grow(grown, 96, 96, 384, init=branch, optimizer=own)
        torch.manual_seed(seed)
        losses[branch] = train(grown, own, data, epochs)
        print(f"seed {seed}, {branch}: {losses[branch][0]:.3f} -> {losses[branch][-1]:.3f}")
    return losses


def main() -> None:
    """Run some seeds, and draw the mean, the least and the most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20, help="before growth, and again after it")
    args = parser.parse_args()
    runs = [run(seed, args.epochs) for seed in range(args.seeds)]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    whole, close = figure.subplots(1, 2, sharey=True)
    for name in runs[0]:
        losses = torch.tensor([each[name] for each in runs])  # (seeds, steps)
        steps = torch.arange(losses.shape[1]) - (losses.shape[1] - 1) * (name == "before growth")
        for axes in (whole, close):
            axes.plot(steps, losses.mean(0), color=COLOURS.get(name, "0.3"), label=name)
            axes.fill_between(steps, losses.amin(0), losses.amax(0), color="0.7", alpha=0.3)
            axes.set(xlabel="steps after growth", ylabel="held-out loss", yscale="log")
    close.set_xlim(-1, 20)
    close.legend()
    figure.savefig("growth_step.png", dpi=120)


if __name__ == "__main__":
    main()
