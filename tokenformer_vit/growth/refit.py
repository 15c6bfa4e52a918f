"""Fewer pairs, the same function as nearly as possible: the values that stay are fitted anew.

The output of a layer is linear in its values. So when pairs go, least squares on unlabelled inputs
gives the values with which the others come closest to what the layer did, and what each pair is
worth. After SnapViT, arXiv:2510.17700, GRAIL, arXiv:2602.23795, and SVD-LLM, arXiv:2403.07378.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.ops import find_theta, norm_shares

from .prune import model_call
from .resize import LayerState, Model, counts_by_layer, read_state, unwrapped_layers, write_states

RIDGE = 1e-3  # towards the old values, relative to the mean diagonal of the Gram matrix
REPEATS = 3  # of the ridge, each towards the result before: it rules only what inputs hardly show
LEAST_SCALE = 1e-3  # of LayerScale: smaller outputs cannot repair anything
CHUNK = 4096  # tokens that a layer computes at a time

Rows = tuple[Tensor, ...]


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
            list or dict, as in :func:`grow`. These layers are fitted also if no pair goes; None
            leaves them as they are. Linear tokens keep at most min(C_in, C_out).
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.

    Returns:
        ``model``, most important pairs first. Interrupted, it is as before. Build optimizers anew.
    """
    layers = unwrapped_layers(model)
    counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
    wanted = counts_by_layer(layers, *counts)
    for name, count in wanted.items():
        if not 1 <= count <= (have := layers[name].num_param_tokens):
            raise InputError(f"{name} has {have} pairs and cannot be cut to {count}")
    fitted = _fit(model, batches, wanted)
    write_states(model, {name: read_state(each.smaller) for name, each in fitted.items()})
    for name, each in fitted.items():
        if (bias := layers[name].bias) is not None:
            bias.copy_(each.smaller.bias)  # type: ignore[arg-type]
    return model


@torch.no_grad()
def removal_costs(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Predict what is lost as the pairs of each layer go in the order of :func:`refit`.

    Returns:
        (P,) float64 by layer: the mean squared error of an output token, times LayerScale, that the
        loss of a pair adds when all before it are kept and fitted. Keeping p costs the sum from p.
    """
    counts = {name: each.num_param_tokens for name, each in unwrapped_layers(model).items()}
    return {name: each.costs for name, each in _fit(model, batches, counts).items()}


class _Done(Exception):
    """All layers are fitted."""


def _fit(model: nn.Module, batches: Iterable[Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Run a copy of a model in which each layer is fitted when it computes."""
    both = copy.deepcopy(model).eval()
    write_states(both, {})  # resets masks and sizes
    calls = [model_call(both, batch) for batch in batches]
    args = [torch.cat(2 * each) for each in zip(*(call.args for call in calls), strict=True)]
    kwargs = {n: torch.cat(2 * [call.kwargs[n] for call in calls]) for n in calls[0].kwargs}
    mask, layers = kwargs.get("attention_mask"), unwrapped_layers(both)
    with tqdm(total=len(counts), desc="refit", unit="layer", disable=None) as bar:
        twins = {name: _Twin(layers[name], count, mask, bar) for name, count in counts.items()}
        for name, twin in twins.items():
            both.set_submodule(name, twin)
        for block in (each for each in both.modules() if isinstance(each, TokenFormerBlock)):
            block.norm1.register_forward_pre_hook(_stream_of(block.attn.proj, block.ls1))
            block.norm2.register_forward_pre_hook(_stream_of(block.mlp, block.ls2))
        with suppress(_Done), torch.compiler.set_stance("force_eager"):
            both(*args, **kwargs)
    return twins


def _stream_of(layer: nn.Module, scale: Any) -> Callable[..., None]:
    """Return a hook that tells a layer what the stream to which it adds has lost before it."""

    def hook(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(layer, _Twin):
            whole, smaller = inputs[0].chunk(2)
            layer.scale = getattr(scale, "gamma", torch.ones_like(whole[0, 0]))
            layer.lost = (whole - smaller) / layer.scale
            layer.lost[..., layer.scale.abs() < LEAST_SCALE] = 0

    return hook


class _Twin(nn.Module):
    """In place of a layer, for inputs of the whole model and as many of the smaller one."""

    def __init__(self, layer: Pattention, count: int, mask: Tensor | None, bar: Any) -> None:
        super().__init__()
        self.layer, self.count, self.mask, self.bar = layer, count, mask, bar
        self.smaller, self.lost = layer, torch.zeros(())
        self.scale, self.costs = torch.ones(()), torch.empty(0)
        self.bias = int(layer.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        whole, smaller = x.chunk(2)
        wanted = _by_chunks(self.layer, whole)
        if self.smaller is self.layer:
            kept = slice(None) if self.mask is None else self.mask.chunk(2)[0].flatten() != 0
            rows = [each.flatten(0, -2)[kept] for each in (smaller, wanted + self.lost)]
            self.fit(*(each.split(CHUNK) for each in rows))
            self.bar.update()
            if self.bar.n == self.bar.total:
                raise _Done
        return torch.cat((wanted, _by_chunks(self.smaller, smaller)))

    def fit(self, inputs: Rows, wanted: Rows) -> None:
        """Choose the pairs to keep, and fit their values to what is wanted of the smaller layer."""
        layer, (state, self.costs) = copy.deepcopy(self.layer), self.ranked(inputs, wanted)
        tau = state.tau
        if order := find_theta(layer.theta).norm_order:  # as `prune` adapts it
            write_states(layer, {"": state})
            parts = [norm_shares(*layer.scores_and_weights(x), layer.theta) for x in inputs]
            shares: Any = sum(part.sum(dim=0, dtype=torch.float64) for part in parts)
            tau = tau * (shares[: self.count].sum() / shares.sum()) ** (1 / order)
        keys, values, score_bias = (None if t is None else t[: self.count] for t in state[:3])
        write_states(layer, {"": LayerState(keys, values, score_bias, tau)})
        gram, product = _moments(inputs, wanted, layer.weights, self.bias)
        values = _solve(gram, product, self.with_bias(values), self.bias)
        layer.value_param_tokens.copy_(values[self.bias :])
        if layer.bias is not None:
            layer.bias.copy_(values[0])
        self.smaller = layer

    def ranked(self, inputs: Rows, wanted: Rows) -> tuple[LayerState, Tensor]:
        """Return all pairs, most important first, and what the loss of each costs."""
        keys, values, score_bias, tau, _ = read_state(self.layer)
        scale, bias = self.scale.double().abs().clamp(min=LEAST_SCALE), self.bias
        if self.layer.theta == "linear":
            gram, product = _moments(inputs, wanted, lambda x: x, bias)
            old = self.with_bias(keys.double().t() @ values.double())
            weight = _solve(gram, product, old, bias)[bias:] * scale
            linear = nn.Linear(*weight.shape, bias=False).to(weight)
            linear.weight.copy_(weight.t())
            mean = gram[0, 1:] if bias else torch.zeros_like(gram[0])
            covariance = gram[bias:, bias:] - torch.outer(mean, mean)
            found = Pattention.from_linear(linear, covariance)
            keys, values = found.key_param_tokens, found.value_param_tokens
            costs = ((keys @ covariance) * keys).sum(dim=1) * values.square().sum(dim=1)
            dtype = self.layer.value_param_tokens.dtype
            return LayerState(keys.to(dtype), (values / scale).to(dtype), None, tau), costs
        gram, product = _moments(inputs, wanted, self.layer.weights, bias)
        inverse = _ridge(gram, bias)[1]
        order, costs = _remove_one_by_one(inverse @ product * scale, inverse, bias)
        score_bias = None if score_bias is None else score_bias[order]
        return LayerState(keys[order], values[order], score_bias, tau), costs

    def with_bias(self, values: Tensor) -> Tensor:
        """Return values in float64, after a row for the bias if there is one."""
        bias = self.layer.bias
        return (values if bias is None else torch.cat((bias[None], values))).double()


def _by_chunks(layer: nn.Module, x: Tensor) -> Tensor:
    rows = [layer(chunk) for chunk in x.flatten(0, -2).split(CHUNK)]
    return torch.cat(rows).unflatten(0, x.shape[:-1])


def _moments(inputs: Rows, wanted: Rows, features: Any, bias: int) -> tuple[Tensor, Tensor]:
    """Return the means of fᵀf (F, F) and fᵀt (F, C_out); a bias is a feature of 1 before others."""
    gram: Any = 0
    product: Any = 0
    for x, target in zip(inputs, wanted, strict=True):
        rows = F.pad(features(x).double(), (bias, 0), value=1.0)
        gram, product = gram + rows.t() @ rows, product + rows.t() @ target.double()
    tokens = sum(map(len, inputs))
    return gram / tokens, product / tokens


def _ridge(gram: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """Return the ridge (F, 1), none for the bias, and the inverse (F, F) of the sum."""
    ridge = RIDGE * gram.diagonal()[bias:].mean().expand(len(gram)).clone()
    ridge[:bias] = 0
    return ridge[:, None], torch.linalg.inv(
        gram + torch.diag(ridge + torch.finfo(ridge.dtype).tiny)
    )


def _solve(gram: Tensor, product: Tensor, values: Tensor, bias: int) -> Tensor:
    """Return the values (F, C_out) of least squares that are nearest to the old ones."""
    ridge, inverse = _ridge(gram, bias)
    for _ in range(REPEATS):
        values = inverse @ (product + ridge * values)
    return values


def _remove_one_by_one(fitted: Tensor, inverse: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """Remove the pair whose loss costs least, again and again; return the last first, and costs.

    The loss of a pair, all others fitted, costs ‖v‖² / (G⁻¹)ₚₚ: the optimal brain surgeon.
    """
    order, costs = torch.arange(len(fitted)).to(fitted.device), torch.zeros_like(inverse[0])
    for last in reversed(range(bias, len(fitted))):
        losses = fitted[bias : last + 1].square().sum(dim=1) / inverse.diagonal()[bias : last + 1]
        costs[last], pair = losses.min(dim=0)
        swap = torch.stack((pair + bias, torch.full_like(pair, last)))
        for each in (order, fitted, inverse, inverse.t()):
            each[swap] = each[swap.flip(0)]
        row, value = (each[last] / inverse[last, last].sqrt() for each in (inverse, fitted))
        fitted[:last].addr_(row[:last], value, alpha=-1)
        inverse[:last, :last].addr_(row[:last], row[:last], alpha=-1)
    return order[bias:] - bias, costs[bias:]
