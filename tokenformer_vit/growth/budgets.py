"""Choose how many pairs each layer keeps, within a budget of FLOPs."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.models.sizes import kind_of

from .prune import Usage
from .tokens import block_of, counts_by_layer, pattention_layers

# Numbers of pairs by name of the model's argument, with one number for each block.
Numbers = dict[str, list[int]]
Loss = Callable[[Numbers], float]

# Layers lose their pairs in groups of this share of a layer.
_GROUP = 1 / 16


def choose_counts(
    model: nn.Module, budget: float, loss: Loss, kinds: Collection[str] = tuple(COUNTS)
) -> Numbers:
    """Choose how many pairs each layer keeps, greedily.

    All layers start with all pairs. Each step removes a sixteenth of the pairs of the layer where
    the loss rises least for each FLOP that is saved. The last step removes only as many pairs as
    the budget needs. Query, key and value of a block keep one common number.

    The budget is a share of the FLOPs of the Pattention layers, not of the whole model. All tokens
    pass through all of these layers, so the share is the same for every image size, and equal
    shares of the pairs of every layer have the same budget.

    Args:
        model: Whole TokenFormer, which is not changed.
        budget: Share of the FLOPs of the layers to keep, above 0 and at most 1.
        loss: Function that returns the loss of the model with given numbers of pairs, such as
            :func:`usage_loss`, or the loss on held-out images. A layer is measured again only when
            it comes first in the queue, because most steps hardly change the others.
        kinds: Kinds of layers to choose for; the budget is of their FLOPs.

    Returns:
        Numbers of pairs for :func:`~tokenformer_vit.growth.prune`, or for a new model.

    Raises:
        InputError: If the budget is out of range, or less than one pair in each layer.

    Source:
        This project. Measuring again only the first in the queue is the lazy greedy algorithm of
        Minoux, Accelerated greedy algorithms for maximizing submodular set functions, 1978.
    """
    pairs: dict[tuple[str, int], int] = {}
    cost: Counter[tuple[str, int]] = Counter()  # of a pair, in multiplications for each token
    for name, layer in pattention_layers(model).items():
        if kind_of(name) in kinds:
            part = COUNTS[kind_of(name)], block_of(name)
            pairs[part] = layer.num_param_tokens
            cost[part] += layer.in_features + layer.out_features
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
    """Return the loss of usage, for :func:`choose_counts`.

    Args:
        usage: Usage of the pairs of each layer of a model.
        nested: Whether layers lose their last pairs; otherwise they lose the least used pairs.

    Returns:
        A function that sums the share of the removed pairs over all layers. Usage counts squared,
        because vectors in different directions add up like the squares of their lengths.
    """
    kept = {}
    for name, each in usage.items():
        sizes = each.sizes.square()
        if not nested:
            sizes = sizes.sort(descending=True).values
        kept[name] = (
            sizes.cumsum(0) / sizes.sum().clamp(min=1e-300)
        ).tolist()  # 0: no pair is used

    def loss(numbers: Numbers) -> float:
        counts = counts_by_layer(kept, **numbers)
        return sum(1 - kept[name][count - 1] for name, count in counts.items() if count)

    return loss


def _by_argument(pairs: Mapping[tuple[str, int], int]) -> Numbers:
    numbers: Numbers = {}
    for (name, _), number in pairs.items():
        numbers.setdefault(name, []).append(number)
    return numbers
