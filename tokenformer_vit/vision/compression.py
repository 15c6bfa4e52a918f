"""Make a trained vision model smaller without training it; measure and draw what is left of it."""

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.benchmarking.benchmark import measure_rounds, short
from tokenformer_vit.benchmarking.costs import layer_products, model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.growth import pattention_layers, refit, removal_costs

from .datasets import LabelledImages, find_splits, labels_for, open_images
from .images import list_images, read_images
from .prediction import class_names

GRID = 32  # numbers of pairs that are tried, of a layer
ROUNDS = 20  # of the timing


def flops_of(model: Any, tokens: int | None = None) -> int:
    """Return the forward FLOPs of a vision model for an image, as :func:`model_costs` has them."""
    return total(model_costs(model, tokens)).forward_flops


@torch.no_grad()
def tokens_of(model: Any, images: Tensor) -> int:
    """Return the number of tokens for an image of this size, which may not be the model's own."""
    return model.forward_features(images[:1]).shape[1]


def smaller_models(
    model: Any,
    batches: Sequence[Tensor],
    shares: Iterable[float],
    of_pairs: bool = False,
    like_vit: bool = False,
) -> dict[float, Any]:
    """Refit copies of a model without training, each to a share of its FLOPs or of its pairs.

    Args:
        model: TokenFormerViT, such as a converted ViT.
        batches: Images (B, C, H, W) without labels, some hundreds.
        shares: Shares below 1 of the FLOPs of the whole model, attention and stem counted.
        of_pairs: Keep these shares of the pairs of each layer instead.
        like_vit: Cut only feed-forward layers, all equally, so that ``to_vit`` takes the results.
    """
    layers = pattention_layers(model)
    pairs = {name: layer.num_param_tokens for name, layer in layers.items()}
    cut = [name for name, layer in layers.items() if not like_vit or layer.kind == "ffn"]
    if of_pairs:
        counts = {s: pairs | {name: max(1, round(s * pairs[name])) for name in cut} for s in shares}
    elif like_vit:
        tokens = tokens_of(model, batches[0])
        counts = {s: pairs | dict.fromkeys(cut, equal_count(model, s, tokens)) for s in shares}
    else:
        counts = choose_counts(model, batches, shares)
    return {share: refit(copy.deepcopy(model), batches, each) for share, each in counts.items()}


def equal_count(model: Any, flops: float, tokens: int) -> int:
    """Choose one number of pairs for all feed-forward layers, for a share of the model's FLOPs."""
    layers = [block.mlp for block in model.blocks]
    pair = 2 * tokens * sum(layer.in_features + layer.out_features for layer in layers)
    count = int(layers[0].num_param_tokens - (1 - flops) * flops_of(model, tokens) / pair)
    if count < 1:
        raise InputError(f"no feed-forward pair is left at {flops:g} of the FLOPs: give more")
    return count


def choose_counts(
    model: Any, batches: Sequence[Tensor], shares: Iterable[float]
) -> dict[float, dict[str, int]]:
    """Return how many pairs each layer keeps, by name, for each share of the model's FLOPs.

    Layers are cut where the outputs change least for a FLOP that is saved: each takes the number
    that is best at one price of a FLOP. The change is predicted to first order: the cost of removal
    of a layer's pairs (:func:`~tokenformer_vit.growth.refit`), times the mean squared gradient of
    the model's outputs. Query, key and value of a block keep one number. Linear tokens save only
    where they are cheaper than the product of a fused layer.
    """
    layers, costs = pattention_layers(model), removal_costs(model, batches)
    slopes, groups = output_slopes(model, batches), dict[str, list[str]]()
    for name, layer in layers.items():
        block = f"{name.rpartition('.')[0]} {layer.num_param_tokens}"
        groups.setdefault(block if layer.kind == "qkv" else name, []).append(name)
    tokens, options = tokens_of(model, batches[0]), []
    for names in groups.values():
        lost: Any = sum(slopes[name] * costs[name] for name in names)
        numbers = {max(1, round(len(lost) * each / GRID)) for each in range(1, GRID + 1)}
        points = []  # of equal ones, the highest number first
        for number in sorted(numbers, reverse=True):
            products = sum(layer_products(layers[name], number) for name in names)
            points.append((2 * tokens * products, lost[number:].sum().item(), number))
        options.append((names, points))
    whole = flops_of(model, tokens)
    fixed = whole - sum(points[0][0] for _, points in options)

    def best_at(price: float) -> tuple[float, dict[str, int]]:
        best = [
            (names, min(points, key=lambda p: p[1] + price * p[0])) for names, points in options
        ]
        numbers = {name: number for names, (_, _, number) in best for name in names}
        return (fixed + sum(point[0] for _, point in best)) / whole, numbers

    found = {}
    for share in shares:
        low, high = -60.0, 30.0  # powers of ten
        if (least := best_at(10**high)[0]) > share:
            raise InputError(f"{least:.3f} of the FLOPs are the least, not {share:g}")
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if best_at(10**middle)[0] <= share else (middle, high)
        found[share] = best_at(10**high)[1]
    return found


@torch.enable_grad()
def output_slopes(model: Any, batches: Iterable[Tensor]) -> dict[str, float]:
    """Return the mean squared gradient of the model's outputs with respect to those of each layer.

    Of a random sum of the outputs, with signs ±1: its square is, on average, that of their change
    (Hutchinson). With respect to the residual stream where a layer adds to it after LayerScale.
    """
    model = copy.deepcopy(model).eval().requires_grad_()
    parts: dict[str, nn.Module] = {**pattention_layers(model)}
    for index, block in enumerate(model.blocks):
        parts |= {f"blocks.{index}.attn.proj": block.ls1, f"blocks.{index}.mlp": block.ls2}
    outputs: dict[str, Tensor] = {}
    for name, part in parts.items():
        part.register_forward_hook(lambda *call, name=name: outputs.update({name: call[-1]}))
    squares, generator = [], torch.Generator().manual_seed(0)
    for images in (part for batch in batches for part in batch.split(32)):
        results = model(images)
        signs = 2 * torch.randint(2, results.shape, generator=generator) - 1
        slopes = torch.autograd.grad((results * signs.to(results)).sum(), [*outputs.values()])
        squares.append(torch.stack([slope.double().square().mean() for slope in slopes]))
    return dict(zip(outputs, torch.stack(squares).mean(dim=0).tolist(), strict=True))


def divide_images(source: str, most: int) -> tuple[LabelledImages, LabelledImages]:
    """Return images to fit to, and others to measure with: of train and val, or two parts of all.

    The first are drawn at random, ``most`` of them, or half of all if there is one part.
    """
    splits = find_splits(source)
    if splits:
        one = next(name for name in ("train", "val", *splits) if name in splits)
        found = open_images(source, one)
    else:
        files = list_images([source])
        found = LabelledImages(files, np.zeros(len(files), np.int64), (), source, "")
    order = random.Random(0).sample(range(len(found)), len(found))
    if {"train", "val"} <= splits.keys():
        others = open_images(source, "val")
    else:
        others, most = copy.copy(found), min(most, len(found) // 2)
        others.keep(order[most:])
    found.keep(order[:most])
    if not len(found):
        raise InputError(f"{source} has {len(order)} images: give some to fit to, some to measure")
    return found, others


def find_labels(model: Any, images: LabelledImages) -> Tensor:
    """Return labels (N,) of images, with a model's numbers for its classes, compared by name."""
    if not images.classes:
        raise InputError("the images have no classes")
    if not model.num_classes:
        raise InputError("the model has no classifier")
    return torch.tensor(labels_for(class_names(model), images.classes))[images.labels]


def tensor_batches(
    model: nn.Module, samples: Sequence[Any], batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Read images with the model's evaluation transform, all or none; yield (B, C, H, W)."""
    for found, images in read_images(samples, resolve_input_data_config(model), batch_size):
        if errors := [error for _, error in found if error]:
            raise errors[0]
        yield images.to(device)


@torch.inference_mode()
def measure(
    models: Mapping[str, Any], batches: Iterable[Tensor], labels: Tensor | None
) -> list[dict[str, Any]]:
    """Measure models, the first of which is whole, on images of the given labels or without them.

    ``agreement`` is the share of images, in %, that get the class which the whole model gives; of
    models without a classifier, the mean cosine of the features of both, in %. ``milliseconds`` are
    those of an image of the first batch, in turns; median of ``ROUNDS``.
    """
    whole, found = next(iter(models.values())), []
    first: Any = None
    for batch in batches:
        first = batch if first is None else first
        outputs = torch.stack([model(batch).float().flatten(1) for model in models.values()])
        if not outputs.isfinite().all():
            raise InputError("an output is not finite: use an earlier checkpoint")
        if whole.num_classes:
            found.append(outputs.argmax(dim=-1))  # (models, B)
        else:
            found.append(F.cosine_similarity(outputs, outputs[:1], dim=-1))
    results = torch.cat(found, dim=1).cpu()
    same = results == results[0] if whole.num_classes else results
    calls = {name: partial(model, first) for name, model in models.items()}
    seconds = measure_rounds(calls, ROUNDS, first.device)
    points, tokens = [], tokens_of(whole, first)
    for index, (name, model) in enumerate(models.items()):
        cost = total(model_costs(model, tokens))
        point = {"name": name, "parameters": cost.parameters, "flops_per_image": cost.forward_flops}
        point["milliseconds"] = short(1000 * median(seconds[name]) / len(first))
        point["agreement"] = 100 * same[index].double().mean().item()
        if labels is not None:
            point["top1"] = 100 * (results[index] == labels).double().mean().item()
        points.append(point)
    return points


def draw_compression(record: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy, or agreement with the whole model, over FLOPs and milliseconds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    points = sorted(record["points"], key=lambda point: point["flops_per_image"])
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    key = "top1" if "top1" in points[0] else "agreement"
    labels = {"top1": "top-1 (%)", "agreement": "agreement with the whole model (%)"}
    places = {"flops_per_image": "forward FLOPs for an image", "milliseconds": "ms for an image"}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (place, label) in zip(axes, places.items(), strict=True):
        axis.plot([p[place] for p in points], [p[key] for p in points], marker="o")
        for point in points:
            where, text = (point[place], point[key]), point["name"]
            axis.annotate(text, where, (0, -12), textcoords="offset points", ha="right", fontsize=8)
        axis.axhline(record["points"][0][key], color="0.6", linestyle=":")
        axis.set(xlabel=label, xlim=(0, None))
    axes[0].set_ylabel(f"{labels[key]}, {record['images']} images")
    axes[0].xaxis.set_major_formatter(EngFormatter())
    with whole_file(path) as file:
        figure.savefig(file, dpi=100, format="png")
