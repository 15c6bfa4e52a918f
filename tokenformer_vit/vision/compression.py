"""Measure a trained classifier that keeps or reads some of its pairs, or has quantised ones."""

import copy
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, pattention_layers
from tokenformer_vit.growth.budgets import Numbers, choose_counts, usage_loss
from tokenformer_vit.growth.prune import Usage, prune
from tokenformer_vit.growth.sparse import top_k
from tokenformer_vit.growth.tokens import counts_by_layer
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.block import token_arguments

from .images import class_folders, read_images, say_left_out, scan_images

METHODS = ("prune", "random", "top-k", "nested")
KINDS = tuple(COUNTS)

Batch = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Candidate:
    """A model that keeps or reads some of its pairs.

    Args:
        method: One of ``METHODS``, or ``dense`` for the original model.
        keep: Share of the pairs that are kept or read.
        model: The model. All candidates of ``top-k`` share the original model.
        pairs: Number of pairs that each layer keeps or reads, by kind; a list by block if blocks
            differ.
        read: Share of the pairs that each input token reads, by kind; empty if it reads all.
    """

    method: str
    keep: float
    model: nn.Module
    pairs: Mapping[str, int | list[int]]
    read: Mapping[str, float]

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """Return the (B, K) scores of (B, 3, H, W) images, in float32.

        Raises:
            InputError: If a score is not finite.
        """
        with self._reading():
            scores = self.model(images).float()
        if not scores.isfinite().all():
            raise InputError(
                f"the model's output is not finite ({self.method}, {self.keep:g} of its pairs): "
                "its training diverged; use an earlier checkpoint"
            )
        return scores

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context in which tokens read only some pairs; a quantised model reads all."""
        if not self.read:
            return nullcontext()
        return top_k(self.model, **self.read)  # type: ignore[arg-type]

    def flops(self) -> int:
        """Count the forward FLOPs for an image."""
        with self._reading():
            return total(model_costs(self.model)).forward_flops

    def entry(self, correct: int, images: int) -> dict[str, Any]:
        """Describe the candidate and its accuracy in a record.

        Args:
            correct: Number of images that it classifies correctly.
            images: Number of images.
        """
        return {
            "method": self.method,
            "keep": self.keep,
            "pairs": dict(self.pairs),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "bytes": sum(each.nbytes for each in self.model.state_dict().values()),
            "flops_per_image": self.flops(),
            "correct": correct,
            "top1": 100 * correct / images,
        }


def candidates(
    model: nn.Module,
    methods: Iterable[str],
    keeps: Iterable[float],
    usage: Mapping[str, Usage] | None = None,
    kinds: Sequence[str] = KINDS,
    seed: int = 0,
) -> list[Candidate]:
    """Compress a model in several ways, by one share of the pairs of every layer.

    Args:
        model: TokenFormer classifier, which is not changed.
        methods: Some of ``METHODS``. ``prune`` keeps the most used pairs and ``random`` keeps
            random pairs; both adapt τ. ``nested`` keeps the first pairs of a nested model.
            ``top-k`` lets each token read its strongest pairs.
        keeps: Shares of each layer's pairs to keep or read, in (0, 1].
        usage: Usage of the model's pairs, which ``prune`` and ``random`` need.
        kinds: Kinds of layers to compress.
        seed: Seed of the random choice.

    Returns:
        The original model, then the candidates of each method from most to fewest pairs.

    Raises:
        InputError: If the model has no parameter tokens, or ``methods`` has ``nested`` and the
            model is not nested.
    """
    counts = _pairs(model)
    made = [Candidate("dense", 1.0, model, counts, {})]
    drawn = torch.Generator().manual_seed(seed)
    unused = {
        name: Usage(torch.rand(len(each.sizes), generator=drawn), each.shares)
        for name, each in (usage or {}).items()
    }
    for method in methods:
        for keep in sorted({keep for keep in keeps if keep < 1}, reverse=True):
            part = {kind: _share(counts[kind], keep) for kind in kinds}
            if method == "top-k":
                read = dict.fromkeys(kinds, keep)
                made.append(Candidate(method, keep, model, {**counts, **part}, read))
                continue
            numbers = {COUNTS[kind]: number for kind, number in part.items()}
            smaller = _shrink(model, method, unused if method == "random" else usage or {}, numbers)
            made.append(Candidate(method, keep, smaller, {**counts, **part}, {}))
    return made


def budget_candidates(
    model: nn.Module,
    budgets: Iterable[float],
    usage: Mapping[str, Usage],
    held_out: Sequence[Batch],
    kinds: Sequence[str] = KINDS,
) -> list[Candidate]:
    """Compress a model to budgets of FLOPs, with numbers of pairs chosen for each layer.

    Args:
        model: TokenFormer classifier, which is not changed. A nested model keeps its first pairs,
            another model its most used pairs.
        budgets: Shares of the FLOPs of the Pattention layers, as for
            :func:`~tokenformer_vit.growth.choose_counts`.
        usage: Usage of the model's pairs.
        held_out: Images and labels that are not test data.
        kinds: Kinds of layers to compress.

    Returns:
        For each budget, the model chosen by usage and the model chosen by the loss on ``held_out``.

    Raises:
        InputError: If a budget is too small, or an output is not finite.
    """
    method = uniform_method(model)

    def candidate(name: str, budget: float, numbers: Numbers) -> Candidate:
        smaller = _shrink(model, method, usage, numbers)
        return Candidate(name, budget, smaller, _pairs(smaller), {})

    def held_out_loss(numbers: Numbers) -> float:
        tried = candidate("by-loss", 1.0, numbers)
        losses = [F.cross_entropy(tried.scores(x), y, reduction="sum") for x, y in held_out]
        return torch.stack(losses).sum().item() / sum(len(labels) for _, labels in held_out)

    losses = {"by-usage": usage_loss(usage, method == "nested"), "by-loss": held_out_loss}
    return [
        candidate(name, budget, choose_counts(model, budget, loss, kinds))
        for name, loss in losses.items()
        for budget in sorted({budget for budget in budgets if budget < 1}, reverse=True)
    ]


def uniform_method(model: nn.Module) -> str:
    """Return the method that gives all layers one share: ``nested`` for a nested model."""
    return "nested" if len(getattr(model, "sizes", ())) > 1 else "prune"


def _pairs(model: nn.Module) -> dict[str, int | list[int]]:
    """Return the numbers of pairs by kind; a list by block if blocks differ."""
    own: Any = model
    numbers = token_arguments(own.blocks)
    return {kind: numbers[name] for kind, name in COUNTS.items()}


def _share(number: int | list[int], keep: float) -> Any:
    if isinstance(number, list):
        return [_share(each, keep) for each in number]
    return max(1, round(keep * number))


def _shrink(
    model: nn.Module, method: str, usage: Mapping[str, Usage], numbers: Mapping[str, Any]
) -> nn.Module:
    """Return a smaller model: the first pairs if the method is ``nested``, or the most used."""
    if method != "nested":
        return prune(copy.deepcopy(model), usage, **numbers)
    if uniform_method(model) != "nested":
        raise InputError(
            "the model has no nested sizes, which method nested needs: use prune, or give a model "
            "that was trained with nested sizes"
        )
    counts = counts_by_layer(pattention_layers(model), **numbers)
    return extract(model, {name: count for name, count in counts.items() if count is not None})


def labelled_images(folder: Path, num_classes: int) -> list[tuple[Path, int]]:
    """List the images in class folders with their labels.

    A label is the position of the class folder among the sorted folders.

    Args:
        folder: Folder that holds one folder of images for each class.
        num_classes: Number of classes of the model.

    Raises:
        InputError: If the folder does not exist, a class has no image, or the number of class
            folders is not ``num_classes``.
    """
    classes = _images_by_class(folder)
    if len(classes) != num_classes:
        raise InputError(
            f"{folder} has {len(classes)} class folder{'s' * (len(classes) != 1)}, but the model "
            f"has {num_classes} classes: give the data that it was trained on"
        )
    return [(path, label) for label, images in enumerate(classes) for path in images]


def _images_by_class(folder: Path) -> list[list[Path]]:
    left_out: Counter[str] = Counter()
    folders = class_folders(folder, left_out) if folder.is_dir() else []
    if not folders:
        raise InputError(
            f"there are no class folders in {folder}; give a folder that holds one for each class"
        )
    classes = {
        path.name: [Path(entry.path) for entry in scan_images(path, left_out)] for path in folders
    }
    say_left_out(left_out, folder)
    empty = [name for name, images in classes.items() if not images]
    if empty:
        raise InputError(
            f"there are no images in {len(empty)} class folders of {folder}: "
            f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}; fill or remove them"
        )
    return list(classes.values())


def sample_images(folder: Path, number: int, seed: int, apart: Path) -> list[Path]:
    """Choose random images from class folders.

    Args:
        folder: Folder that holds one folder of images for each class.
        number: Number of images; all of them if there are fewer.
        seed: Seed of the choice.
        apart: Folder whose images must not be chosen.

    Raises:
        InputError: If ``folder`` does not exist, a class has no image, or one of the two folders
            contains the other.
    """
    check_apart(folder, apart, "training images with --measure-on")
    images = [path for paths in _images_by_class(folder) for path in paths]
    return random.Random(seed).sample(images, min(number, len(images)))


def check_apart(folder: Path, tested: Path, remedy: str) -> None:
    """Check that a folder does not hold the images whose accuracy is reported.

    Args:
        folder: Folder of images that a choice uses.
        tested: Folder of the images whose accuracy is reported.
        remedy: What to give instead; the error message ends with it.

    Raises:
        InputError: If one of the two folders contains the other.
    """
    inner, outer = folder.resolve(), tested.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise InputError(
            f"images whose accuracy is reported must not be used for a choice: {folder} and "
            f"{tested} overlap; give {remedy}"
        )


def tensor_batches(
    model: nn.Module, paths: Sequence[Path], batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Read images with the model's evaluation transform; show a progress bar for several batches.

    Args:
        model: timm model for RGB images.
        paths: Image files.
        batch_size: Images in a batch.
        device: Device of the returned tensors.

    Yields:
        (B, 3, H, W) images in the dtype of the model.

    Raises:
        InputError: If an image cannot be read.
    """
    dtype = next(model.parameters()).dtype
    with closing(read_images(paths, resolve_input_data_config(model), batch_size)) as batches:
        for batch in batches:
            for _, image in batch:
                if isinstance(image, InputError):
                    raise InputError(f"cannot read image {image}; repair or remove it")
            images = [image for _, image in batch if isinstance(image, Tensor)]
            yield torch.stack(images).to(device, dtype)


def labelled_batches(
    model: nn.Module, samples: Sequence[tuple[Path, int]], batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Read images as :func:`tensor_batches` does; yield them with their labels."""
    paths, labels = zip(*samples, strict=True)
    start = 0
    with closing(tensor_batches(model, paths, batch_size, device)) as batches:  # type: ignore[type-var]
        for images in batches:
            yield images, torch.tensor(labels[start : start + len(images)], device=device)
            start += len(images)


def measure_top1(
    candidates: Sequence[Candidate],
    samples: Sequence[tuple[Path, int]],
    batch_size: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Measure the top-1 accuracy of all candidates, and how far their scores are from the first's.

    Each image is read once.

    Args:
        candidates: Models on ``device``, the original model first.
        samples: Images and labels, as :func:`labelled_images` returns them.
        batch_size: Images in a batch.
        device: Device to compute on.

    Returns:
        One record entry for each candidate: :meth:`Candidate.entry`, the share of images in % that
        get the class which the original model gives (``agreement``), the root mean square of the
        change of the scores over that of the original scores (``deviation``), and the largest
        change of a score (``largest_change``).

    Raises:
        InputError: If an image cannot be read, or an output is not finite.
    """
    correct, agreeing, largest, squares = ([0.0] * len(candidates) for _ in range(4))
    original = 0.0
    with closing(labelled_batches(candidates[0].model, samples, batch_size, device)) as batches:  # type: ignore[type-var]
        for images, wanted in batches:
            dense = torch.tensor(0)
            for index, candidate in enumerate(candidates):
                scores = candidate.scores(images)
                if index == 0:
                    dense = scores
                    original += dense.square().sum().item()
                change = scores - dense
                correct[index] += (scores.argmax(-1) == wanted).sum().item()
                agreeing[index] += (scores.argmax(-1) == dense.argmax(-1)).sum().item()
                largest[index] = max(largest[index], change.abs().max().item())
                squares[index] += change.square().sum().item()
    return [
        candidate.entry(int(correct[index]), len(samples))
        | {
            "agreement": 100 * agreeing[index] / len(samples),
            "deviation": math.sqrt(squares[index] / original) if original else 0.0,
            "largest_change": largest[index],
        }
        for index, candidate in enumerate(candidates)
    ]
