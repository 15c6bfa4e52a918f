"""The algebra of :func:`refit`: least squares of a layer's values, and what each pair is worth."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.layers import Pattention

RIDGE = 1e-3  # towards the old values, relative to the mean diagonal of the Gram matrix
REPEATS = 3  # of the ridge, each towards the result before: it rules only what inputs hardly show
LEAST_SCALE = 1e-3  # of LayerScale: smaller outputs cannot repair anything
CHUNK = 4096  # tokens that are added up at a time

Moments = tuple[Tensor, Tensor, Tensor, Tensor]  # see :func:`moments`


def moments(
    features: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor, centred: bool
) -> Moments:
    """Return E[f fᵀ], E[f tᵀ], E[f] and E[t] in float64, of features f of ``x`` and targets t.

    Centred, the first two are covariances, for a layer with a bias, which takes up the means.
    """
    sums: list[Any] = [0, 0, 0, 0]
    for rows, targets in zip(x.split(CHUNK), wanted.split(CHUNK), strict=True):
        f, t = features(rows).double(), targets.double()
        parts = f.t() @ f, f.t() @ t, f.sum(dim=0), t.sum(dim=0)
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    gram, product, mean, target = (total / len(x) for total in sums)
    if centred:
        gram, product = gram - mean.outer(mean), product - mean.outer(target)
    return gram, product, mean, target


def _ridge_inverse(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ridge of a Gram matrix, and the inverse of their sum."""
    ridge = RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    return ridge, torch.linalg.inv(gram + ridge * torch.eye(len(gram)).to(gram))


def solve(gram: Tensor, product: Tensor, values: Tensor) -> Tensor:
    """Return the values (P, C_out) of least squares that are nearest to the old ones."""
    (ridge, inverse), values = _ridge_inverse(gram), values.double()
    for _ in range(REPEATS):
        values = inverse @ (product + ridge * values)
    return values


def rank_linear(
    linear: nn.Linear, found: Moments, scale: Tensor
) -> tuple[Pattention, Tensor, Moments]:
    """Return the fitted layer as tokens, their costs, and the moments of scores in place of inputs.

    Outputs are times ``scale`` (C_out,).
    """
    gram, product, mean, target = found
    linear.weight.copy_((solve(gram, product, linear.weight.t()) * scale).t())
    tokens = Pattention.from_linear(linear, gram)
    keys, values = tokens.key_param_tokens.double(), tokens.value_param_tokens
    gram = keys @ gram @ keys.t()
    costs = gram.diagonal() * values.square().sum(dim=1)
    return tokens, costs, (gram, keys @ product, keys @ mean, target)


def removal_order(gram: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the pair whose loss costs least, again and again; return the last first, and costs.

    The loss of a pair, all others fitted, costs ‖v‖² / (G⁻¹)ₚₚ: the optimal brain surgeon.
    """
    inverse = _ridge_inverse(gram)[1]
    fitted = inverse @ product
    order, costs = torch.arange(len(fitted)).to(fitted.device), torch.zeros_like(inverse[0])
    for last in reversed(range(len(fitted))):
        losses = fitted[: last + 1].square().sum(dim=1) / inverse.diagonal()[: last + 1]
        costs[last], pair = losses.min(dim=0)
        swap = torch.stack((pair, torch.full_like(pair, last)))
        for each in (order, fitted, inverse, inverse.t()):
            each[swap] = each[swap.flip(0)]
        row, value = (each[last] / inverse[last, last].sqrt() for each in (inverse, fitted))
        fitted[:last].addr_(row[:last], value, alpha=-1)
        inverse[:last, :last].addr_(row[:last], row[:last], alpha=-1)
    return order, costs
