"""Find and remove the pairs that add little to a layer's output."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.ops import find_theta, norm_shares

from .resize import (
    LayerTokens,
    counts_by_layer,
    read_tokens,
    record_counts,
    whole_layers,
    write_tokens,
)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Usage:
    """Mean usage of each pair of a layer over input tokens; float64, on the CPU.

    Args:
        sizes: (P,) mean of |weight| · ‖value‖₂: the length of the vector that a pair adds to an
            output token.
        shares: (P,) mean share of a pair in the sum in Θ's divisor; the shares sum to 1.
        lengths: (P,) ‖value‖₂ of each pair, to recognize the layer; None for any layer.
    """

    sizes: Tensor
    shares: Tensor
    lengths: Tensor | None = None

    @property
    def order(self) -> Tensor:
        """(P,) numbers of the pairs, most used first."""
        return self.sizes.sort(descending=True, stable=True).indices


@torch.no_grad()
def measure_usage(model: nn.Module, batches: Iterable[Any]) -> dict[str, Usage]:
    """Measure how much each pair of a model adds to the outputs of its layer.

    Args:
        model: Any module with TokenFormer blocks. It runs in evaluation mode.
        batches: Input tensors, tuples that begin with one, or dicts of keyword arguments, in which
            tokens with an ``attention_mask`` of 0 do not count. Use training data, because pruning
            is a choice that must not see test data.

    Returns:
        The usage of each Pattention layer by name, averaged over all input tokens. It is computed
        in float32 (float64 for a float64 model), and summed in float64.

    Raises:
        InputError: If there is no batch, a mask is active, a size is set, or a weight is not
            finite.
    """
    if isinstance(batches, Tensor):  # would be taken for a list of single images
        raise InputError("batches is one tensor: give a list of batches, such as [images]")
    layers = whole_layers(model)
    for name, layer in layers.items():
        if layer.num_used != layer.num_param_tokens:
            raise InputError(
                f"{name} uses only {layer.num_used} of its pairs; call TokenMasks.activate() and "
                "model.set_size(None) to use all"
            )
    sums = {layer: _Sums(layer) for layer in layers.values()}
    mask: Tensor | None = None

    def add(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)  # (R, C_in)
        sums[layer].add(layer, x if mask is None else x[mask.flatten() != 0])

    device = next(model.parameters()).device
    in_training = [module for module in model.modules() if module.training]
    # Compiled code would leave out the hooks.
    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for layer in sums:
            stack.enter_context(layer.register_forward_pre_hook(add))
        stack.callback(lambda: [setattr(module, "training", True) for module in in_training])
        model.eval()
        for batch in batches:
            if isinstance(batch, Mapping):
                given = {name: tensor.to(device) for name, tensor in batch.items()}
                mask = given.get("attention_mask")  # (B, N)
                model(**given)
            else:
                model((batch[0] if isinstance(batch, tuple | list) else batch).to(device))
    return {name: sums[layer].usage(name) for name, layer in layers.items()}


class _Sums:
    """Sums over input tokens for the usage of a layer."""

    def __init__(self, layer: Pattention) -> None:
        self.lengths = _lengths(layer)
        self.count = 0
        self.weights, self.shares = self.lengths.new_zeros(2, len(self.lengths))

    def add(self, layer: Pattention, x: Tensor) -> None:
        scores, weights = layer.scores_and_weights(x)  # (R, P)
        shares = norm_shares(scores, weights, layer.theta)
        self.count += len(x)
        self.weights += weights.abs().sum(dim=0, dtype=torch.float64)
        self.shares += shares.sum(dim=0, dtype=torch.float64)

    def usage(self, name: str) -> Usage:
        if not self.count:
            raise InputError(f"the usage of {name} needs a batch; give at least one")
        sizes, shares = self.weights * self.lengths / self.count, self.shares / self.shares.sum()
        if not (sizes.isfinite() & shares.isfinite()).all():
            raise InputError(
                f"the usage of {name} is not finite: training diverged; use an earlier checkpoint"
            )
        return Usage(sizes.cpu(), shares.cpu(), self.lengths.cpu())


def _lengths(layer: Pattention) -> Tensor:
    return layer.value_param_tokens.detach().double().norm(dim=-1)  # (P,)


@torch.no_grad()
def prune(
    model: Model,
    usage: Mapping[str, Usage],
    num_qkv_param_tokens: Counts = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
    adapt_tau: bool = True,
) -> Model:
    """Remove the least used pairs of every layer, in place.

    The divisor r in the weight h/r of a pair depends on (Σ hᵖ)/τᵖ over all pairs (Aᵖ instead of hᵖ
    for ``gelu_l2``), and becomes smaller when pairs are removed. To keep r, τ is reduced with the
    sum: τ'ᵖ = τᵖ · E[Σ_kept hᵖ / Σ_all hᵖ], where the mean is the sum of the kept pairs' shares.
    Without this, the weights of the other pairs would grow.

    Args:
        model: Any module with TokenFormer blocks. Build optimizers afterwards. Masks are reset, and
            a nested model becomes an ordinary one.
        usage: Usage that :func:`measure_usage` returned for this model.
        num_qkv_param_tokens: Number of pairs to keep in each query, key and value projection, or a
            list with one for each block; None keeps all.
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.
        adapt_tau: Whether to adapt τ as above.

    Returns:
        ``model``. The kept pairs are in their old order.

    Raises:
        InputError: If a count is not between 1 and the present one, or the usage is of another
            model.

    Source:
        This project. The measure is the mean output norm of arXiv:1611.06440, Section 2.2, with the
        length of a vector instead of an activation.
    """
    layers = whole_layers(model)
    counts = counts_by_layer(
        layers,
        num_qkv_param_tokens=num_qkv_param_tokens,
        num_proj_param_tokens=num_proj_param_tokens,
        num_ffn_param_tokens=num_ffn_param_tokens,
    )
    check_usage(layers, usage)
    tokens = {}
    for name, layer in layers.items():
        have = layer.num_param_tokens
        wanted: Any = have if counts[name] is None else counts[name]
        if not 1 <= wanted <= have:
            remedy = "to add pairs, use grow()" if wanted > have else "keep at least 1"
            raise InputError(f"{name} has {have} pairs and cannot be pruned to {wanted}; {remedy}")
        tokens[name] = select_pairs(layer, kept_pairs(usage[name], wanted))
        if adapt_tau and wanted < have:
            tau = adapted_tau(layer, usage[name], wanted)
            tokens[name] = replace(tokens[name], tau=tau)
    if any(own.num < layers[name].num_param_tokens for name, own in tokens.items()):
        write_tokens(layers, tokens)
        record_counts(model)
    return model


def check_usage(
    layers: Mapping[str, Pattention], usage: Mapping[str, Usage], reordered: bool = False
) -> None:
    """Check that a usage was measured on these layers; ``reorder`` may have sorted them since."""
    for name, layer in layers.items():
        have, own = layer.num_param_tokens, usage.get(name)
        if own is None or len(own.sizes) != have:
            raise InputError(
                f"the usage was measured on another model: {name} has {have} pairs, the usage has "
                f"{'none' if own is None else len(own.sizes)}; measure it again"
            )
        lengths = own.lengths if own.lengths is None or not reordered else own.lengths[own.order]
        if lengths is not None and not torch.allclose(lengths, _lengths(layer).cpu(), rtol=1e-3):
            raise InputError(
                f"the usage of {name} was measured on other pairs, or in another order; measure it "
                "again, and reorder before you nest"
            )


def kept_pairs(usage: Usage, count: int) -> Tensor:
    """Return the numbers of the most used pairs of a layer, in increasing order."""
    return usage.order[:count].sort().values


def adapted_tau(layer: Pattention, usage: Usage, count: int) -> Tensor:
    """Return τ for a layer that keeps its most used pairs; see :func:`prune`."""
    share = usage.shares[kept_pairs(usage, count)].sum().item()
    if share > 0:  # pairs with zero keys have no share and need no τ
        return layer.tau.detach().double() * share ** (1 / find_theta(layer.theta).norm_order)
    return layer.tau.detach()


def select_pairs(layer: Pattention, index: Tensor) -> LayerTokens:
    """Return the tensors of a layer with these pairs alone, without nested sizes."""
    own = read_tokens(layer)
    index = index.to(own.keys.device)
    gate = None if own.gate is None else own.gate[index]
    return LayerTokens(own.keys[index], own.values[index], own.tau, gate)
