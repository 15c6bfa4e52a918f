"""Measure a trained classifier that keeps or reads only some of its pairs."""

import copy
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import model_costs, products, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import Usage, extract, pattention_layers, prune
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.block import layer_arguments
from tokenformer_vit.models.sizes import kind_of

from .datasets import LabelledImages, labels_for, open_images
from .images import read_images
from .prediction import class_names

METHODS = ("prune", "budget", "nested", "top-k")
KINDS = tuple(COUNTS)

Batch = tuple[Tensor, Tensor]  # images and labels
Numbers = dict[str, list[int]]  # of pairs, for each block, by name of the model's argument


@dataclass(frozen=True)
class Candidate:
    """A model that keeps, or of whose pairs each input token reads, a share of the pairs."""

    method: str  # one of METHODS, or "dense" for the original model
    keep: float
    model: nn.Module  # all candidates of top-k share the original model
    read: Mapping[str, float] = field(default_factory=dict)  # shares to read by kind; empty: all

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """Return the (B, K) scores of (B, 3, H, W) images, in float32."""
        with self.reading():
            scores = self.model(images).float()
        if not scores.isfinite().all():
            what = f"{self.method}, {self.keep:g} of the pairs"
            raise InputError(f"the output is not finite ({what}): use an earlier checkpoint")
        return scores

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let tokens read only the values of their strongest pairs; Θ normalises over all."""
        with ExitStack() as stack:
            if self.read:  # compiled code would leave out the hooks
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for layer, number in self._strongest():
                hook = partial(_read_strongest, number=number)
                stack.enter_context(layer.register_forward_hook(hook))
            yield

    def _strongest(self) -> list[tuple[Pattention, int]]:
        """Return the layers of which a token reads only some values, and their number."""
        layers = pattention_layers(self.model).items() if self.read else ()
        shares = [(layer, self.read.get(kind_of(name, layer))) for name, layer in layers]
        return [(layer, _share(layer.num_used, keep)) for layer, keep in shares if keep]

    def flops(self) -> int:
        """Count the forward FLOPs for an image, without those of values that are not read."""
        vit: Any = self.model
        tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
        saved = sum(  # of linear tokens less than nothing, where one product is cheaper
            products(layer) - layer.num_used * layer.in_features - number * layer.out_features
            for layer, number in self._strongest()
        )
        return total(model_costs(self.model)).forward_flops - 2 * tokens * saved

    def entry(self) -> dict[str, Any]:
        """Describe the candidate for a record; ``pairs`` has a list where blocks differ."""
        pairs = _pairs(self.model)
        return {
            "method": self.method,
            "keep": self.keep,
            "pairs": {kind: _share(pairs[kind], self.read.get(kind, 1)) for kind in KINDS},
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops_per_image": self.flops(),
        }


def _read_strongest(
    layer: Pattention, inputs: tuple[Tensor], output: Tensor, number: int
) -> Tensor:
    """Return the output of a layer from the values of the pairs with the largest weights."""
    weights = layer.weights(inputs[0])  # (..., P)
    chosen = weights.abs().topk(number, dim=-1).indices  # (..., number)
    kept = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
    bias = None if layer.bias is None else layer.bias.to(kept.dtype)
    return F.linear(kept, layer.used_tokens()[1].to(kept.dtype).t(), bias).to(output.dtype)


def candidates(
    model: nn.Module,
    methods: Iterable[str],
    keeps: Iterable[float],
    usage: Mapping[str, Usage] | None = None,
    batches: Sequence[Batch] = (),
    kinds: Sequence[str] = KINDS,
) -> list[Candidate]:
    """Return the original model, then those of each method from most to fewest pairs.

    ``prune`` keeps the most used pairs of every layer. ``budget`` prunes as many weights, with
    numbers that :func:`choose_counts` chooses by the loss on ``batches``, no test data. Both need
    ``usage``. ``nested`` keeps the first pairs of a nested model. ``top-k`` lets each token read
    its strongest pairs.
    """
    shares, pairs = sorted({keep for keep in keeps if keep < 1}, reverse=True), _pairs(model)

    def pruned(counts: Mapping[str, Any]) -> nn.Module:
        return prune(copy.deepcopy(model), usage or {}, **counts)

    def loss(numbers: Numbers) -> float:
        tried = Candidate("budget", 1.0, pruned(numbers))
        losses = [F.cross_entropy(tried.scores(x), y, reduction="sum") for x, y in batches]
        return torch.stack(losses).sum().item() / sum(len(labels) for _, labels in batches)

    made = [Candidate("dense", 1.0, model)]
    for method in methods:
        if method == "nested" and not is_nested(model):
            raise InputError("the model was not trained with nested sizes: use prune or budget")
        counts: Any = [{COUNTS[k]: _share(pairs[k], keep) for k in kinds} for keep in shares]
        counts = choose_counts(model, shares, loss, kinds) if method == "budget" else counts
        for keep, numbers in zip(shares, counts, strict=True):
            read = dict.fromkeys(kinds, keep)
            if method == "top-k":
                made.append(Candidate(method, keep, model, read))
            elif method == "nested":
                of_all = set(kinds) == {*KINDS}
                smaller = extract(model, keep) if of_all else extract(model, **numbers)
                made.append(Candidate(method, keep, smaller))
            else:
                made.append(Candidate(method, keep, pruned(numbers)))
    return made


def choose_counts(
    model: nn.Module,
    shares: Iterable[float],
    loss: Callable[[Numbers], float],
    kinds: Collection[str] = KINDS,
) -> list[Numbers]:
    """Choose how many pairs each layer keeps, for each of ``shares``, by a greedy search.

    Each step removes a sixteenth of the pairs of the layer where the loss rises least for a weight
    that is removed, and the last step only as many as the share needs. Query, key and value of a
    block keep one common number. A layer is measured again only when it comes first in the queue,
    because most steps hardly change the others: Minoux, Accelerated greedy algorithms for
    maximizing submodular set functions, 1978.

    ``shares`` of the weights of these layers go from large to small. An equal share of the pairs of
    every layer has the same weights. Every layer keeps at least one pair.
    """
    pairs: dict[tuple[str, int], int] = {}
    cost: Counter[tuple[str, int]] = Counter()  # of a pair, in weights
    for name, layer in pattention_layers(model).items():
        if (kind := kind_of(name, layer)) in kinds:
            block = next(int(part) for part in reversed(name.split(".")) if part.isdigit())
            part = COUNTS[kind], block
            pairs[part] = layer.num_param_tokens
            cost[part] += layer.in_features + layer.out_features
    groups = {part: max(1, round(number / 16)) for part, number in pairs.items()}
    whole = spent = sum(pairs[part] * cost[part] for part in pairs)
    present, steps, chosen = loss(_by_argument(pairs)), 0, []
    # Entries: the rise of the loss for a weight, the part, at which step it was measured, and the
    # loss without the part's next group of pairs.
    queue = [(-math.inf, part, -1, 0.0) for part in pairs]
    for share in shares:
        while spent > share * whole and queue:
            rise, part, measured, after = heapq.heappop(queue)
            excess = math.ceil((spent - share * whole) / cost[part])
            number = min(groups[part], pairs[part] - 1, excess)
            if number < 1:
                continue  # the layer keeps its last pair
            if measured == steps:
                pairs[part] -= number
                spent -= number * cost[part]
                present, steps = after, steps + 1
            else:
                after = loss(_by_argument({**pairs, part: pairs[part] - number}))
                rise, measured = (after - present) / (number * cost[part]), steps
            heapq.heappush(queue, (rise, part, measured, after))
        chosen.append(_by_argument(pairs))
    return chosen


def _by_argument(pairs: Mapping[tuple[str, int], int]) -> Numbers:
    numbers: Numbers = {}
    for (name, _), number in pairs.items():
        numbers.setdefault(name, []).append(number)
    return numbers


def counts_at(model: Any, flops: float, batches: Any = None, like_vit: bool = False) -> Any:
    """Draft."""
    whole = total(model_costs(model)).forward_flops
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    layers = [block.mlp for block in model.blocks]
    pair = 2 * tokens * sum(layer.in_features + layer.out_features for layer in layers)
    return {"ffn": int(layers[0].num_param_tokens - (1 - flops) * whole / pair)}


def is_nested(model: nn.Module) -> bool:
    """Return whether a model was trained with nested sizes."""
    return len(getattr(model, "sizes", ())) > 1


def _pairs(model: nn.Module) -> dict[str, int | list[int]]:
    """Return the numbers of pairs by kind; a list by block if blocks differ."""
    own: Any = model
    numbers = layer_arguments(own.blocks, None)
    return {kind: numbers[name] for kind, name in COUNTS.items()}


def _share(number: Any, keep: float) -> Any:
    if isinstance(number, list):
        return [_share(each, keep) for each in number]
    return max(1, round(keep * number))


def check_apart(folder: str | Path, data: str | Path) -> None:
    """Refuse to choose pairs by the images whose accuracy is reported."""
    inner, outer = Path(folder).resolve(), Path(data).resolve()
    if inner.is_relative_to(outer) and not inner.is_relative_to(outer / "train"):
        raise InputError(
            f"{folder} may overlap the images whose accuracy is reported, which must not be used "
            "for a choice: give training images with --measure-on, or leave it out"
        )


def open_matching(model: Any, source: str, split: str) -> LabelledImages:
    """Open images with the numbers that the model has for their classes, compared by name."""
    images = open_images(source, split)
    images.labels = torch.tensor(labels_for(class_names(model), images.classes))[images.labels]
    return images


def tensor_batches(
    model: nn.Module, samples: Sequence[Any], batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Read images with the model's evaluation transform, all or none; yield (B, 3, H, W)."""
    for batch in read_images(samples, resolve_input_data_config(model), batch_size):
        for _, image in batch:
            if isinstance(image, InputError):
                raise image
        yield torch.stack([image for _, image in batch]).to(device)  # type: ignore[misc]


def labelled_batches(
    model: nn.Module, images: LabelledImages, batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Read images as :func:`tensor_batches` does; yield them with their labels."""
    batches = tensor_batches(model, images, batch_size, device)  # type: ignore[arg-type]
    return zip(batches, images.labels.to(device).split(batch_size), strict=True)


def measure_top1(candidates: Sequence[Candidate], batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """Return :meth:`Candidate.entry` of all candidates, the original first, with their accuracy.

    ``agreement`` is the share of images, in %, that get the class which the original model gives.
    """
    images, found = 0, torch.zeros(2, len(candidates), dtype=torch.long)
    for batch, labels in batches:
        classes = torch.stack([each.scores(batch).argmax(dim=-1) for each in candidates])  # (M, B)
        right, same = (classes == labels).sum(dim=1), (classes == classes[0]).sum(dim=1)
        images, found = images + len(labels), found + torch.stack([right, same]).cpu()
    return [
        {**each.entry(), "correct": n, "top1": 100 * n / images, "agreement": 100 * m / images}
        for each, n, m in zip(candidates, *found.tolist(), strict=True)
    ]
