"""Growth: append pairs of parameter tokens to a trained model without changing its outputs."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS, Counts, released_stds
from tokenformer_vit.layers.split import TOKENS, is_split, token_segments
from tokenformer_vit.models.sizes import kind_of
from tokenformer_vit.ops import default_tau, find_theta

from .resize import (
    LayerTokens,
    Model,
    counts_by_layer,
    follow,
    pattention_layers,
    read_tokens,
    whole_layers,
    write_tokens,
)

INITS = ("zero_key", "random", "duplicate", "released")
# How much the copies of a pair differ, relative to the values. Equal copies would get equal
# gradients and stay equal forever.
_SPREAD = 0.1
# Tensors of a layer in a state dict.
_PARTS = (*TOKENS, "tau", "gate", "nested_sizes", "nested_tau")


def grow(
    model: Model,
    num_qkv_param_tokens: Counts = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
    *,
    init: str = "zero_key",
    gate: str | None = None,
    nested: bool = False,
    seed: int = 0,
    split: bool = False,
    freeze: str | None = None,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
    new_lr_scale: float | None = None,
) -> Model:
    """Append pairs of parameter tokens to every layer of a model, in place, or change nothing.

    Args:
        model: Any module with TokenFormer blocks, before DDP or FSDP wrap it. Its Parameter objects
            stay; masks and sizes are reset. Do not grow under ``torch.inference_mode()``.
        num_qkv_param_tokens: New number of pairs in each query, key and value projection, or a list
            with one for each block; None keeps the present number.
        num_proj_param_tokens: The same for output projections.
        num_ffn_param_tokens: The same for feed-forward layers.
        init: Start of new pairs. ``zero_key`` (zero keys, random values) and ``duplicate`` (copies
            that share the values, for a multiple of the present count) keep the outputs. ``random``
            and ``released`` (random, τ of the new count) do not. The README has the formulas.
        gate: Gate of new pairs under ``softmax``, which starts at 0: ``learned``, or ``fixed`` and
            opened by :func:`open_gates`. None: ``learned`` for ``zero_key``, otherwise no gate.
        nested: Whether the present size becomes a nested size, as it does in a nested model. It
            computes bit for bit what it did, if only new pairs are trained.
        seed: Seed of the random numbers, which differ between layers and between old counts.
        split: Store new pairs in separate parameters. Those of an earlier growth become old pairs.
        freeze: ``old`` trains only the new pairs, not even the head; implies ``split``.
        optimizer: Optimizer of the model's parameters, which continues; so do its schedulers,
            unless ``new_lr_scale`` or the first gates add a group. Make anew all other optimizers,
            and averages of the weights.
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
    layers = whole_layers(model)
    before = {name: read_tokens(layer) for name, layer in layers.items()}
    theta = next(iter(layers.values())).theta
    counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
    grown = _grow_all(before, theta, *counts, init, gate, nested, seed, freeze)
    gates = [layer.gate for layer in layers.values() if layer.gate is not None]
    if gate == "fixed" and any(isinstance(g, nn.Parameter) or (g != 1).any() for g in gates):
        raise InputError(
            "gate is 'fixed', but the model's gates are learned, or not all open: give "
            "gate='learned', or call open_gates(model, 1) first"
        )
    growing = {
        name: own
        for name, own in grown.items()
        # A gate, or pairs that were new in the last growth and are old now.
        if own is not before[name] or is_split(layers[name]) or own.gate is not None
    }
    split = split or freeze is not None or new_lr_scale is not None
    # Nothing would open a fixed gate that is shut, unless it is asked for.
    learn_gate = gate == "learned" or (_any_shut(grown) and gate is None)
    joined = write_tokens(model, growing, split, learn_gate, optimizer, moments)
    if freeze:  # before the optimizer, which takes only what is trained
        freeze_old(model)
    follow(optimizer, model, [layers[name] for name in growing], joined, new_lr_scale)
    return model


def grow_state_dict(
    state_dict: Mapping[str, Tensor],
    *,
    theta: str = "gelu_l2",
    missing_tau: str = "error",
    **how: Any,
) -> dict[str, Tensor]:
    """Append pairs of parameter tokens in a state dict, with the same numbers as :func:`grow`.

    Args:
        state_dict: State dict of any model with TokenFormer blocks.
        theta: Name of the model's Θ, which a state dict does not contain.
        missing_tau: Without τ, as in the authors' checkpoints: ``error``, or ``default`` for √P.
        **how: Numbers of pairs, ``init``, ``gate``, ``nested`` and ``seed`` of :func:`grow`;
            ``freeze`` is only checked.

    Returns:
        A new state dict. Tensors that did not grow are the same objects.
    """
    suffix = f".{TOKENS[0]}"
    names = [key.removesuffix(suffix) for key in state_dict if key.endswith(suffix)]
    if not names:
        raise InputError(
            "the state dict has no parameter tokens (key_param_tokens); give one of a TokenFormer"
        )
    before = {}
    for name in names:
        keys, values = (state_dict[f"{name}.{part}"] for part in TOKENS)
        tau, gates, sizes, taus = (state_dict.get(f"{name}.{part}") for part in _PARTS[2:])
        if tau is None and missing_tau == "default":
            tau = torch.tensor(default_tau(theta, len(keys)), device=keys.device)
        if tau is None:
            raise InputError(
                f"{name} has no tau; if it was trained with {len(keys)} pairs, give "
                "missing_tau='default' (--missing-tau default) to compute tau from this number"
            )
        own_sizes = () if sizes is None else tuple(sizes.tolist())
        before[name] = LayerTokens(keys, values, tau, gates, own_sizes, taus)
    result = dict(state_dict)
    for name, own in _grow_all(before, theta, **how).items():
        sizes = own.keys.new_tensor(own.nested, dtype=torch.long) if own.nested else None
        parts = (own.keys, own.values, own.tau, own.gate, sizes, own.nested_tau)
        own_parts = zip(_PARTS, parts, strict=True)
        result |= {f"{name}.{part}": tensor for part, tensor in own_parts if tensor is not None}
    return result


def freeze_old(model: nn.Module) -> None:
    """Freeze all parameters of a model grown with ``split=True``, but for its new pairs."""
    split = [layer for layer in pattention_layers(model).values() if is_split(layer)]
    if not split:
        raise InputError("no layer stores its new pairs separately: grow with split=True")
    model.requires_grad_(False)
    for layer in split:
        for name in TOKENS:
            token_segments(layer, name)[1].requires_grad_()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # otherwise an optimizer would still make a step with it


@torch.no_grad()
def open_gates(model: nn.Module, opened: float) -> None:
    """Set the fixed gates of new pairs, from 0 (as at growth) to 1 (the pair counts fully)."""
    gates = [layer.gate for layer in pattention_layers(model).values()]
    fixed = [gate for gate in gates if gate is not None and not isinstance(gate, nn.Parameter)]
    if not 0 <= opened <= 1:
        raise InputError(f"opened must be from 0 to 1, but got {opened}")
    if not fixed:
        raise InputError("no layer has a fixed gate: grow a softmax model with gate='fixed'")
    for gate in fixed:
        gate[gate != 1] = opened


def join_tokens(model: Model, optimizer: Optimizer | None = None, moments: str = "keep") -> Model:
    """Store the old and the new pairs of a grown model in one parameter again, in place.

    A state dict always contains joined pairs, also without this. ``optimizer`` and ``moments`` are
    as in :func:`grow`; masks and sizes are reset, and outputs stay.
    """
    layers = {name: each for name, each in whole_layers(model).items() if is_split(each)}
    tokens = {name: read_tokens(layer) for name, layer in layers.items()}
    joined = write_tokens(model, tokens, optimizer=optimizer, moments=moments)
    follow(optimizer, model, layers.values(), joined)
    return model


def _grow_all(
    before: Mapping[str, LayerTokens],
    theta: str,
    num_qkv_param_tokens: Counts = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
    init: str = "zero_key",
    gate: str | None = None,
    nested: bool = False,
    seed: int = 0,
    freeze: str | None = None,
) -> dict[str, LayerTokens]:
    """Compute the tensors of all layers after growth; those of other layers are the same object."""
    if freeze not in (None, "old"):
        raise InputError(f"freeze must be 'old' or None, but got {freeze!r}")
    needs_gate = find_theta(theta).gated is not None
    if init not in INITS:
        hint = " (zero keys with zero values would never learn)" if init == "zero" else ""
        raise InputError(f"unknown init {init!r}{hint}; choose one of {', '.join(INITS)}")
    if gate not in (None, "learned", "fixed"):
        raise InputError(f"unknown gate {gate!r}; choose 'learned' or 'fixed'")
    if gate and not (needs_gate and init in ("zero_key", "random")):
        raise InputError(
            f"gate is {gate!r}, but {theta} with init {init!r} needs no gate; leave it out, or use "
            "softmax with zero_key or random"
        )
    counts = num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens
    if all(count is None for count in counts):
        raise InputError(f"no number of pairs is given: give {', '.join(COUNTS.values())}")
    wanted = counts_by_layer(before, *counts)
    growing = {n: num for n, num in wanted.items() if num not in (None, before[n].num)}
    nested = bool(growing) and (nested or any(own.nested for own in before.values()))
    if nested and init == "duplicate":
        raise InputError(
            "init is 'duplicate', which changes the values of old pairs and with them the smaller "
            "sizes of a nested model: choose another init"
        )
    shut = gate is not None or (needs_gate and init == "zero_key")
    gated = (growing and shut) or any(own.gate is not None for own in before.values())
    depth = max(1, sum(kind_of(name) == "proj" for name in before))
    grown = dict(before)
    for index, name in enumerate(sorted(before)):
        own = before[name]
        if gated and own.gate is None:  # a model is rebuilt with gates in all layers or in none
            grown[name] = own = own._replace(gate=own.keys.new_ones(own.num))
        if name in growing:
            draws = hashlib.sha256(f"{seed} {index} {own.num}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(draws[:7], "little"))
            grown[name] = _grow_one(name, own, growing[name], theta, init, shut, depth, generator)
        if nested:  # the present size becomes a nested one
            taus = [tau.reshape(-1) for tau in (own.nested_tau, own.tau) if tau is not None]
            sizes = (*own.nested, own.num)
            grown[name] = grown[name]._replace(nested=sizes, nested_tau=torch.cat(taus))
    if freeze and _any_shut(grown) and gate != "fixed":
        raise InputError(
            "freeze is 'old', but a learned gate is one parameter for old and new pairs: give "
            "gate='fixed', or init='duplicate'"
        )
    return grown


def _any_shut(grown: Mapping[str, LayerTokens]) -> bool:
    return any(own.gate is not None and bool((own.gate == 0).any()) for own in grown.values())


def _grow_one(
    name: str,
    own: LayerTokens,
    num: int,
    theta: str,
    init: str,
    shut: bool,
    depth: int,
    generator: torch.Generator,
) -> LayerTokens:
    """Compute the tensors of a layer with another number of pairs, without nested sizes."""
    times, rest = divmod(num, own.num)
    if num < own.num or (init == "duplicate" and rest):
        way = "give a multiple, or init='zero_key'" if times else "use prune() to remove pairs"
        raise InputError(f"{name} has {own.num} pairs and cannot grow to {num} by {init}: {way}")
    tau, gate, new = own.tau, own.gate, num - own.num
    if init == "duplicate":
        drawn = [_draw(own.values, own.num, generator, None) for _ in range(times)]
        spread = _SPREAD * torch.stack(drawn)  # (m, P, C_out)
        spread -= spread.mean(dim=0)
        values = (own.values / times + spread).flatten(0, 1)
        tau = tau * (default_tau(theta, num) / default_tau(theta, own.num))
        gate = None if gate is None else gate.repeat(times)
        return LayerTokens(own.keys.repeat(times, 1), values, tau, gate)
    key_std = value_std = None
    if init == "released":
        key_std, value_std = released_stds(own.values.shape[1], depth)
        tau = torch.full_like(tau, default_tau(theta, num))
    keys = _draw(own.keys, new, generator, key_std)
    values = _draw(own.values, new, generator, value_std)
    if init == "zero_key":
        keys.zero_()
    if gate is not None:
        gate = torch.cat((gate, gate.new_full((new,), 0.0 if shut else 1.0)))
    return LayerTokens(torch.cat((own.keys, keys)), torch.cat((own.values, values)), tau, gate)


def _draw(like: Tensor, rows: int, generator: torch.Generator, std: float | None) -> Tensor:
    """Draw rows on the CPU; their standard deviation is by default the root mean square."""
    rms = like.double().square().mean().sqrt()
    drawn = torch.randn(rows, like.shape[1], generator=generator, device="cpu").to(rms)
    return (drawn * (rms if std is None else std)).to(like.dtype)
