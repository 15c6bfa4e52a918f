"""Fine-tune a frozen model by appended pairs, and compare a linear probe; only torch and timm.

A model learns the handwritten digits 0 to 4, then 5 to 9. Under a minute on two cores::

    pip install -e . scikit-learn
    python examples/append_pairs.py
"""

import argparse
from copy import deepcopy

import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from tokenformer_vit.growth import grow  # registers the models with timm


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train the parameters that need gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def report(name: str, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Print how many parameters were trained, and the accuracy."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        right = model.eval()(images).argmax(dim=1) == labels
    print(f"{name:<22} {trained:>8,} trained parameters, accuracy {right.float().mean():.2%}")


def main() -> None:
    """Train on five digits, then on the other five in two ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15, help="of each training")
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 4.9) / 6.0
    held_out = torch.rand(len(labels)) < 0.2
    first = labels < 5

    size: dict = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 96, "depth": 4}
    base = timm.create_model("tokenformer_tiny", num_classes=5, **size)
    train(base, images[first & ~held_out], labels[first & ~held_out], epochs)
    report("digits 0 to 4", base, images[first & held_out], labels[first & held_out])

    new_train, new_val = ~first & ~held_out, ~first & held_out
    probe = deepcopy(base).requires_grad_(False)
    probe.head = nn.Linear(96, 5)  # only this is trained
    train(probe, images[new_train], labels[new_train] - 5, epochs)
    report("5 to 9, linear probe", probe, images[new_val], labels[new_val] - 5)

    # Four more pairs in each layer, eight in feed-forward; everything else is frozen.
    grown = grow(deepcopy(base), 100, 100, 392, freeze="old")
    grown.head = nn.Linear(96, 5)
    train(grown, images[new_train], labels[new_train] - 5, epochs)
    report("5 to 9, appended pairs", grown, images[new_val], labels[new_val] - 5)


if __name__ == "__main__":
    main()
