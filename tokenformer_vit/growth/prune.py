"""Fewer pairs: those that add most to the output, the first ones, or chosen ones for a while."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.models.sizes import check_not_recomputed, model_sizes, nest_layers, set_size
from tokenformer_vit.ops import find_theta, norm_shares

from .grow import common_share
from .resize import (
    Model,
    counts_to_keep,
    pattention_layers,
    refresh_configs,
    select_pairs,
    unwrapped_layers,
    write_states,
)


@dataclass(frozen=True)
class Usage:
    """Mean usage of each pair of a layer over input tokens; float64, on the CPU.

    Args:
        sizes: (P,) mean of |weight| · ‖value‖₂, the length of what a pair adds to an output token.
        shares: (P,) mean share of a pair in the sum in Θ's divisor; they sum to 1, or are all 0.
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
        model: Any module with Pattention layers. A copy of it runs in evaluation mode.
        batches: Input tensors, tuples that begin with one, or dicts of keyword arguments, in which
            tokens with an ``attention_mask`` of 0 do not count. No test data: pruning is a choice.

    Returns:
        The usage of each Pattention layer by name, averaged over all input tokens in float64.

    Raises:
        InputError: If there is no batch, not all pairs are in use, or a weight is not finite.
    """
    layers = unwrapped_layers(model)
    for name, layer in layers.items():
        if layer.num_used != layer.num_param_tokens:
            raise InputError(
                f"{name} uses only {layer.num_used} of its pairs; call model.set_size(None), and "
                "leave use_pairs()"
            )
    model = copy.deepcopy(model).eval()
    layers = pattention_layers(model)
    # The number of tokens, and the sums of the weights and shares of each pair.
    tokens = Counter[nn.Module]()
    sums = {each: each.tau.new_zeros(2, each.num_param_tokens).double() for each in layers.values()}
    mask: Tensor | None = None

    def add(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)  # (R, C_in)
        x = x if mask is None else x[mask.flatten() != 0]
        scores, weights = layer.scores_and_weights(x)  # (R, P)
        both = weights.abs(), norm_shares(scores, weights, layer.theta)
        sums[layer] += torch.stack([each.sum(dim=0, dtype=torch.float64) for each in both])
        tokens[layer] += len(x)

    for layer in sums:
        layer.register_forward_pre_hook(add)
    with torch.compiler.set_stance("force_eager"):  # compiled code would leave out the hooks
        for args, kwargs in model_calls(model, batches):
            mask = kwargs.get("attention_mask")
            model(*args, **kwargs)
    usage = {}
    for name, layer in layers.items():
        lengths = layer.used_tokens()[1].double().norm(dim=-1)  # (P,)
        weights, shares = sums[layer]
        sizes, shares = weights * lengths / tokens[layer], shares / (shares.sum() or 1.0)
        if not (sizes.isfinite() & shares.isfinite()).all():
            raise InputError(
                f"the usage of {name} is not finite: give at least one batch, or an earlier "
                "checkpoint if training diverged"
            )
        usage[name] = Usage(sizes.cpu(), shares.cpu())
    return usage


def model_calls(
    model: nn.Module, batches: Iterable[Any]
) -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
    """Yield a model's arguments for each of the batches that :func:`measure_usage` takes."""
    if isinstance(batches, Tensor):  # would be taken for a list of single images
        raise InputError("batches is one tensor: give a list of batches, such as [images]")
    device = next(model.parameters()).device
    for batch in batches:
        if isinstance(batch, Mapping):
            yield [], {name: tensor.to(device) for name, tensor in batch.items()}
        else:
            first = batch[0] if isinstance(batch, tuple | list) else batch
            yield [first.to(device)], {}


@torch.no_grad()
def prune(
    model: Model,
    usage: Mapping[str, Usage],
    num_qkv_param_tokens: Counts | Mapping[str, Counts] = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
    adapt_tau: bool = True,
) -> Model:
    """Remove the least used pairs of every layer, in place.

    Θ divides by a norm over all pairs, relative to τ, which becomes smaller when pairs are removed.
    To keep the weights of the other pairs, τ is reduced with it; the README has the formula.

    Args:
        model: Any module with Pattention layers; masks, and nested sizes if pairs go, are reset.
        usage: Usage that :func:`measure_usage` returned for this model.
        num_qkv_param_tokens: Number of pairs to keep in each query, key and value projection, or a
            list with one for each block, or a dict, as in :func:`grow`; None keeps all.
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.
        adapt_tau: Whether to reduce τ.

    Returns:
        ``model``, with the kept pairs in their old order. Build optimizers anew.
    """
    layers = unwrapped_layers(model)
    counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
    wanted = counts_to_keep(layers, *counts)
    check_usage(layers, usage)
    states = {}
    for name, layer in layers.items():
        kept = wanted.get(name, layer.num_param_tokens)
        states[name] = select_pairs(layer, usage[name].order[:kept].sort().values)
        if adapt_tau and kept < layer.num_param_tokens:
            states[name] = states[name]._replace(tau=adapted_tau(layer, usage[name], kept))
    if any(state.num < layers[name].num_param_tokens for name, state in states.items()):
        write_states(model, states)
    return model


def check_usage(layers: Mapping[str, Pattention], usage: Mapping[str, Usage]) -> None:
    """Check that a usage has a number for each pair of these layers."""
    for name, layer in layers.items():
        if name not in usage or len(usage[name].sizes) != layer.num_param_tokens:
            raise InputError(
                f"the usage of {name} was measured on another model or on other pairs; measure it "
                "again"
            )


def adapted_tau(layer: Pattention, usage: Usage, count: int) -> Tensor:
    """Return τ for a layer that keeps its most used pairs; see :func:`prune`."""
    share = usage.shares[usage.order[:count]].sum().item()
    order = find_theta(layer.theta).norm_order
    # Pairs with zero keys have no share and need no τ, as all pairs without a norm.
    return layer.tau_at(1.0).detach().double() * (share ** (1 / order) if order and share else 1.0)


@torch.no_grad()
def extract(
    model: Model,
    size: float | None = None,
    num_qkv_param_tokens: Counts | Mapping[str, Counts] = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
) -> Model:
    """Copy the first pairs of layers into a new model.

    Args:
        model: Any module with Pattention layers; it does not change.
        size: Size, as for ``model.set_size``, whether it was trained or not; or None, and instead
        num_qkv_param_tokens: Number of pairs to copy in each query, key and value projection, as in
            :func:`grow`; None for all.
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.

    Returns:
        A model with the outputs of this size, on a CPU bit for bit. Of a size, it keeps the smaller
        trained sizes that are a share of its pairs.
    """
    if any(layer.active is not None for layer in unwrapped_layers(model).values()):
        raise InputError("a mask is in use: extract outside of use_pairs()")
    smaller = copy.deepcopy(model)
    layers, kept = pattention_layers(smaller), {}
    if size is None:
        counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
        wanted = counts_to_keep(layers, *counts)
        shares = dict.fromkeys(layers, 1.0)
        shares |= {name: n / layers[name].num_param_tokens for name, n in wanted.items()}
    else:
        set_size(smaller, size)
        shares = {name: layer.size for name, layer in layers.items()}
        sized = [layer for layer in layers.values() if layer.sized]
        for own in model_sizes(smaller)[:-1]:
            share = common_share((each.count_at(own), each.count_at(size)) for each in sized)
            if own < size and share not in (None, 1, *kept):
                kept[share] = own
    states = {}
    for name, layer in layers.items():
        state = select_pairs(layer, slice(layer.count_at(shares[name])))
        state = state._replace(tau=layer.tau_at(shares[name]))
        if kept and layer.sized:
            taus = torch.stack([*(layer.tau_at(own) for own in kept.values()), state.tau])
            state = state._replace(nested=tuple(kept), tau=taus)
        states[name] = state
    write_states(smaller, states)
    return smaller


@torch.no_grad()
def reorder(model: Model, usage: Mapping[str, Usage]) -> Model:
    """Sort the pairs of every layer by their :class:`Usage`, most used first, in place.

    Outputs stay up to rounding. The model is not nested afterwards; build optimizers anew.
    """
    layers = unwrapped_layers(model)
    check_usage(layers, usage)
    states = {name: select_pairs(layer, usage[name].order) for name, layer in layers.items()}
    write_states(model, states)
    return model


@torch.no_grad()
def nest(
    model: Model,
    sizes: Sequence[float],
    usage: Mapping[str, Usage] | None = None,
    kinds: Sequence[str] | None = None,
) -> Model:
    """Give a trained model nested sizes, in place; train it afterwards at these sizes.

    Args:
        model: Any module with Pattention layers. Its outputs stay; build optimizers anew.
        sizes: Shares, as for ``model.set_size``. Empty for an ordinary model.
        usage: Usage by which :func:`reorder` has sorted the pairs, to adapt τ of the sizes as
            :func:`prune` does. None keeps what the sizes compute now.
        kinds: Kinds of layers that have sizes, such as ``["ffn"]``; None for all.
    """
    layers = unwrapped_layers(model)
    if usage is not None:
        check_usage(layers, usage)
    nest_layers(model, sizes, kinds)
    for name, layer in layers.items():
        if usage is not None:
            taus = [adapted_tau(layer, usage[name], layer.count_at(own)) for own in layer.nested]
            layer.set_nested(layer.nested, taus)
    refresh_configs(model)
    return model


@contextmanager
def use_pairs(model: nn.Module, pairs: Mapping[str, Any]) -> Iterator[None]:
    """Use only these pairs of layers within a ``with`` block, and those of before after it.

    The other pairs are as if removed, but τ stays. They get zero gradients; an optimizer's momentum
    and weight decay still change them, so freeze what must not change. Not thread-safe.

    Args:
        model: Any module with Pattention layers.
        pairs: What indexes the pairs of a layer, by the full name of the layer: a slice, integers,
            or a boolean tensor (P,). Layers that are not named use all pairs.
    """
    check_not_recomputed(model)
    layers, active = pattention_layers(model), {}
    for name, chosen in pairs.items():
        if name not in layers:
            raise InputError(f"{name!r} is no Pattention layer; give names of pattention_layers()")
        if layers[name].size != 1:
            raise InputError(f"{name} uses a size: call set_size(None) before you choose pairs")
        count, device = layers[name].num_param_tokens, layers[name].key_param_tokens.device
        active[name] = torch.arange(count, device="cpu")[chosen].unique().to(device)
        if not len(active[name]):
            raise InputError(f"no pair of {name} is chosen: give at least one of its {count}")
    before = {layer: layer.active for layer in layers.values()}
    for name, layer in layers.items():
        layer.active = active.get(name)
    try:
        yield
    finally:
        for layer, indices in before.items():
            layer.active = indices
