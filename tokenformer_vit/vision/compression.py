"""Measure the accuracy of a trained classifier that keeps or reads only some of its pairs."""

import copy
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth.masks import count_pairs
from tokenformer_vit.growth.prune import Usage, prune
from tokenformer_vit.growth.sparse import top_k
from tokenformer_vit.models.description import data_config
from tokenformer_vit.models.sizes import kind_of

from .images import class_folders, read_images, say_left_out, scan_images

METHODS = ("prune", "random", "top-k")
KINDS = ("qkv", "proj", "ffn")


@dataclass(frozen=True)
class Candidate:
    """A model that keeps or reads some of its pairs.

    Args:
        method: One of ``METHODS``, or ``dense`` for the original model.
        keep: Share of the pairs that are kept or read.
        model: The model. All candidates of ``top-k`` share the original model.
        pairs: Number of pairs that each layer keeps or reads, by kind.
        read: Number of pairs that each input token reads, by kind; empty if it reads all.
    """

    method: str
    keep: float
    model: nn.Module
    pairs: Mapping[str, int]
    read: Mapping[str, int]

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """Return the (B, K) scores of (B, 3, H, W) images.

        Raises:
            InputError: If a score is not finite.
        """
        with top_k(self.model, **self.read):
            scores = self.model(images)
        if not scores.isfinite().all():
            raise InputError(
                f"the model's output is not finite ({self.method}, {self.keep:g} of its pairs): "
                "its training diverged; use an earlier checkpoint"
            )
        return scores

    def entry(self, correct: int, images: int) -> dict[str, Any]:
        """Describe the candidate and its accuracy in a record.

        Args:
            correct: Number of images that it classifies correctly.
            images: Number of images.
        """
        with top_k(self.model, **self.read):
            flops = total(model_costs(self.model)).forward_flops
        return {
            "method": self.method,
            "keep": self.keep,
            "pairs": dict(self.pairs),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops_per_image": flops,
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
    """Compress a model in several ways.

    Args:
        model: TokenFormer classifier, which is not changed.
        methods: Some of ``METHODS``. ``prune`` keeps the most used pairs and ``random`` keeps
            random pairs; both adapt τ. ``top-k`` lets each token read its strongest pairs.
        keeps: Shares of each layer's pairs to keep or read, in (0, 1].
        usage: Usage of the model's pairs, which ``prune`` and ``random`` need.
        kinds: Kinds of layers to compress.
        seed: Seed of the random choice.

    Returns:
        The original model, then the candidates of each method from most to fewest pairs.

    Raises:
        InputError: If the model has no parameter tokens, or if layers of one kind have different
            numbers of pairs.
    """
    counts: dict[str, int] = {}
    for name, count in count_pairs(model).items():
        if counts.setdefault(kind_of(name), count) != count:
            raise InputError(
                f"{name} has {count} pairs, but another layer of its kind has "
                f"{counts[kind_of(name)]}; give a model whose blocks have equal numbers of pairs"
            )
    made = [Candidate("dense", 1.0, model, counts, {})]
    drawn = torch.Generator().manual_seed(seed)
    unused = {
        name: Usage(torch.rand(len(each.sizes), generator=drawn), each.shares)
        for name, each in (usage or {}).items()
    }
    for method in methods:
        for keep in sorted({keep for keep in keeps if keep < 1}, reverse=True):
            part = {kind: max(1, round(keep * counts[kind])) for kind in kinds}
            if method == "top-k":
                made.append(Candidate(method, keep, model, {**counts, **part}, part))
                continue
            numbers: dict[str, int] = {f"num_{k}_param_tokens": n for k, n in part.items()}
            chosen = unused if method == "random" else usage or {}
            smaller = prune(copy.deepcopy(model), chosen, **numbers)  # type: ignore[arg-type]
            made.append(Candidate(method, keep, smaller, {**counts, **part}, {}))
    return made


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
            f"{folder} has {len(classes)} class folders, but the model has {num_classes} classes: "
            "give the data that it was trained on"
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
    inner, outer = folder.resolve(), apart.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise InputError(
            f"usage must not be measured on images whose accuracy is reported: {folder} and "
            f"{apart} overlap; give training images with --measure-on"
        )
    images = [path for paths in _images_by_class(folder) for path in paths]
    return random.Random(seed).sample(images, min(number, len(images)))


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
        (B, 3, H, W) images.

    Raises:
        InputError: If an image cannot be read.
    """
    with closing(read_images(paths, data_config(model), batch_size)) as batches:
        for batch in batches:
            for _, image in batch:
                if isinstance(image, InputError):
                    raise InputError(f"cannot read image {image}; repair or remove it")
            images = [image for _, image in batch if isinstance(image, Tensor)]
            yield torch.stack(images).to(device)


def measure_top1(
    candidates: Sequence[Candidate],
    samples: Sequence[tuple[Path, int]],
    batch_size: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Measure the top-1 accuracy of all candidates; each image is read once.

    Args:
        candidates: Models on ``device``.
        samples: Images and labels, as :func:`labelled_images` returns them.
        batch_size: Images in a batch.
        device: Device to compute on.

    Returns:
        One record entry for each candidate.

    Raises:
        InputError: If an image cannot be read, or an output is not finite.
    """
    paths, labels = zip(*samples, strict=True)
    correct, start = [0] * len(candidates), 0
    with closing(tensor_batches(candidates[0].model, paths, batch_size, device)) as batches:  # type: ignore[type-var]
        for images in batches:
            wanted = torch.tensor(labels[start : start + len(images)], device=device)
            start += len(images)
            for index, candidate in enumerate(candidates):
                correct[index] += int((candidate.scores(images).argmax(-1) == wanted).sum())
    return [
        candidate.entry(count, len(samples))
        for candidate, count in zip(candidates, correct, strict=True)
    ]
