"""Benchmark of a TokenFormer for images against a timm model."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import measures
from .matched import matched_vit
from .variants import Group, as_released, set_backend

CLASSES = 1000
MATCHED = "matched-vit"  # a baseline


class Images(NamedTuple):
    """Two image models to measure.

    Args:
        model: timm name of the TokenFormer.
        baseline: timm name of the baseline, or ``MATCHED`` for the ViT of the same width and depth
            with as many weights.
        img_size: Height and width of the images.
        depth: Number of blocks of both models; None for the depth of each model.
    """

    model: str
    baseline: str
    img_size: int
    depth: int | None

    unit = "image"
    modes = ("train", "infer")

    def create(self, implementation: str, seed: int) -> Any:
        """Build the baseline, or our model in one of ``BACKENDS``, with random weights."""
        model: Any
        sizes: dict[str, Any] = {"img_size": self.img_size, "num_classes": CLASSES}
        if self.depth is not None:
            sizes["depth"] = self.depth
        if implementation == "baseline" and self.baseline == MATCHED:
            with torch.device("meta"):
                model = timm.create_model(self.model, **sizes)
            torch.manual_seed(seed)
            vit = matched_vit(model)[0]
            if vit.num_prefix_tokens != model.num_prefix_tokens:
                raise ValueError(
                    f"it has {vit.num_prefix_tokens} tokens before those of the patches, and "
                    f"{self.model} has {model.num_prefix_tokens}"
                )
            return vit
        torch.manual_seed(seed)
        if implementation == "baseline":
            return timm.create_model(self.baseline, **sizes)
        model = timm.create_model(self.model, **sizes)
        if implementation == "released":
            return as_released(model)
        return set_backend(model, implementation)

    def costs(self, implementation: str) -> tuple[int, dict[str, int]]:
        """Count the parameters, and the FLOPs per image in each mode.

        Raises:
            TypeError: If the model has no blocks.
        """
        with torch.device("meta"):
            model = self.create(implementation, 0)
        if not hasattr(model, "blocks"):
            raise TypeError("it has no blocks to compile; choose one of timm's ViTs")
        flops = measures.count_flops(model, (3, self.img_size, self.img_size))
        return sum(parameter.numel() for parameter in model.parameters()), flops

    def shape(self, group: Group) -> list[int]:
        """Return (B, 3, size, size)."""
        return [group.batch_size, 3, self.img_size, self.img_size]

    def items(self, group: Group) -> int:
        """Return the number of images in a step."""
        return group.batch_size

    def draw(self, group: Group, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw images and labels."""
        images = torch.randn(self.shape(group), generator=random)
        return images, torch.randint(CLASSES, (group.batch_size,), generator=random)

    def bind(
        self, model: nn.Module, group: Group, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> Callable[[], Tensor]:
        """Return a function that computes the loss in training, and class scores otherwise."""
        turn = itertools.cycle(batches)

        def forward() -> Tensor:
            images, labels = next(turn)
            scores = model(images)
            return F.cross_entropy(scores, labels) if group.mode == "train" else scores

        return forward
