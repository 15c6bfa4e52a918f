"""Convert a ViT of timm with random weights to a TokenFormer, compare the two, and grow it.

Seconds. ``--draw`` needs matplotlib::

    python examples/from_vit.py
    python examples/from_vit.py --draw from_vit.png    # only draw why it works
"""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from torch.nn.functional import gelu

from tokenformer_vit.growth import grow
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.from_vit import _FLAT, _RANGE, _flat_weights


def compare() -> None:
    """Print how far the outputs of a TokenFormer are from those of its ViT."""
    torch.manual_seed(0)
    vit: Any = timm.create_model("vit_tiny_patch16_224", depth=4).eval()
    for parameter in vit.parameters():  # untrained biases are 0, and norms do nothing
        parameter.data += 0.02 * torch.randn_like(parameter)
    model, images = from_vit(vit), torch.randn(4, 3, 224, 224)
    with torch.no_grad():
        expected = vit(images)
        error = (model(images) - expected).norm() / expected.norm()
        print(f"converted: relative error of the outputs {error:.1e}")
        grow(model, 512, 512, 1024)  # pairs of q, k and v; of the output; of the feed-forward part
        error = (model(images) - expected).norm() / expected.norm()
        print(f"grown: relative error of the outputs {error:.1e}")


def draw(path: Path) -> None:
    """Draw the GELUs that add up to a constant, and the two that add up to their input."""
    from matplotlib.figure import Figure  # not needed to compare

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    channel = torch.linspace(0, 2, 201, dtype=torch.float64)[:, None]
    gelus = gelu(channel * _FLAT)
    left.plot(channel, gelus, color="0.7", linewidth=1)
    left.plot(channel, gelus @ _flat_weights("gelu"), color="C0", label="their weighted sum")
    left.axvspan(1 - _RANGE, 1 + _RANGE, color="C0", alpha=0.1, linewidth=0)
    left.set(title="12 GELUs give a bias", xlabel="channel a / h", ylim=(-0.3, 1.3))
    left.legend(loc="center right")
    score = torch.linspace(-3, 3, 121)
    right.plot(score, gelu(score), color="C1", label="gelu(a)")
    right.plot(score, -gelu(-score), color="C2", label="−gelu(−a)")
    right.plot(score, gelu(score) - gelu(-score), color="C0", label="their sum: a")
    right.set(title="2 GELUs give a linear layer", xlabel="score a")
    right.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a ViT, compare, grow.")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="only draw")
    args = parser.parse_args()
    draw(args.draw) if args.draw else compare()
