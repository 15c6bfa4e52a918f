"""Early exits: easy images are classified by a small model, hard images also by larger ones."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

from .compression import Batch, Candidate

# Function from (B, 3, H, W) images to (B, K) scores.
Classifier = Callable[[Tensor], Tensor]


@torch.inference_mode()
def predict_early(
    images: Tensor, models: Sequence[Classifier], threshold: float
) -> tuple[Tensor, Tensor]:
    """Classify images with the first model that is confident enough.

    Args:
        images: (B, 3, H, W) images.
        models: Classifiers, the cheapest first. Each computes only the images that the ones before
            left, from the start.
        threshold: Confidence (largest probability) that keeps an answer. The last model's answers
            are always kept.

    Returns:
        (B, K) scores, and the (B,) number of the model that gave them.
    """
    scores = models[0](images)
    exits = torch.zeros(len(images), dtype=torch.long, device=images.device)
    for number, model in enumerate(models[1:], start=1):
        sure = scores.softmax(dim=-1).amax(dim=-1) >= threshold
        left = ((exits == number - 1) & ~sure).nonzero()[:, 0]
        if len(left) == 0:
            break
        scores[left], exits[left] = model(images[left]).to(scores.dtype), number
    return scores, exits


def choose_exits(
    scores: Tensor, labels: Tensor, flops: Sequence[float], limit: float, steps: int = 200
) -> tuple[tuple[int, ...], float]:
    """Choose the models and the threshold with the best accuracy within a mean number of FLOPs.

    Args:
        scores: (M, N, K) scores of M models for N validation images, which must not be test images.
        labels: (N,) classes.
        flops: FLOPs of each model for an image, in increasing order.
        limit: Largest mean number of FLOPs for an image.
        steps: Number of thresholds to try: quantiles of the confidences.

    Returns:
        The numbers of the models, the cheapest first, and the threshold for :func:`predict_early`.
        One model alone is also a choice, so on the validation images no model within the limit is
        better.

    Raises:
        InputError: If the limit is below the FLOPs of the first model.
    """
    if limit < flops[0]:
        raise InputError(
            f"the limit of {limit:,} FLOPs is below the {flops[0]:,} of the smallest model: give a "
            "higher limit, or a smaller model"
        )
    scores, labels = scores.cpu(), labels.cpu()
    confidence = scores.softmax(dim=-1).amax(dim=-1)  # (M, N)
    correct = scores.argmax(dim=-1) == labels  # (M, N)
    tries = confidence.flatten().double().quantile(torch.linspace(0, 1, steps).double())
    choices = []
    numbers = range(len(flops))
    for chosen in (each for count in numbers for each in combinations(numbers, count + 1)):
        index = torch.tensor(chosen)
        cost = torch.tensor([flops[each] for each in chosen]).double().cumsum(0)
        for threshold in tries[:1] if len(chosen) == 1 else tries:
            sure = confidence[index] >= threshold  # (m, N)
            sure[-1] = True
            exits = sure.int().argmax(dim=0)  # (N,) the first that is sure
            mean = cost[exits].mean().item()
            if mean <= limit:
                right = correct[index[exits], torch.arange(len(labels))].sum().item()
                choices.append((right, -mean, chosen, threshold.item()))
    _, _, models, threshold = max(choices)
    return models, threshold


@dataclass(frozen=True)
class EarlyCandidate(Candidate):
    """Several models, of which each image uses only as many as it needs.

    The fields of :class:`~tokenformer_vit.vision.compression.Candidate` are those of the largest
    model, except ``keep``: the share of the pairs of the fixed size with as many FLOPs.

    Args:
        models: Candidates, the cheapest first.
        threshold: Confidence that keeps an answer.
        exits: Number of images that each model has answered so far.
    """

    models: Sequence[Candidate]
    threshold: float
    exits: Counter[int] = field(default_factory=Counter)

    def scores(self, images: Tensor) -> Tensor:
        """Return the (B, K) scores of (B, 3, H, W) images, and count which model gave them."""
        models = [model.scores for model in self.models]
        scores, exits = predict_early(images, models, self.threshold)
        self.exits.update(exits.tolist())
        return scores

    def entry(self, correct: int, images: int) -> dict[str, Any]:
        """Describe the candidate as :meth:`Candidate.entry` does.

        FLOPs are the mean over the images that :meth:`scores` has read. Parameters and bytes are
        those of all models, or of the largest one if the others are its sizes.
        """
        spent = accumulate(model.flops() for model in self.models)
        entries = [model.entry(0, images) for model in self.models]
        nested = self.models[0].method == "nested"
        return super().entry(correct, images) | {
            **{
                name: entries[-1][name] if nested else sum(entry[name] for entry in entries)
                for name in ("parameters", "bytes")
            },
            "flops_per_image": sum(self.exits[i] * cost for i, cost in enumerate(spent)) / images,
            "sizes": [model.keep for model in self.models],
            "threshold": self.threshold,
            "exits": [self.exits[i] for i in range(len(self.models))],
        }


def early_candidates(fixed: Sequence[Candidate], held_out: Sequence[Batch]) -> list[EarlyCandidate]:
    """Combine models of several sizes by early exits, each within the FLOPs of one of them.

    Args:
        fixed: Candidates from most to fewest FLOPs.
        held_out: Images and labels that are not test data, which choose models and thresholds.

    Returns:
        For each candidate except the smallest, early exits with as many FLOPs for an image of
        ``held_out``, on average, or fewer.
    """
    models = [*reversed(fixed)]
    scores = torch.stack([torch.cat([model.scores(x) for x, _ in held_out]) for model in models])
    labels = torch.cat([labels for _, labels in held_out])
    flops = [model.flops() for model in models]
    made = []
    for limit, model in zip(flops[:0:-1], fixed, strict=False):
        numbers, threshold = choose_exits(scores, labels, flops, limit)
        used = [models[i] for i in numbers]
        last = used[-1]
        made.append(
            EarlyCandidate("early", model.keep, last.model, last.pairs, last.read, used, threshold)
        )
    return made
