"""Fewer pairs, the same function as nearly as possible: the values that stay are fitted anew.

The output of a layer is linear in its values, so least squares on unlabelled inputs gives them.
After SnapViT, arXiv:2510.17700, GRAIL, arXiv:2602.23795, and SVD-LLM, arXiv:2403.07378.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.ops import find_theta, norm_shares

from .prune import model_calls
from .resize import LayerState, Model, counts_to_keep, select_pairs, unwrapped_layers, write_states

RIDGE = 1e-3  # towards the old values, relative to the mean diagonal of the Gram matrix
REPEATS = 3  # of the ridge, each towards the result before: it rules only what inputs hardly show
LEAST_SCALE = 1e-3  # of LayerScale: smaller outputs cannot repair anything
CHUNK = 4096  # tokens that are added up at a time


@torch.no_grad()
def refit(
    model: Model,
    batches: Iterable[Any],
    num_qkv_param_tokens: Counts | Mapping[str, Counts] = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
) -> Model:
    """Remove the pairs that the others can best replace, and fit their values to do so, in place.

    Layers are cut in the order in which they compute, on what the smaller model gives them. The
    output projection and the feed-forward layer of a block also repair what was lost before them.

    Args:
        model: Any module with Pattention layers; masks and nested sizes are reset.
        batches: Inputs without labels, a few hundred images or texts of one length, as for
            :func:`~tokenformer_vit.growth.measure_usage`. They run as one batch, twice.
        num_qkv_param_tokens: Number of pairs to keep in each query, key and value projection, or a
            list or dict, as in :func:`grow`. These layers are fitted even if no pair goes; None
            leaves them as they are. Linear tokens keep at most min(C_in, C_out).
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.

    Returns:
        ``model``, most important pairs first. Interrupted, it is as before. Build optimizers anew.
    """
    layers = unwrapped_layers(model)
    counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
    wanted = counts_to_keep(layers, *counts)
    fitted = {name: each.smaller for name, each in _fit(model, batches, wanted).items()}
    states = {n: select_pairs(each, slice(None)) for n, each in {**layers, **fitted}.items()}
    write_states(model, states)
    for name, each in fitted.items():
        if (bias := layers[name].bias) is not None:
            bias.copy_(each.bias)
    return model


@torch.no_grad()
def removal_costs(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return (P,) float64 by layer: what is lost with each pair, all before it kept and fitted.

    In the order of :func:`refit`. The first p pairs alone have the sum from p as the mean squared
    error of an output token, times LayerScale.
    """
    counts = {name: each.num_param_tokens for name, each in unwrapped_layers(model).items()}
    return {name: each.costs for name, each in _fit(model, batches, counts).items()}


class _Done(Exception):
    """All layers are fitted."""


def _fit(model: nn.Module, batches: Iterable[Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Run a copy of a model in which each layer is fitted when it computes."""
    both = copy.deepcopy(model).eval()
    write_states(both, {})  # resets masks and sizes
    calls = [*model_calls(both, batches)] * 2
    if not calls:
        raise InputError("there is no batch: give at least one")
    args, named = zip(*calls, strict=True)
    inputs = [torch.cat(each) for each in zip(*args, strict=True)]
    kwargs = {name: torch.cat([each[name] for each in named]) for name in named[0]}
    layers, mask = unwrapped_layers(both), kwargs.get("attention_mask")
    with tqdm(total=len(counts), desc="refit", unit="layer", disable=None) as bar:
        left, twins = set(counts), {}
        for name, count in counts.items():
            twins[name] = _Twin(name, layers[name], count, mask, bar, left)
            both.set_submodule(name, twins[name])
        for block in (each for each in both.modules() if isinstance(each, TokenFormerBlock)):
            attn = block.norm1, block.attn.proj, block.ls1
            for norm, twin, scale in (attn, (block.norm2, block.mlp, block.ls2)):
                if isinstance(twin, _Twin):
                    twin.scale = getattr(scale, "gamma", twin.scale)
                    norm.register_forward_pre_hook(twin.compare_streams)
        with suppress(_Done), torch.compiler.set_stance("force_eager"):
            both(*inputs, **kwargs)
    if left:
        raise InputError(f"the model does not call {', '.join(sorted(left))}: leave them out")
    return twins


class _Twin(nn.Module):
    """In place of a layer, for inputs of the whole model and as many of the smaller one."""

    def __init__(self, name: str, layer: Pattention, count: int, *shared: Any) -> None:
        super().__init__()
        self.name, self.layer, self.count = name, layer, count
        self.mask, self.bar, self.left = shared
        self.smaller, self.costs = layer, torch.empty(0)
        self.scale, self.lost = torch.ones_like(layer.value_param_tokens[0]), torch.zeros(())

    def compare_streams(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Note what the stream to which the layer adds has lost before it."""
        whole, smaller = inputs[0].chunk(2)
        self.lost = ((whole - smaller) / self.scale).where(self.scale.abs() >= LEAST_SCALE, 0)

    def forward(self, x: Tensor) -> Tensor:
        whole, smaller = x.chunk(2)
        wanted = self.layer(whole)
        if len(self.left) == self.bar.total and not torch.allclose(whole, smaller):
            raise InputError("the batch is not the first dimension of a layer's inputs")
        if self.name in self.left:
            kept = slice(None) if self.mask is None else self.mask.chunk(2)[0].flatten() != 0
            self.fit(*(each.flatten(0, -2)[kept] for each in (smaller, wanted + self.lost)))
            self.bar.update()
            self.left.remove(self.name)
            if not self.left:
                raise _Done
        return torch.cat((wanted, self.smaller(smaller)))

    def fit(self, x: Tensor, wanted: Tensor) -> None:
        """Choose the pairs to keep, and fit their values to (R, C_out) rows that are wanted."""
        (state, found), layer = self.ranked(x, wanted), copy.deepcopy(self.layer)
        kept, tau = slice(self.count), state.tau
        write_states(layer, {"": state})
        if order := find_theta(layer.theta).norm_order:  # as `prune` adapts τ
            rows = x[:: 1 + len(x) // CHUNK]  # enough for a mean
            shares = norm_shares(*layer.scores_and_weights(rows), layer.theta).sum(dim=0)
            share = shares[kept].sum() / shares.sum()  # NaN if all keys are zero
            tau = tau * share.where(share > 0, 1.0) ** (1 / order)
        write_states(layer, {"": select_pairs(layer, kept)._replace(tau=tau)})
        if order:  # each weight depends on what is kept
            found = moments(layer.weights, x, wanted, centred=False)
        gram, product, mean, target = found
        values = solve(gram[kept, kept], product[kept], layer.value_param_tokens)
        layer.value_param_tokens.copy_(values)
        if layer.bias is not None:
            layer.bias.copy_(target - mean[kept] @ values)
        self.smaller, self.lost = layer, torch.zeros(())

    def ranked(self, x: Tensor, wanted: Tensor) -> tuple[LayerState, Sequence[Tensor]]:
        """Return all pairs, most important first, and their moments; note what each is worth."""
        layer, is_linear = self.layer, self.layer.theta == "linear"
        features = nn.Identity() if is_linear else layer.weights
        gram, product, mean, target = moments(features, x, wanted, centred=layer.bias is not None)
        scale = self.scale.double().abs().clamp(min=LEAST_SCALE)
        if not is_linear:
            order, self.costs = removal_order(gram, product * scale)
            found = gram[order][:, order], product[order], mean[order], target
            return select_pairs(layer, order), found
        # The matrix is fitted, and written as tokens for outputs times the scale.
        linear = layer.as_linear()
        linear.weight.copy_((solve(gram, product, linear.weight.t()) * scale).t())
        keys, values = Pattention.from_linear(linear, gram).used_tokens()[:2]
        rows = {"key_param_tokens": keys, "value_param_tokens": (values / scale).to(keys)}
        keys = keys.double()
        gram = keys @ gram @ keys.t()  # of the scores, in place of the inputs
        self.costs = (gram.diagonal() * values.square().sum(dim=1))[: layer.num_param_tokens]
        return LayerState(rows, layer.tau_at(1.0)), (gram, keys @ product, keys @ mean, target)


def moments(
    features: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
