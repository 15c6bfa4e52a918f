"""Fewer pairs, the same function as nearly as possible: the values that stay are fitted anew.

The output of a layer is linear in its values. So when pairs go, least squares on unlabelled inputs
gives the values with which the others come closest to what the layer did, and what each pair is
worth. After SnapViT, arXiv:2510.17700, GRAIL, arXiv:2602.23795, and SVD-LLM, arXiv:2403.07378.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import Counts
from tokenformer_vit.ops import find_theta, norm_shares
from tokenformer_vit.ops.theta import theta_weights

from .prune import Call, model_call
from .resize import LayerState, Model, counts_by_layer, read_state, unwrapped_layers, write_states

RIDGE = 1e-3  # towards the old values, relative to the mean diagonal of the Gram matrix
REPEATS = 3  # of the ridge, each towards the result before: it rules only what inputs hardly show
STEPS = 4  # in which pairs are chosen where the divisor of Θ changes with them
LEAST_SCALE = 1e-3  # of LayerScale: smaller outputs cannot repair anything


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
        batches: Inputs without labels, a few hundred images or texts, as for
            :func:`~tokenformer_vit.growth.measure_usage`. Their tokens stay in memory.
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
    whole, cut = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    for each in (whole, cut):
        write_states(each, {})  # resets masks and sizes
    smaller, twins = unwrapped_layers(cut), dict(zip(cut.modules(), whole.modules(), strict=True))
    left = {smaller[name]: name for name in wanted}
    bar = tqdm(total=len(wanted), desc="refit", unit="layer", disable=None)
    parts, new = _parts(cut, left, [model_call(cut, batch) for batch in batches])
    old = new
    for part in parts:
        new = [call._replace(module=part) for call in new]
        old = [call._replace(module=twins[part]) for call in old]
        for _, group in groupby(_run(new[0], left)[1], lambda seen: id(seen.args[0])):
            chosen = {seen.module: seen for seen in group if seen.module in left}
            rows = _rows(chosen, twins, old, new)
            for layer in chosen:
                name = left.pop(layer)
                state, bias = _fit(layer, wanted[name], rows[layer], _scale(part, layer))
                write_states(cut, {name: state})
                if layer.bias is not None:
                    layer.bias.copy_(bias)
            bar.update(len(chosen))
        # What follows gets what these return.
        old = [call._replace(args=(_run(call)[0], *call.args[1:])) for call in old]
        new = [call._replace(args=(_run(call)[0], *call.args[1:])) for call in new]
    write_states(model, {name: read_state(smaller[name]) for name in wanted})
    for name in wanted:
        if layers[name].bias is not None:
            layers[name].bias.copy_(smaller[name].bias)  # type: ignore[union-attr]
    return model


def _run(call: Call, watched: Iterable[nn.Module] = ()) -> tuple[Any, list[Call]]:
    """Return the output of a call, and the calls of watched modules in their order."""
    seen: list[Call] = []
    with ExitStack() as stack:
        for module in watched:
            hook = module.register_forward_hook(
                lambda *found: seen.append(Call(*found)), with_kwargs=True
            )
            stack.enter_context(hook)
        return call.module(*call.args, **call.kwargs), seen


def _parts(model: Any, layers: Iterable[nn.Module], calls: list[Call]) -> tuple[list, list[Call]]:
    """Divide a model into blocks that follow each other, with the calls of the first one."""
    blocks = [each for each in model.modules() if isinstance(each, TokenFormerBlock)]
    first = []
    for call in (
        calls if {*layers} <= {each for block in blocks for each in block.modules()} else ()
    ):
        seen = _run(call, blocks)[1]
        if [each.module for each in seen] != blocks or any(
            b.args[0] is not a.output for a, b in pairwise(seen)
        ):
            return [model], calls
        kwargs = {name: each for name, each in seen[0].kwargs.items() if name != "cache"}
        first.append(seen[0]._replace(kwargs=kwargs, mask=call.mask))
    return (blocks, first) if first else ([model], calls)


def _scale(part: Any, layer: nn.Module) -> Tensor | None:
    """Return LayerScale (C_out,) if a layer adds to the residual stream of a block, else None."""
    if not isinstance(part, TokenFormerBlock) or layer not in (part.attn.proj, part.mlp):
        return None
    scale = getattr(part.ls1 if layer is part.attn.proj else part.ls2, "gamma", None)
    return torch.ones_like(part.mlp.value_param_tokens[0]) if scale is None else scale


def _rows(
    layers: Iterable[Pattention], twins: Mapping, old: Sequence[Call], new: Sequence[Call]
) -> dict[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return what layers get in the smaller model (R, C_in), and what they should put out."""
    rows = defaultdict(list)
    for before, after in zip(old, new, strict=True):
        part = after.module
        watched = [*layers, *([part.norm2] if isinstance(part, TokenFormerBlock) else [])]
        result, of_old = _run(before, [twins[each] for each in watched])
        both = list(zip(of_old, _run(after, watched)[1], strict=True))
        kept = slice(None) if after.mask is None else after.mask.flatten() != 0
        for layer in layers:
            for theirs, ours in (pair for pair in both if pair[1].module is layer):
                output = theirs.output
                if (scale := _scale(part, layer)) is not None:  # the whole model's stream after it
                    middle = next((t.args[0], o.args[0]) for t, o in both if o.module is part.norm2)
                    first = layer is part.attn.proj
                    gap = middle[0] - after.args[0] if first else result - middle[1]
                    output = torch.where(scale.abs() >= LEAST_SCALE, gap / scale, output)
                rows[layer].append((ours.args[0].flatten(0, -2)[kept], output.flatten(0, -2)[kept]))
    return rows


def _fit(
    layer: Pattention, count: int, rows: Sequence[tuple[Tensor, Tensor]], scale: Tensor | None
) -> tuple[LayerState, Tensor]:
    """Choose pairs of a layer and fit them; return their tensors and the output's bias."""
    keys, values, score_bias, tau, _ = read_state(layer)
    dtype, linear, has_bias = values.dtype, layer.theta == "linear", layer.bias is not None
    scale = torch.ones_like(values[0]) if scale is None else scale
    scale = scale.double().abs().clamp(min=LEAST_SCALE)
    order, old = find_theta(layer.theta).norm_order, values.double()
    if linear:
        old = keys.double().t() @ old  # (C_in, C_out): the weights of inputs, in place of pairs
    num, shares = len(old), old.new_zeros(len(old))
    old = old if layer.bias is None else torch.cat((old, layer.bias[None].double()))

    def tau_of(kept: Tensor) -> Tensor:  # as `prune` adapts it
        return tau * shares[kept].sum() ** (1 / order) if order and shares.any() else tau

    def weights(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        bias = None if score_bias is None else score_bias[kept].float()
        scores = F.linear(x.float(), keys[kept].float(), bias)
        return scores, theta_weights(scores, layer.theta, tau_of(kept), layer.eps)  # (R, S)

    def moments(kept: Tensor) -> tuple[Tensor, Tensor]:
        gram, product = 0, 0
        for x, wanted in rows:
            features = F.pad(
                (x if linear else weights(x, kept)[1]).double(), (0, int(has_bias)), value=1.0
            )
            gram, product = gram + features.t() @ features, product + features.t() @ wanted.double()
        return gram / tokens, product / tokens  # type: ignore[return-value]

    def solve(kept: Tensor, towards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.cat((kept, kept.new_full((int(has_bias),), num)))
        gram, product = moments(kept) if order else (known[0][index][:, index], known[1][index])
        ridge = RIDGE * gram.diagonal()[: len(kept)].mean().expand(len(gram)).clone()
        ridge[len(kept) :] = 0  # none for the bias
        gram = gram + torch.diag(ridge + torch.finfo(ridge.dtype).tiny)
        inverse = torch.linalg.inv(gram)
        fitted = towards[index]
        for _ in range(REPEATS if towards is old else 1):
            fitted = inverse @ (product + ridge[:, None] * fitted)
        return fitted, inverse, gram

    tokens, kept = sum(len(x) for x, _ in rows), torch.arange(num, device=keys.device)
    if order:
        found = [norm_shares(*weights(x, kept), layer.theta).double().sum(dim=0) for x, _ in rows]
        shares = torch.stack(found).sum(dim=0)
        shares = shares / shares.sum().clamp(min=1e-300)
    known = ((), ()) if order else moments(kept)
    if linear:
        fitted, _, gram = solve(kept, old)
        mean = gram[num, :num] if has_bias else gram.new_zeros(num)
        fused = nn.Linear(num, len(scale), bias=False).to(gram)
        fused.weight.copy_(scale[:, None] * fitted[:num].t())
        tokens_of = Pattention.from_linear(fused, gram[:num, :num] - torch.outer(mean, mean))
        keys = tokens_of.key_param_tokens[:count]
        values = tokens_of.value_param_tokens[:count] / scale
        bias = fitted[-1] + mean @ (fitted[:num] - keys.t() @ values)
        return LayerState(keys.to(dtype), values.to(dtype), None, tau), bias.to(dtype)
    for step in range(1, (STEPS if order else 1) + 1):
        number = round(num * (count / num) ** (step / (STEPS if order else 1)))
        kept = kept[_choose(*solve(kept, 0 * old)[:2], len(kept), number, scale)]
    fitted = solve(kept, old)[0].to(dtype)
    bias = None if score_bias is None else score_bias[kept]
    return LayerState(keys[kept], fitted[: len(kept)], bias, tau_of(kept)), fitted[-1]


def _choose(fitted: Tensor, inverse: Tensor, num: int, count: int, scale: Tensor) -> Tensor:
    """Remove one pair after the other whose removal costs least; return the others by their cost.

    The cost of a pair, all others refitted, is ‖v‖² / (G⁻¹)ₚₚ: the optimal brain surgeon.
    """
    gone = torch.zeros(num, dtype=torch.bool, device=fitted.device)

    def costs(of_gone: float) -> Tensor:
        lengths = (fitted[:num] * scale).square().sum(dim=1)
        return (lengths / inverse.diagonal()[:num]).masked_fill(gone, of_gone)

    for _ in range(num - count):
        pair = costs(torch.inf).argmin()
        row, gone[pair] = inverse[pair] / inverse[pair, pair].sqrt(), True
        fitted.addr_(row, fitted[pair] / inverse[pair, pair].sqrt(), alpha=-1)
        inverse.addr_(row, row, alpha=-1)
    return costs(-1.0).argsort(descending=True)[:count]
