"""Measure a trained classifier that keeps or reads only some of its pairs."""

import copy
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import Usage, extract, pattention_layers, prune
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.block import token_arguments
from tokenformer_vit.models.sizes import kind_of

from .datasets import class_images
from .images import read_images

METHODS = ("prune", "random", "top-k", "nested")
KINDS = tuple(COUNTS)
# A layer loses its pairs in groups of this share of its pairs.
_GROUP = 1 / 16

Batch = tuple[Tensor, Tensor]  # images and labels
# Numbers of pairs by name of the model's argument, with one number for each block.
Numbers = dict[str, list[int]]
Loss = Callable[[Numbers], float]


@dataclass(frozen=True)
class Candidate:
    """A model that keeps or reads some of its pairs.

    Args:
        method: One of ``METHODS``, or ``dense`` for the original model.
        keep: Share of the pairs that are kept or read.
        model: The model. All candidates of ``top-k`` share the original model.
        pairs: Number of pairs that each layer keeps or reads, by kind; a list by block if blocks
            differ.
        read: Share of the pairs whose values each input token reads, by kind; empty for all.
    """

    method: str
    keep: float
    model: nn.Module
    pairs: Mapping[str, int | list[int]]
    read: Mapping[str, float]

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """Return the (B, K) scores of (B, 3, H, W) images, in float32."""
        with self.reading():
            scores = self.model(images).float()
        if not scores.isfinite().all():
            raise InputError(
                f"the model's output is not finite ({self.method}, {self.keep:g} of its pairs): "
                "its training diverged; use an earlier checkpoint"
            )
        return scores

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let each input token read only the values of its strongest pairs, in a ``with`` block.

        Θ still normalises over all pairs. Compiled code would leave out the hooks.
        """
        with ExitStack() as stack:
            if self.read:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for layer, number in self._strongest():
                hook = partial(_read_strongest, number=number)
                stack.enter_context(layer.register_forward_hook(hook))
            yield

    def _strongest(self) -> list[tuple[Pattention, int]]:
        """Return the layers of which a token reads only some values, and their number."""
        layers = [(self.read.get(kind_of(n)), x) for n, x in pattention_layers(self.model).items()]
        return [(layer, _share(layer.num_used, keep)) for keep, layer in layers if keep]

    def flops(self) -> int:
        """Count the forward FLOPs for an image, without those of values that are not read."""
        vit: Any = self.model
        tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
        unread = sum((x.num_used - number) * x.out_features for x, number in self._strongest())
        return total(model_costs(self.model)).forward_flops - 2 * tokens * unread

    def entry(self, correct: int, images: int) -> dict[str, Any]:
        """Describe the candidate, and how many of how many images it classifies correctly."""
        return {
            "method": self.method,
            "keep": self.keep,
            "pairs": dict(self.pairs),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "bytes": sum(
                tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())
            ),
            "flops_per_image": self.flops(),
            "correct": correct,
            "top1": 100 * correct / images,
        }


def _read_strongest(
    layer: Pattention, inputs: tuple[Tensor], output: Tensor, number: int
) -> Tensor:
    """Return the output of a layer from the values of the pairs with the largest weights."""
    weights = layer.weights(inputs[0])  # (..., P)
    chosen = weights.abs().topk(number, dim=-1).indices  # (..., number)
    kept = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
    return (kept @ layer.used_tokens()[1].to(kept.dtype)).to(output.dtype)


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
        InputError: If ``methods`` has ``nested`` and the model is not nested.
    """
    counts = _pairs(model)
    made = [Candidate("dense", 1.0, model, counts, {})]
    drawn = torch.Generator().manual_seed(seed)
    unused = {
        name: Usage(torch.rand(len(each.sizes), generator=drawn), each.shares)
        for name, each in (usage or {}).items()
    }
    for method in methods:
        if method == "nested" and uniform_method(model) != "nested":
            raise InputError(
                "the model has no nested sizes, which method nested needs: use prune, or give a "
                "model that was trained with nested sizes"
            )
        for keep in sorted({keep for keep in keeps if keep < 1}, reverse=True):
            part = {kind: _share(counts[kind], keep) for kind in kinds}
            read = dict.fromkeys(kinds, keep)
            numbers = {COUNTS[kind]: number for kind, number in part.items()}
            if method == "top-k":
                smaller = model
            elif method == "nested":
                smaller = extract(model, read)
            else:
                used = unused if method == "random" else usage or {}
                smaller = prune(copy.deepcopy(model), used, **numbers)
            read = read if method == "top-k" else {}
            made.append(Candidate(method, keep, smaller, {**counts, **part}, read))
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
        budgets: Shares of the FLOPs of the Pattention layers, as for :func:`choose_counts`.
        usage: Usage of the model's pairs.
        held_out: Images and labels that are not test data.
        kinds: Kinds of layers to compress.

    Returns:
        For each budget, the model chosen by usage and the model chosen by the loss on ``held_out``.
    """
    nested = uniform_method(model) == "nested"

    def candidate(name: str, budget: float, numbers: Numbers) -> Candidate:
        counts: dict[str, Any] = numbers
        smaller = copy.deepcopy(model)
        smaller = _keep_first(smaller, counts) if nested else prune(smaller, usage, **counts)
        return Candidate(name, budget, smaller, _pairs(smaller), {})

    def held_out_loss(numbers: Numbers) -> float:
        tried = candidate("by-loss", 1.0, numbers)
        losses = [F.cross_entropy(tried.scores(x), y, reduction="sum") for x, y in held_out]
        return torch.stack(losses).sum().item() / sum(len(labels) for _, labels in held_out)

    losses = {"by-usage": usage_loss(usage, nested), "by-loss": held_out_loss}
    return [
        candidate(name, budget, choose_counts(model, budget, loss, kinds))
        for name, loss in losses.items()
        for budget in sorted({budget for budget in budgets if budget < 1}, reverse=True)
    ]


@torch.no_grad()
def _keep_first(model: nn.Module, numbers: Mapping[str, Any]) -> nn.Module:
    """Keep the first pairs of each layer of a nested model, with τ of their number, in place."""
    taus, places = {}, {}
    for name, layer in pattention_layers(model).items():
        pairs, (argument, block) = layer.num_param_tokens, _part(name)
        kept = numbers[argument][block] if argument in numbers else pairs
        taus[name] = layer.tau_of(kept).clone()
        places[name] = Usage(torch.arange(pairs, 0, -1), torch.ones(pairs))
    prune(model, places, **numbers)
    for name, layer in pattention_layers(model).items():
        layer.tau.copy_(taus[name])
    return model


def choose_counts(
    model: nn.Module, budget: float, loss: Loss, kinds: Collection[str] = KINDS
) -> Numbers:
    """Choose how many pairs each layer keeps, greedily, for ``prune`` or a new model.

    Each step removes a sixteenth of the pairs of the layer where the loss rises least for each FLOP
    that is saved, and the last step only as many as the budget needs. Query, key and value of a
    block keep one common number. A layer is measured again only when it comes first in the queue,
    because most steps hardly change the others: Minoux, Accelerated greedy algorithms for
    maximizing submodular set functions, 1978.

    Args:
        model: Whole TokenFormer, which is not changed.
        budget: Share of the FLOPs of these layers to keep. Equal shares of the pairs of every layer
            have the same budget, for every image size.
        loss: Function that returns the loss of the model with given numbers of pairs.
        kinds: Kinds of layers to choose for.

    Raises:
        InputError: If the budget is above 1, or less than one pair in each layer.
    """
    pairs: dict[tuple[str, int], int] = {}
    cost: Counter[tuple[str, int]] = Counter()  # of a pair, in multiplications for each token
    for name, layer in pattention_layers(model).items():
        if kind_of(name) in kinds:
            pairs[_part(name)] = layer.num_param_tokens
            cost[_part(name)] += layer.in_features + layer.out_features
    spent = sum(pairs[part] * cost[part] for part in pairs)
    least = cost.total() / spent
    if not least <= budget <= 1:
        raise InputError(
            f"the budget must be at most 1 and at least {math.ceil(1e4 * least) / 1e4}, which is "
            f"one pair in each layer, but got {budget}"
        )
    limit = max(budget * spent, cost.total())  # the product may be rounded below one pair in each
    groups = {part: max(1, round(number * _GROUP)) for part, number in pairs.items()}
    present, steps = loss(_by_argument(pairs)), 0
    # Rise of the loss for each saved FLOP, part, the step at which it was measured, loss after it.
    queue = [(-math.inf, part, -1, present) for part in pairs]
    while spent > limit:
        rise, part, measured, after = heapq.heappop(queue)
        number = min(groups[part], pairs[part] - 1, math.ceil((spent - limit) / cost[part]))
        if number == 0:
            continue  # a layer keeps its last pair
        if measured < steps:
            after = loss(_by_argument({**pairs, part: pairs[part] - number}))
            rise = (after - present) / (number * cost[part])
            heapq.heappush(queue, (rise, part, steps, after))
            continue
        pairs[part] -= number
        spent -= number * cost[part]
        present, steps = after, steps + 1
        heapq.heappush(queue, (rise, part, -1, after))
    return _by_argument(pairs)


def usage_loss(usage: Mapping[str, Usage], nested: bool = False) -> Loss:
    """Return a function that sums the share of the removed pairs in the usage of all layers.

    Usage counts squared, because vectors in different directions add up like the squares of their
    lengths. Layers lose their least used pairs, or the last ones of a nested model.
    """
    kept = {}
    for name, each in usage.items():
        sizes = each.sizes.square()
        if not nested:
            sizes = sizes.sort(descending=True).values
        # Clamped, because the sum is 0 if no pair is used.
        kept[name] = (sizes.cumsum(0) / sizes.sum().clamp(min=1e-300)).tolist()

    def loss(numbers: Numbers) -> float:
        lost = 0.0
        for name, shares in kept.items():
            argument, block = _part(name)
            if argument in numbers:
                lost += 1 - shares[numbers[argument][block] - 1]
        return lost

    return loss


def _part(name: str) -> tuple[str, int]:
    """Return the argument that counts the pairs of a layer, and the number of its block."""
    block = next(int(part) for part in reversed(name.split(".")) if part.isdigit())
    return COUNTS[kind_of(name)], block


def _by_argument(pairs: Mapping[tuple[str, int], int]) -> Numbers:
    numbers: Numbers = {}
    for (name, _), number in pairs.items():
        numbers.setdefault(name, []).append(number)
    return numbers


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


def labelled_images(folder: Path, num_classes: int) -> list[tuple[Path, int]]:
    """List the images in class folders; a label is the position among the sorted folders."""
    classes = _images_by_class(folder)
    if len(classes) != num_classes:
        raise InputError(
            f"{folder} has {len(classes)} class folder{'s' * (len(classes) != 1)}, but the model "
            f"has {num_classes} classes: give the data that it was trained on"
        )
    return [(path, label) for label, images in enumerate(classes) for path in images]


def _images_by_class(folder: Path) -> list[list[Path]]:
    if not folder.is_dir():
        raise InputError(f"there are no class folders in {folder}; give one for each class")
    classes = class_images(folder)
    empty = [name for name, images in classes.items() if not images]
    if empty:
        raise InputError(
            f"there are no images in {len(empty)} class folders of {folder}: "
            f"{', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}; fill or remove them"
        )
    return [[Path(image) for image in images] for images in classes.values()]


def sample_images(folder: Path, number: int, seed: int, apart: Path) -> list[Path]:
    """Choose at most so many random images from class folders, none of which is in ``apart``."""
    check_apart(folder, apart, "training images with --measure-on")
    images = [path for paths in _images_by_class(folder) for path in paths]
    return random.Random(seed).sample(images, min(number, len(images)))


def check_apart(folder: Path, tested: Path, remedy: str) -> None:
    """Refuse to choose by the images whose accuracy is reported."""
    inner, outer = folder.resolve(), tested.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise InputError(
            f"images whose accuracy is reported must not be used for a choice: {folder} and "
            f"{tested} overlap; give {remedy}"
        )


def tensor_batches(
    model: nn.Module, paths: Sequence[Path], batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Read images with the model's evaluation transform; yield (B, 3, H, W) in its dtype."""
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
