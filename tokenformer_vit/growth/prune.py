"""Pairs that add little to a layer's output are found and taken away."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import find_theta, norm_shares

from .tokens import (
    LayerTokens,
    check_rebuildable,
    kind_of,
    pattention_layers,
    read_tokens,
    record_counts,
    write_tokens,
)

__all__ = ["Usage", "measure_usage", "prune"]

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Usage:
    """How much input tokens make of each pair of a layer, on average; float64, on the CPU.

    Args:
        sizes: (P,) mean of |weight| · ‖value‖₂, the length of what a pair adds to an output token.
        shares: (P,) mean share of a pair in the sum of p-th powers that Θ divides a row by; they
            sum to 1. Which p: ``norm_order`` in ``ops.theta``.
    """

    sizes: Tensor
    shares: Tensor


@torch.no_grad()
def measure_usage(model: nn.Module, batches: Iterable[Any]) -> dict[str, Usage]:
    """Measure how much each pair of a model adds to the outputs of its layer.

    Args:
        model: Any module with TokenFormer blocks; it is run in evaluation mode and left as it was.
        batches: What it is called with, a tensor at a time, or tuples such as a data loader's,
            whose first entry is taken. They should be of training data: pruning is a choice that
            data make. Each is moved to the model's device.

    Returns:
        For each Pattention layer by name the mean over all input tokens of all batches.

    Raises:
        InputError: If there is no batch, a mask is in use, or a weight is not finite.

    Note:
        Weights are computed in float32 (float64 for float64), sums in float64. What every layer
        sees is computed as the model computes it, under the caller's autocast, if any.
    """
    layers = pattention_layers(model)
    for name, layer in layers.items():
        if layer.active is not None:
            raise InputError(f"{name} has a mask in use; usage is measured with all pairs active")
    sums = {name: _Sums(layer) for name, layer in layers.items()}
    device = next(model.parameters()).device
    in_training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(sums[name].add))
        stack.callback(lambda: [setattr(module, "training", True) for module in in_training])
        model.eval()
        for batch in batches:
            model((batch[0] if isinstance(batch, tuple | list) else batch).to(device))
    return {name: each.usage(name) for name, each in sums.items()}


class _Sums:
    """The sums over input tokens behind the usage of a layer."""

    def __init__(self, layer: Pattention) -> None:
        self.count = 0
        self.weights, self.shares = torch.zeros(
            2, layer.num_param_tokens, dtype=torch.float64, device=layer.key_param_tokens.device
        )
        self.lengths = layer.value_param_tokens.double().norm(dim=-1)

    def add(self, layer: Pattention, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].reshape(-1, layer.in_features)  # (R, C_in)
        scores, weights = layer.scores_and_weights(x)  # (R, P)
        shares = norm_shares(scores, weights, layer.theta)
        self.count += len(x)
        self.weights += weights.abs().sum(dim=0, dtype=torch.float64)
        self.shares += shares.sum(dim=0, dtype=torch.float64)

    def usage(self, name: str) -> Usage:
        if not self.count:
            raise InputError(f"there was no batch to measure the usage of {name} on")
        sizes, shares = self.weights * self.lengths / self.count, self.shares / self.shares.sum()
        if not (sizes.isfinite() & shares.isfinite()).all():
            raise InputError(
                f"the usage of {name} is not finite; the weights are of a training that diverged"
            )
        return Usage(sizes.cpu(), shares.cpu())


@torch.no_grad()
def prune(
    model: Model,
    usage: Mapping[str, Usage],
    num_qkv_param_tokens: int | None = None,
    num_proj_param_tokens: int | None = None,
    num_ffn_param_tokens: int | None = None,
    adapt_tau: bool = True,
) -> Model:
    """Take the least used pairs of every layer away, in place.

    A pair that stays has the weight h/r, of which r, a function of (Σ hᵖ)/τᵖ over all pairs (of
    Aᵖ for ``gelu_l2``), becomes smaller with them. τ follows the sum, so that r stays what it was:
    τ'ᵖ = τᵖ · E[Σ_kept hᵖ / Σ_all hᵖ], measured as the sum of the kept pairs' shares. eps, which
    is relative to τ, stays in proportion. For an input token whose own ratio is the mean one, the
    output then differs by what the lost pairs added, and by nothing else. With τ kept, the weights
    of the others would grow instead.

    Args:
        model: Any module with TokenFormer blocks. Its Pattention parameters are new objects
            afterwards: build optimisers after this; a step of an older one raises InputError.
        usage: What :func:`measure_usage` returned for this model.
        num_qkv_param_tokens: Pairs that stay of each query, key and value projection; None leaves
            them as they are.
        num_proj_param_tokens: So of the output projections.
        num_ffn_param_tokens: So of the feed-forward layers.
        adapt_tau: Let τ follow, as above; False keeps it.

    Returns:
        ``model``; the pairs that stayed are in their order, held in one parameter.

    Raises:
        InputError: If a count is not between 1 and the present one, the usage is of another
            model, or ``model`` is a part of a model whose other blocks would keep their counts.

    Source:
        This project's; the measure is the mean output norm, as for neurons in arXiv:1611.06440,
        Section 2.2, with the length of a vector in place of an activation.
    """
    counts = {
        "qkv": num_qkv_param_tokens,
        "proj": num_proj_param_tokens,
        "ffn": num_ffn_param_tokens,
    }
    layers = pattention_layers(model)
    check_rebuildable(model, layers)
    kept: dict[str, Tensor] = {}
    for name, layer in layers.items():
        have, wanted = layer.num_param_tokens, counts[kind_of(name)]
        if name not in usage or len(usage[name].sizes) != have:
            raise InputError(
                f"the usage was measured on another model: of {name} with its {have} pairs it has "
                + (f"{len(usage[name].sizes)}" if name in usage else "nothing")
            )
        if wanted is None or wanted == have:
            continue
        if not 1 <= wanted < have:
            raise InputError(
                f"{name} has {have} pairs and cannot be pruned to {wanted}"
                + ("; tokenformer_vit.growth.grow() adds pairs" if wanted > have else "")
            )
        order = usage[name].sizes.sort(descending=True, stable=True).indices
        kept[name] = order[:wanted].sort().values
    for name, index in kept.items():
        write_tokens(layers[name], _keep(layers[name], usage[name], index, adapt_tau))
    record_counts(model)
    return model


def _keep(layer: Pattention, usage: Usage, index: Tensor, adapt_tau: bool) -> LayerTokens:
    tokens = read_tokens(layer)
    here = index.to(tokens.keys.device)
    tau = tokens.tau
    share = usage.shares[index].sum().item()
    if adapt_tau and share > 0:  # pairs with keys of zero have none, and need no τ
        tau = tau.double() * share ** (1 / find_theta(layer.theta).norm_order)
    gate = None if tokens.gate is None else tokens.gate[here]
    return LayerTokens(tokens.keys[here], tokens.values[here], tau, gate)
