"""The initial values of the pairs that growth appends to a layer."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import released_stds
from tokenformer_vit.models.sizes import kind_of
from tokenformer_vit.ops import THETAS, default_tau, find_theta

from .tokens import LayerTokens

INITS = ("zero_key", "random", "duplicate", "released")
# How much the copies of a pair differ, relative to the values. Equal copies would get equal
# gradients and stay equal forever.
_SPREAD = 0.1


def grow_layer(
    name: str,
    index: int,
    tokens: LayerTokens,
    num: int | None,
    theta: str,
    *,
    init: str,
    gate: str | None,
    seed: int,
    depth: int,
    noise: float = 0.0,
) -> LayerTokens:
    """Return a layer's tokens with ``num`` pairs; None keeps the present number."""
    if init not in INITS:
        hint = " (zero keys with zero values would never learn)" if init == "zero" else ""
        raise InputError(f"unknown init {init!r}{hint}; choose one of {', '.join(INITS)}")
    if gate not in (None, "learned", "fixed"):
        raise InputError(f"unknown gate {gate!r}; choose 'learned' or 'fixed'")
    needs_gate = find_theta(theta).has_gate
    if gate and not (needs_gate and init in ("zero_key", "random")):
        gated = ", ".join(name for name in THETAS if THETAS[name].has_gate)
        raise InputError(
            f"gate is {gate!r}, but {theta} with init {init!r} needs no gate; leave it out, or use "
            f"{gated} with zero_key or random"
        )
    if tokens.keys.is_meta or tokens.tau.is_meta:
        raise InputError(
            f"{name} is on the meta device and has no values: load the weights before growth, or "
            "build the model with the new number of pairs"
        )
    if num is None or num == tokens.num:
        return tokens
    if num < tokens.num:
        raise InputError(
            f"{name} has {tokens.num} pairs and cannot grow to {num}; to remove pairs, use "
            "tokenformer_vit.growth.prune()"
        )
    for what, tensor in (("keys", tokens.keys), ("values", tokens.values)):
        if not tensor.any() and init in ("zero_key", "random"):
            raise InputError(
                f"all {what} of {name} are zero and give no scale; use init='released'"
            )
    own_seed = f"{seed} {index} {tokens.num}"
    if noise:  # its own generator: the new pairs are those of a growth without noise
        tokens = _with_noise(tokens, noise, _generator(f"{own_seed} noise"))
    generator = _generator(own_seed)
    if init == "duplicate":
        return _duplicate(tokens, num, theta, name, generator)
    new = num - tokens.num
    keys_std = values_std = None  # the scale of the present tokens
    if init == "released":
        keys_std, values_std = released_stds(tokens.values.shape[1], depth)
        tau = torch.full_like(tokens.tau, default_tau(theta, num))
        tokens = replace(tokens, tau=tau)
    keys = _normal_like(tokens.keys, new, generator, keys_std)
    if init == "zero_key":
        keys.zero_()
    values = _normal_like(tokens.values, new, generator, values_std)
    gates = tokens.gate
    gated = gates is not None or gate is not None or (needs_gate and init == "zero_key")
    if gated:
        gates = tokens.keys.new_ones(tokens.num) if gates is None else gates
        closed = gate is not None or init == "zero_key"
        gates = torch.cat((gates, gates.new_full((new,), 0.0 if closed else 1.0)))
    return replace(
        tokens,
        keys=torch.cat((tokens.keys, keys)),
        values=torch.cat((tokens.values, values)),
        gate=gates,
    )


def _generator(text: str) -> torch.Generator:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _with_noise(tokens: LayerTokens, noise: float, generator: torch.Generator) -> LayerTokens:
    keys, values = (
        part + noise * _normal_like(part, len(part), generator)
        for part in (tokens.keys, tokens.values)
    )
    return replace(tokens, keys=keys, values=values)


def count_blocks(names: Iterable[str]) -> int:
    """Count the blocks with these Pattention layers."""
    return max(1, sum(kind_of(name) == "proj" for name in names))


def _normal_like(
    tokens: Tensor, count: int, generator: torch.Generator, std: float | None = None
) -> Tensor:
    """Draw rows with a standard deviation; default: the root mean square of ``tokens``."""
    rms = tokens.double().square().mean().sqrt()
    if std is not None:
        rms = torch.full_like(rms, std)
    drawn = torch.randn(count, tokens.shape[1], generator=generator, device="cpu")
    return (drawn.to(rms) * rms).to(tokens.dtype)


def _duplicate(
    tokens: LayerTokens, num: int, theta: str, name: str, generator: torch.Generator
) -> LayerTokens:
    times, rest = divmod(num, tokens.num)
    if rest:
        raise InputError(
            f"{name} has {tokens.num} pairs and cannot be duplicated to {num}, which is not a "
            f"multiple; give {max(times, 2) * tokens.num} or {(max(times, 2) + 1) * tokens.num}, "
            "or init='zero_key'"
        )
    spread = torch.stack(
        [_SPREAD * _normal_like(tokens.values, tokens.num, generator) for _ in range(times)]
    )
    spread -= spread.mean(dim=0)
    factor = default_tau(theta, num) / default_tau(theta, tokens.num)
    return LayerTokens(
        tokens.keys.repeat(times, 1),
        (tokens.values / times + spread).flatten(0, 1),
        tokens.tau * factor,
        None if tokens.gate is None else tokens.gate.repeat(times),
    )
