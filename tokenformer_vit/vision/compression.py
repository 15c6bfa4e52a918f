"""What a trained classifier loses when it keeps, or reads, a part of its pairs only."""

import copy
import io
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.growth.masks import count_pairs
from tokenformer_vit.growth.prune import Usage, prune
from tokenformer_vit.growth.sparse import top_k
from tokenformer_vit.growth.tokens import kind_of
from tokenformer_vit.models.description import data_config
from tokenformer_vit.vision.images import class_folders, read_images, say_left_out, scan_images

__all__ = [
    "KINDS",
    "METHODS",
    "Candidate",
    "candidates",
    "draw",
    "labelled_images",
    "measure_top1",
    "sample_images",
    "table",
    "tensor_batches",
]

METHODS = ("prune", "random", "top-k")
KINDS = ("qkv", "proj", "ffn")


@dataclass(frozen=True)
class Candidate:
    """A model that keeps or reads a part of its pairs.

    Args:
        method: One of ``METHODS``, or ``dense`` for the model as it is.
        keep: Share of the pairs that are kept or read.
        model: The model; candidates of ``top-k`` share it with the dense one.
        pairs: Pairs of each layer that are kept or read, by kind.
        read: Pairs that each input token reads, by kind; empty where it reads all there are.
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
            InputError: If they are not finite.
        """
        with top_k(self.model, **self.read):
            scores = self.model(images)
        if not scores.isfinite().all():
            raise InputError(
                f"the model's output is not finite ({self.method}, {self.keep:g} of its pairs); "
                "its checkpoint is of a training that diverged"
            )
        return scores

    def entry(self, correct: int, images: int) -> dict[str, Any]:
        """Describe the candidate and its accuracy for a record."""
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
        model: TokenFormer classifier; it stays as it is.
        methods: Of ``METHODS``: ``prune`` keeps the most used pairs, ``random`` any, both with an
            adapted τ; ``top-k`` lets each token read its strongest pairs.
        keeps: Shares of the pairs of each layer that are kept or read, in (0, 1].
        usage: Of the model, which the first two methods need.
        kinds: Of the layers whose pairs are concerned.
        seed: Of the random choice.

    Returns:
        The dense model, then the others by method, most pairs first.

    Raises:
        InputError: If the model has no parameter tokens, or layers of one kind differ in number.
    """
    counts: dict[str, int] = {}
    for name, count in count_pairs(model).items():
        if counts.setdefault(kind_of(name), count) != count:
            raise InputError(
                f"{name} has {count} pairs, others of its kind {counts[kind_of(name)]}"
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
    """List the images of class folders with their labels, the positions of the sorted folders.

    Args:
        folder: Holds a folder of images for each class.
        num_classes: Of the model.

    Raises:
        InputError: If there is no such folder, a class has no image, or there are not as many.
    """
    classes = _images_by_class(folder)
    if len(classes) != num_classes:
        raise InputError(
            f"{folder} has {len(classes)} class folders, but the model tells "
            f"{num_classes} classes apart: give the data that it was trained on"
        )
    return [(path, label) for label, images in enumerate(classes) for path in images]


def _images_by_class(folder: Path) -> list[list[Path]]:
    left_out: Counter[str] = Counter()
    folders = class_folders(folder, left_out) if folder.is_dir() else []
    if not folders:
        raise InputError(f"there is no folder {folder} that holds a folder for each class")
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
    """Choose images of class folders at random.

    Args:
        folder: Holds a folder of images for each class, whichever these are.
        number: How many, at most all.
        seed: Of the choice.
        apart: Folder whose images must not be among them.

    Raises:
        InputError: If there is no such folder, a class has no image, or one of both folders is in
            the other.
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
    """Read images as the model's evaluation does, with a bar if there is more than one batch.

    Args:
        model: timm model of RGB images.
        paths: Image files.
        batch_size: Images at a time.
        device: Where the tensors go.

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
    """Count the images whose likeliest class is theirs, for all candidates in one pass.

    Args:
        candidates: On ``device``.
        samples: What :func:`labelled_images` returned.
        batch_size: Images at a time.
        device: Where to compute.

    Returns:
        The entries of a record, one a candidate.

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


def table(record: Mapping[str, Any]) -> Table:
    """Lay out the points of a record."""
    data = printable(record["data"])
    # Text: the name of a folder may look like rich's markup
    rows = Table(title=Text(f"top-1 accuracy on {record['images']} images of {data}"))
    for name in ("method", "keep", "q, k, v", "output", "FFN", "parameters", "GFLOPs", "top-1 %"):
        rows.add_column(name, justify="left" if name == "method" else "right")
    for point in record["points"]:
        rows.add_row(
            point["method"],
            f"{point['keep']:g}",
            *(f"{point['pairs'][kind]}" for kind in KINDS),
            f"{point['parameters']:,}",
            f"{point['flops_per_image'] / 1e9:.4g}",
            f"{point['top1']:.2f}",
        )
    return rows


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy against the share of pairs and against FLOPs, a line a method, as a PNG.

    Raises:
        OSError: If the file cannot be written.
    """
    points = record["points"]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    shares, flops = figure.subplots(1, 2, sharey=True)
    for index, method in enumerate(dict.fromkeys(p["method"] for p in points[1:])):
        own = [points[0], *(p for p in points if p["method"] == method)]
        style = {"marker": "o", "color": f"C{index}", "label": method}
        top1 = [point["top1"] for point in own]
        shares.plot([point["keep"] for point in own], top1, **style)
        flops.plot([point["flops_per_image"] for point in own], top1, **style)
    shares.axhline(points[0]["top1"], color="0.6", linestyle=":")
    flops.axhline(points[0]["top1"], color="0.6", linestyle=":")
    shares.set(xlabel="share of pairs kept or read", ylabel=f"top-1 (%), {record['images']} images")
    flops.set(xlabel="FLOPs an image, forward")
    flops.xaxis.set_major_formatter(EngFormatter())
    shares.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    write_whole(path, picture.getvalue())
