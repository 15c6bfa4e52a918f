"""Make a trained vision model smaller without training it, and measure what is left of it."""

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.benchmarking.benchmark import measure_rounds, short
from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers, refit, removal_costs

from .datasets import LabelledImages, find_splits, labels_for, open_images
from .images import list_images, read_images
from .prediction import class_names

GRID = 32  # numbers of pairs that are tried, of a layer
ROUNDS = 20  # of the timing

Samples = Sequence[Any]  # paths, or LabelledImages


def flops_of(model: Any) -> int:
    """Return the forward FLOPs of a vision model for an image, as :func:`model_costs` has them."""
    return total(model_costs(model)).forward_flops


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
        batches: Images (B, 3, H, W) without labels, some hundreds.
        shares: Shares below 1 of the FLOPs of the whole model.
        of_pairs: Keep these shares of the pairs of each layer instead.
        like_vit: Cut only feed-forward layers, all equally, so that ``to_vit`` takes the results.
    """
    layers = pattention_layers(model)
    pairs = {name: layer.num_param_tokens for name, layer in layers.items()}
    cut = [name for name, layer in layers.items() if not like_vit or layer.kind == "ffn"]
    if of_pairs:
        counts = {s: pairs | {name: max(1, round(s * pairs[name])) for name in cut} for s in shares}
    elif like_vit:
        counts = {s: pairs | dict.fromkeys(cut, equal_count(model, s)) for s in shares}
    else:
        counts = choose_counts(model, batches, shares)
    return {share: refit(copy.deepcopy(model), batches, each) for share, each in counts.items()}


def equal_count(model: Any, flops: float) -> int:
    """Choose one number of pairs for all feed-forward layers, for a share of the model's FLOPs."""
    layers = [block.mlp for block in model.blocks]
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    pair = 2 * tokens * sum(layer.in_features + layer.out_features for layer in layers)
    count = int(layers[0].num_param_tokens - (1 - flops) * flops_of(model) / pair)
    if count < 1:
        raise InputError(f"no feed-forward pair is left at {flops:g} of the FLOPs: give more")
    return count


def choose_counts(
    model: Any, batches: Sequence[Tensor], shares: Iterable[float]
) -> dict[float, dict[str, int]]:
    """Choose how many pairs each layer keeps, for each share of the model's FLOPs.

    Layers are cut where the outputs change least for a FLOP that is saved. The change is predicted
    to first order: the cost of removal of a layer's pairs (:func:`~tokenformer_vit.growth.refit`),
    times the mean squared gradient of the model's outputs. Query, key and value of a block keep
    one number. Linear tokens save only where they are cheaper than the product of a fused layer.

    Args:
        model: TokenFormerViT, such as a converted ViT.
        batches: Images (B, 3, H, W) without labels.
        shares: Of the FLOPs of the whole model, attention products and stem counted.

    Returns:
        The numbers of pairs by layer, for each share.
    """
    layers, costs = pattention_layers(model), removal_costs(model, batches)
    slopes, groups = output_slopes(model, batches), dict[str, list[str]]()
    for name, layer in layers.items():
        block = f"{name.rpartition('.')[0]} {layer.num_param_tokens}"
        groups.setdefault(block if layer.kind == "qkv" else name, []).append(name)
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    steps = []
    for names in groups.values():
        lost: Any = sum(slopes[name] * costs[name] for name in names)
        errors = [*lost.flip(0).cumsum(0).flip(0).tolist(), 0.0]  # [p]: if p are kept
        numbers = {max(1, round(len(lost) * each / GRID)) for each in range(1, GRID + 1)}
        points = []
        for number in sorted(numbers):
            products = sum(_products(layers[name], number) for name in names)
            points.append((2 * tokens * products, errors[number], number))
        steps += [(*step, names) for step in _hull(points)]
    chosen = {name: len(costs[name]) for name in layers}
    whole, found = flops_of(model), {}
    spent, cheapest_first = whole, deque(sorted(steps, key=lambda step: step[0]))
    for share in sorted(shares, reverse=True):
        while spent > share * whole:
            if not cheapest_first:
                raise InputError(f"{spent / whole:.3f} of the FLOPs are the least, not {share:g}")
            _, saved, number, names = cheapest_first.popleft()
            spent -= saved
            chosen |= dict.fromkeys(names, number)
        found[share] = dict(chosen)
    return found


def _products(layer: Any, number: int) -> int:
    """Return the multiplications of a layer with so many pairs for a token, fused if cheaper."""
    products = number * (layer.in_features + layer.out_features)
    fused = layer.in_features * layer.out_features
    return min(products, fused) if layer.theta == "linear" else products


def _hull(points: list[tuple[int, float, int]]) -> Iterator[tuple[float, int, int]]:
    """Yield error per FLOP, FLOPs saved and number of each step along the lower convex hull."""
    cost, error, _ = at = points[-1]
    cheaper = [each for each in points if each[0] < cost]
    while cheaper:
        at = min(cheaper, key=lambda each: (each[1] - error) / (cost - each[0]))
        yield (at[1] - error) / (cost - at[0]), cost - at[0], at[2]
        cost, error, _ = at
        cheaper = [each for each in points if each[0] < cost]


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
    squares: dict[str, list[Tensor]] = {name: [] for name in parts}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda slope: squares[name].append(slope.double().square().mean()))

        return hook

    for name, part in parts.items():
        part.register_forward_hook(watch(name))
    generator = torch.Generator().manual_seed(0)
    for images in (part for batch in batches for part in batch.split(32)):
        outputs = model(images)
        signs = 2 * torch.randint(2, outputs.shape, generator=generator) - 1
        torch.autograd.backward((outputs * signs.to(outputs)).sum())
    return {name: torch.stack(each).mean().item() for name, each in squares.items()}


def is_nested(model: Any) -> bool:
    """Return whether a model was trained with nested sizes."""
    return len(getattr(model, "sizes", ())) > 1


def divide_images(source: str, most: int) -> tuple[Samples, Samples]:
    """Return images to fit to, and others to measure with: of train and val, or two parts of all.

    The first are drawn at random, ``most`` of them, or half of all if there is one part.
    """
    splits = find_splits(source)
    one = next((name for name in ("train", "val", *splits) if name in splits), "")
    found: Any = open_images(source, one) if splits else list_images([source])
    others: Any = open_images(source, "val") if {"train", "val"} <= splits.keys() else None
    order = random.Random(0).sample(range(len(found)), len(found))
    count = min(most, len(found) if others else len(found) // 2)
    if count < 1:
        raise InputError(
            f"{source} has {len(found)} images: give some to fit to, others to measure"
        )
    return _chosen(found, order[:count]), others or _chosen(found, order[count:])


def _chosen(images: Any, index: list[int]) -> Samples:
    if not isinstance(images, LabelledImages):
        return [images[i] for i in index]
    images = copy.copy(images)
    images.keep(index)
    return images


def find_labels(model: Any, images: Samples) -> Tensor:
    """Return labels (N,) of images, with a model's numbers for its classes, compared by name."""
    if not isinstance(images, LabelledImages):
        raise InputError("the images have no classes")
    if not model.num_classes:
        raise InputError("the model has no classifier")
    return torch.tensor(labels_for(class_names(model), images.classes))[images.labels]


def tensor_batches(
    model: nn.Module, samples: Samples, batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Read images with the model's evaluation transform, all or none; yield (B, 3, H, W)."""
    for batch in read_images(samples, resolve_input_data_config(model), batch_size):
        for _, image in batch:
            if isinstance(image, InputError):
                raise image
        yield torch.stack([image for _, image in batch]).to(device)  # type: ignore[misc]


@torch.inference_mode()
def measure(
    models: Mapping[str, Any], batches: Iterable[Tensor], labels: Tensor | None
) -> list[dict[str, Any]]:
    """Measure models, the first of which is whole, on images of the given labels or without them.

    ``agreement`` is the share of images, in %, that get the class which the whole model gives; of
    models without a classifier, the mean cosine of the features of both, in %. ``milliseconds`` are
    those of an image of the first batch, in turns; median of ``ROUNDS``.
    """
    first: Any = None
    images, found = 0, torch.zeros(2, len(models), dtype=torch.float64)
    for batch in batches:
        first = batch if first is None else first
        outputs = [model(batch).float() for model in models.values()]
        for name, output in zip(models, outputs, strict=True):
            if not output.isfinite().all():
                raise InputError(f"the output is not finite ({name}): use an earlier checkpoint")
        if next(iter(models.values())).num_classes:
            outputs = [output.argmax(dim=-1) for output in outputs]
            same = [output == outputs[0] for output in outputs]
        else:
            same = [
                F.cosine_similarity(output.flatten(1), outputs[0].flatten(1)) for output in outputs
            ]
        found[0] += torch.stack([each.double().sum() for each in same]).cpu()
        if labels is not None:
            of_batch = labels[images : images + len(batch)].to(batch.device)
            found[1] += torch.stack([(each == of_batch).sum() for each in outputs]).cpu()
        images += len(batch)
    calls = {name: partial(model, first) for name, model in models.items()}
    seconds = measure_rounds(calls, ROUNDS, first.device)
    points = []
    for (name, model), (same, right) in zip(models.items(), found.t().tolist(), strict=True):
        cost = total(model_costs(model))
        point = {"name": name, "parameters": cost.parameters, "flops_per_image": cost.forward_flops}
        point["milliseconds"] = short(1000 * median(seconds[name]) / len(first))
        point["agreement"] = 100 * same / images
        points.append(point if labels is None else {**point, "top1": 100 * right / images})
    return points
