"""Train a small TokenFormer on handwritten digits, grow it, train it again. Only torch and timm.

Under a minute on two cores::

    pip install -e . scikit-learn
    python examples/minimal.py
"""

import argparse
import math

import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from tokenformer_vit.growth import grow  # registers the models with timm


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (N, 1, 8, 8) and labels (N,), first to train on, then to validate on."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 4.9) / 6.0
    train, val = torch.randperm(len(labels)).split([1437, 360])
    return images[train], labels[train], images[val], labels[val]


def train(model: nn.Module, optimizer: Optimizer, data: list[Tensor], epochs: int) -> None:
    """Train with one epoch of warm-up and a cosine decay of the learning rate to zero."""
    images, labels = data
    warmup = math.ceil(len(images) / 64)
    step, steps = 0, epochs * warmup
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            step += 1
            lr = 2e-3 * min(1.0, step / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def evaluate(name: str, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Print the number of parameters and the accuracy, and return the logits (N, 10)."""
    logits = model.eval()(images)
    accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name:<14} {parameters:>8,} parameters, accuracy {accuracy:.2%}")
    return logits


def main() -> None:
    """Train, grow, train again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15, help="before growth, and again after it")
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    *train_data, val_images, val_labels = load_data()

    size: dict = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 96, "depth": 4}
    model = timm.create_model(
        "tokenformer_tiny",
        num_classes=10,
        **size,
        num_qkv_param_tokens=16,  # key-value pairs of each query, key and value projection
        num_proj_param_tokens=16,  # of each output projection
        num_ffn_param_tokens=64,  # of each feed-forward layer
    )
    optimizer = AdamW(model.parameters(), weight_decay=0.05)
    train(model, optimizer, train_data, epochs)
    before = evaluate("before growth", model, val_images, val_labels)

    # New keys are zero: the new pairs change nothing until they are trained.
    # The optimizer keeps its moments of the old pairs.
    grow(model, 96, 96, 384, optimizer=optimizer)
    after = evaluate("after growth", model, val_images, val_labels)
    print(f"largest change of an output: {(after - before).abs().max().item():.1e}")

    train(model, optimizer, train_data, epochs)
    evaluate("trained again", model, val_images, val_labels)


if __name__ == "__main__":
    main()
