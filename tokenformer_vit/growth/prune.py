"""Find and remove the pairs that add little to a layer's output."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.ops import find_theta, norm_shares

from .tokens import (
    LayerTokens,
    check_rebuildable,
    check_unmasked,
    check_unsharded,
    counts_by_layer,
    pattention_layers,
    read_tokens,
    record_counts,
    trained_later,
    use_all_pairs,
    write_tokens,
)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Usage:
    """Mean usage of each pair of a layer over input tokens; float64, on the CPU.

    Args:
        sizes: (P,) mean of |weight| · ‖value‖₂: the length of the vector that a pair adds to an
            output token.
        shares: (P,) mean share of a pair in the sum of p-th powers in Θ's divisor; the shares sum
            to 1. p is ``norm_order`` in ``ops.theta``.
    """

    sizes: Tensor
    shares: Tensor

    @property
    def order(self) -> Tensor:
        """(P,) numbers of the pairs, most used first."""
        return self.sizes.sort(descending=True, stable=True).indices


@torch.no_grad()
def measure_usage(model: nn.Module, batches: Iterable[Any]) -> dict[str, Usage]:
    """Measure how much each pair of a model adds to the outputs of its layer.

    Args:
        model: Any module with TokenFormer blocks. It runs in evaluation mode; its mode is restored
            afterwards.
        batches: Input tensors, or tuples whose first entry is one, as from a data loader. Use
            training data, because pruning is a choice that must not see test data. Batches are
            moved to the model's device.

    Returns:
        The usage of each Pattention layer by name, averaged over all input tokens of all batches.
        A compiled model is measured without its compiled code, which would leave out the hooks.

    Raises:
        InputError: If there is no batch, a mask is active, a size is set, a weight is not finite,
            a batch is no tensor, or the model is sharded.

    Note:
        Weights are computed in float32 (float64 for a float64 model) and sums in float64. The
        inputs of layers are computed under the caller's autocast, if any.
    """
    if isinstance(batches, Tensor):  # would be taken for a list of single images
        raise InputError("batches is one tensor: give a list of batches, such as [images]")
    layers = pattention_layers(model)
    check_unmasked(layers)
    check_unsharded(model)
    for name, layer in layers.items():
        if layer.size is not None:
            raise InputError(
                f"{name} uses only {layer.size} of its pairs; call model.set_size(None) to use all"
            )
    sums = {name: _Sums(layer) for name, layer in layers.items()}
    device = next(model.parameters()).device
    in_training = [module for module in model.modules() if module.training]
    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(sums[name].add))
        stack.callback(lambda: [setattr(module, "training", True) for module in in_training])
        model.eval()
        for batch in batches:
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            if not isinstance(inputs, Tensor):
                raise InputError(
                    f"a batch is a {type(batch).__name__}: give tensors, or tuples that begin with "
                    "one"
                )
            model(inputs.to(device))
    return {name: each.usage(name) for name, each in sums.items()}


class _Sums:
    """Sums over input tokens for the usage of a layer."""

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
            raise InputError(
                f"cannot measure the usage of {name} without a batch; give at least one"
            )
        sizes, shares = self.weights * self.lengths / self.count, self.shares / self.shares.sum()
        if not (sizes.isfinite() & shares.isfinite()).all():
            raise InputError(
                f"the usage of {name} is not finite: training diverged; use an earlier checkpoint"
            )
        return Usage(sizes.cpu(), shares.cpu())


@trained_later
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

    The weight of a pair is h/r. The divisor r depends on (Σ hᵖ)/τᵖ over all pairs (Aᵖ instead of hᵖ
    for ``gelu_l2``), and becomes smaller when pairs are removed. To keep r, τ is reduced with the
    sum: τ'ᵖ = τᵖ · E[Σ_kept hᵖ / Σ_all hᵖ], where the mean is the sum of the kept pairs' shares.
    eps is relative to τ and stays in proportion. For an input token with the mean ratio, the output
    then changes only by the contribution of the removed pairs. Without this, the weights of the
    other pairs would grow.

    Args:
        model: Any module with TokenFormer blocks. Its Pattention parameters become new objects:
            build optimizers afterwards. A step of an older optimizer raises InputError. A nested
            model becomes an ordinary one, because its first pairs do not stay together. Masks are
            reset.
        usage: Usage that :func:`measure_usage` returned for this model.
        num_qkv_param_tokens: Number of pairs to keep in each query, key and value projection; None
            keeps all. A list has a number for each block.
        num_proj_param_tokens: Number of pairs to keep in each output projection.
        num_ffn_param_tokens: Number of pairs to keep in each feed-forward layer.
        adapt_tau: Whether to adapt τ as above.

    Returns:
        ``model``. The kept pairs are in their old order, in one parameter.

    Raises:
        InputError: If a count is not between 1 and the present one, a list does not have one for
            each block, the usage is of another model, or ``model`` is only a part of a model, whose
            other blocks would keep their counts.

    Source:
        This project. The measure is the mean output norm of arXiv:1611.06440, Section 2.2, with the
        length of a vector instead of an activation.
    """
    layers = pattention_layers(model)
    check_rebuildable(model, layers)
    counts = counts_by_layer(
        layers,
        num_qkv_param_tokens=num_qkv_param_tokens,
        num_proj_param_tokens=num_proj_param_tokens,
        num_ffn_param_tokens=num_ffn_param_tokens,
    )
    check_usage(layers, usage)
    kept: dict[str, Tensor] = {}
    for name, layer in layers.items():
        have, wanted = layer.num_param_tokens, counts[name]
        if wanted is None or wanted == have:
            continue
        if not 1 <= wanted < have:
            remedy = "keep at least 1"
            if wanted > have:
                remedy = "to add pairs, use tokenformer_vit.growth.grow()"
            raise InputError(f"{name} has {have} pairs and cannot be pruned to {wanted}; {remedy}")
        kept[name] = kept_pairs(usage[name], wanted)
    if kept:
        use_all_pairs(layers.values())
        for layer in layers.values():
            layer.set_nested(())
    for name, index in kept.items():
        write_tokens(layers[name], _keep(layers[name], usage[name], index, adapt_tau))
    record_counts(model)
    return model


def check_usage(layers: Mapping[str, Pattention], usage: Mapping[str, Usage]) -> None:
    """Check that a usage has all pairs of a model.

    Raises:
        InputError: If it was measured on another model.
    """
    for name, layer in layers.items():
        have = layer.num_param_tokens
        if name not in usage or len(usage[name].sizes) != have:
            raise InputError(
                f"the usage was measured on another model: {name} has {have} pairs, the usage has "
                + (f"{len(usage[name].sizes)}" if name in usage else "none")
                + "; measure it again"
            )


def kept_pairs(usage: Usage, count: int) -> Tensor:
    """Return the numbers of the most used pairs of a layer, in increasing order."""
    return usage.order[:count].sort().values


def adapted_tau(layer: Pattention, share: float) -> Tensor:
    """Return τ for a layer that keeps pairs with this share; see :func:`prune`."""
    if share > 0:  # pairs with zero keys have no share and need no τ
        return layer.tau.detach().double() * share ** (1 / find_theta(layer.theta).norm_order)
    return layer.tau.detach()


def _keep(layer: Pattention, usage: Usage, index: Tensor, adapt_tau: bool) -> LayerTokens:
    tokens = read_tokens(layer)
    here = index.to(tokens.keys.device)
    tau = adapted_tau(layer, usage.shares[index].sum().item()) if adapt_tau else tokens.tau
    gate = None if tokens.gate is None else tokens.gate[here]
    return LayerTokens(tokens.keys[here], tokens.values[here], tau, gate)
