"""Growth: append pairs of parameter tokens to a trained model without changing its outputs."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import Counts, released_stds
from tokenformer_vit.layers.pattention import TOKENS
from tokenformer_vit.models.sizes import kind_of, model_sizes
from tokenformer_vit.ops import default_tau

from .resize import LayerState, Model, counts_by_layer, read_state, unwrapped_layers, write_states

INITS = ("zero_key", "random", "duplicate", "released")
# How much the copies of a pair differ, relative to the values. Equal copies would get equal
# gradients and stay equal forever.
_SPREAD = 0.1


def grow(
    model: Model,
    num_qkv_param_tokens: Counts | Mapping[str, Counts] = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
    *,
    init: str = "zero_key",
    nested: bool = False,
    seed: int = 0,
    split: bool = False,
    freeze: str | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    moments: str = "keep",
    new_lr_scale: float | None = None,
) -> Model:
    """Append pairs of parameter tokens to every layer of a model, in place, or change nothing.

    Args:
        model: Any module with Pattention layers, before DDP or FSDP wrap it. Its Parameter objects
            stay, with their hooks; masks and sizes are reset. A backward pass through outputs of
            before growth raises.
        num_qkv_param_tokens: New number of pairs in each query, key and value projection, or a list
            with one for each block; None keeps the present number. Or a dict of numbers by kind or
            name of the layer, such as ``{"fc1": 48}``, for layers in other modules.
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.
        init: Start of new pairs. ``zero_key`` (zero keys, random values; not for ``softmax``) and
            ``duplicate`` (copies that share the values, for a multiple of the present count) keep
            the outputs. ``random`` and ``released`` (random, τ of the new count) do not.
        nested: Whether the present size becomes a nested size of the kinds that grow, as it does
            in a nested model. It computes bit for bit what it did, if only new pairs are trained.
        seed: Seed of the random numbers, which differ between layers and between old counts.
        split: Store new pairs in separate parameters, ``new_key_param_tokens`` and
            ``new_value_param_tokens``. Those of an earlier growth become old pairs.
        freeze: ``old`` trains only the new pairs, not even the head; implies ``split``.
        optimizer: Optimizer of the model's parameters, or several, which continue; so do their
            schedulers, unless ``new_lr_scale`` adds a group. An optimizer that is not given lacks
            the parameters of ``split``: use its ``add_param_group``. Make averages of the weights
            anew.
        moments: ``keep`` the optimizer's state of old pairs, or ``reset`` it in growing layers.
        new_lr_scale: Factor on the learning rate of new pairs, which get groups of the optimizer of
            their own; implies ``split``.

    Returns:
        ``model``. Outputs stay equal to about 1e-6: sums of another length round differently.

    Raises:
        InputError: If an argument or the optimizer does not fit, or the model is wrapped.

    Source: arXiv:2410.23168v2, Section 3.3 and Appendix B, for zero keys and the kept τ.
    """
    if new_lr_scale is not None and new_lr_scale <= 0:
        raise InputError(f"new_lr_scale must be positive, but got {new_lr_scale}")
    if freeze not in (None, "old"):
        raise InputError(f"freeze must be 'old' or None, but got {freeze!r}")
    if init not in INITS:
        hint = " (zero keys with zero values would never learn)" if init == "zero" else ""
        raise InputError(f"unknown init {init!r}{hint}; choose one of {', '.join(INITS)}")
    layers, sizes = unwrapped_layers(model), model_sizes(model)
    counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
    before = {name: read_state(layer) for name, layer in layers.items()}
    wanted = counts_by_layer(layers, *counts)
    growing = {name: num for name, num in wanted.items() if num != before[name].num}
    if freeze and not growing:
        raise InputError("freeze is 'old', but no layer gets new pairs: give larger numbers")
    after = dict(before)
    for index, name in enumerate(sorted(before)):
        if name in growing:
            draws = hashlib.sha256(f"{seed} {index} {before[name].num}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(draws[:7], "little"))
            # Blocks of one model have the same names but for their number.
            depth = sum(re.sub(r"\d+", "", name) == re.sub(r"\d+", "", each) for each in layers)
            after[name] = _grown(name, layers[name], growing[name], init, depth, generator)
    sized = {name for name, layer in layers.items() if layer.sized}
    if growing and (nested or len(sizes) > 1):
        if init == "duplicate":
            raise InputError(
                "init is 'duplicate', which changes the values of old pairs and with them the "
                "smaller sizes of a nested model: choose another init"
            )
        if len(sizes) == 1:
            kinds = {kind_of(name, layers[name]) for name in growing}
            sized = {name for name, layer in layers.items() if kind_of(name, layer) in kinds}
        shares = []
        for size in sizes:
            share = common_share((layers[name].count_at(size), after[name].num) for name in sized)
            if share in (None, 1, *shares) or growing.keys() - sized:
                raise InputError(
                    f"the size {size:g} of before would be no share of all layers that have sizes: "
                    "let these layers alone grow, all by one factor"
                )
            shares.append(share)
        for name in sized:
            tau = torch.cat((before[name].tau.view(-1), after[name].tau.view(-1)))
            after[name] = after[name]._replace(nested=tuple(shares), tau=tau)
    changed = {
        name: state
        for name, state in after.items()
        # Also pairs that were new in the last growth and are old now.
        if state is not before[name] or layers[name].new_key_param_tokens is not None
    }
    split = split or freeze is not None or new_lr_scale is not None
    write_states(model, changed, optimizer, moments, sized, split, freeze, new_lr_scale)
    return model


def join_tokens(
    model: Model,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    moments: str = "keep",
) -> Model:
    """Store the old and the new pairs of a grown model in one parameter again, in place.

    Exports always contain joined pairs, also without this. ``optimizer`` and ``moments`` are as in
    :func:`grow`; masks and sizes are reset, outputs stay, and frozen old pairs are trained again.
    """
    layers = unwrapped_layers(model).items()
    split = {n: read_state(each) for n, each in layers if each.new_key_param_tokens is not None}
    write_states(model, split, optimizer, moments)
    return model


@torch.no_grad()
def _grown(
    name: str, layer: Pattention, num: int, init: str, depth: int, generator: torch.Generator
) -> LayerState:
    """Compute the tensors of a layer with another number of pairs, without nested sizes."""
    old, theta, tau = read_state(layer), layer.theta, layer.tau_at(1.0).detach()
    keys, values = (old.rows[name] for name in TOKENS)
    new = num - old.num
    times, rest = divmod(num, old.num)
    if new < 0 or (init == "duplicate" and rest):
        way = "give a multiple, or init='zero_key'" if times else "use prune() to remove pairs"
        raise InputError(f"{name} has {old.num} pairs and cannot grow to {num} by {init}: {way}")
    if theta == "softmax" and init == "zero_key":
        raise InputError(
            f"{name} has Θ softmax, which gives a zero key the weight of exp(0): choose "
            "init='duplicate', which is exact, or 'random' or 'released'"
        )
    if init == "duplicate":
        spread = _SPREAD * torch.stack([_draw(values, old.num, generator) for _ in range(times)])
        spread -= spread.mean(dim=0)  # (m, P, C_out)
        tau = tau * (default_tau(theta, num) / default_tau(theta, old.num))
        rows = {name: torch.cat([data] * times) for name, data in old.rows.items()}
        rows["value_param_tokens"] = (values / times + spread).flatten(0, 1)
        return LayerState(rows, tau)
    key_std = value_std = None
    if init == "released":
        key_std, value_std = released_stds(values.shape[1], depth)
        tau = torch.full_like(tau, default_tau(theta, num))
    drawn = {
        "key_param_tokens": _draw(keys, new, generator, key_std),
        "value_param_tokens": _draw(values, new, generator, value_std),
        "score_bias": keys.new_zeros(new),
    }
    if init == "zero_key":
        drawn["key_param_tokens"].zero_()
    return LayerState({n: torch.cat((data, drawn[n])) for n, data in old.rows.items()}, tau)


def _draw(like: Tensor, rows: int, generator: torch.Generator, std: float | None = None) -> Tensor:
    """Draw rows on the CPU; their standard deviation is by default the root mean square."""
    rms = like.double().square().mean().sqrt()
    drawn = torch.randn(rows, like.shape[1], generator=generator, device="cpu").to(rms)
    return (drawn * (rms if std is None else std)).to(like.dtype)


def common_share(counts: Iterable[tuple[int, int]]) -> float | None:
    """Return a share that gives all layers their smaller count of pairs; None if there is none."""
    counts = [*counts]
    shares = {smaller / whole for smaller, whole in counts}
    fits = (s for s in shares if all(max(1, round(s * whole)) == n for n, whole in counts))
    return next(fits, None)
