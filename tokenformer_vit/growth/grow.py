"""Growth: append pairs of parameter tokens to a trained model without changing its outputs."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, Counts, released_stds
from tokenformer_vit.layers.segments import TOKENS, fuse_state_dict, is_split, token_segments
from tokenformer_vit.models.sizes import kind_of
from tokenformer_vit.ops import THETAS, default_tau, find_theta

from .nested import keep_size
from .new_pairs import freeze_old
from .optimizer import carry_over, check_optimizer
from .tokens import (
    LayerTokens,
    check_rebuildable,
    counts_by_layer,
    pattention_layers,
    read_tokens,
    record_counts,
    write_tokens,
)

# Tensors of a layer in a state dict.
_PARTS = (*TOKENS, "tau", "gate", "nested_sizes", "nested_tau")
INITS = ("zero_key", "random", "duplicate", "released")
# How much the copies of a pair differ, relative to the values. Equal copies would get equal
# gradients and stay equal forever.
_SPREAD = 0.1

Model = TypeVar("Model", bound=nn.Module)


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
    new_lr_scale: float = 1.0,
    noise: float = 0.0,
) -> Model:
    """Append pairs of parameter tokens to every layer of a model, in place.

    ============= ========================= ===================== ===========================
    ``init``      new keys, values          τ                     outputs of the model
    ============= ========================= ===================== ===========================
    ``zero_key``  zero, random              kept                  stay (``softmax``: by gate)
    ``duplicate`` keys of the old pair,     times m (L1 norms) or stay, for every Θ
                  values / m ± δ            √m (L2 norms)
    ``random``    random, random            kept                  change (stay with a gate)
    ``released``  random, random            default of new count  change
    ============= ========================= ===================== ===========================

    Args:
        model: Any module with TokenFormer blocks. Its Pattention parameters become new objects, and
            the arguments from which timm rebuilds it get the new counts. It uses all pairs then.
        num_qkv_param_tokens: New number of pairs in each query, key and value projection; None
            keeps the present number. A list has a number for each block.
        num_proj_param_tokens: New number of pairs in each output projection.
        num_ffn_param_tokens: New number of pairs in each feed-forward layer.
        init: Values of new pairs; see the table. Random tokens are normal with the root mean square
            of the layer's present keys or values. ``duplicate`` needs m times the present count;
            its δ has a tenth of the values' root mean square, and the δ of all copies of a pair sum
            to zero. ``released`` draws as the authors' code does: keys from N(0, 0.02²), values
            from N(0, (2 / (depth · √width))²), and τ becomes the default of a new layer with as
            many pairs (:func:`~tokenformer_vit.ops.default_tau`), which changes the weight of every
            old pair.
        gate: Gate of new pairs under ``softmax``, which starts at 0: ``learned``, or ``fixed`` and
            opened by :func:`open_gates`. None means ``learned`` for ``zero_key`` and no gate
            otherwise. All gates of a model are of one kind: old fixed gates become learned if new
            gates are learned; fixed gates cannot be added to learned ones.
        nested: Whether an ordinary model becomes a nested one, whose smaller size is the model
            before growth. The present size of a nested model always becomes a nested size. A
            smaller size has its own τ. It computes bit for bit what it did, if only new pairs are
            trained (``freeze="old"``, and no head). With gates it does so up to rounding.
        seed: Seed of the random numbers, which differ between layers and between old counts.
        split: Store new pairs in separate parameters (:mod:`tokenformer_vit.layers.segments`), to
            train them differently. New pairs of an earlier growth are joined to the old pairs in
            every layer.
        freeze: ``old`` trains only the new pairs: no other parameter of ``model``, not even the
            head, needs a gradient. It implies ``split``.
        optimizer: Optimizer of the model's parameters, which continues with the new parameters. Any
            other optimizer of these parameters raises InputError at its next step: build a new one.
            Also build a new learning-rate scheduler (PyTorch's or timm's), because the old one does
            not know the groups for gates and for ``new_lr_scale``. Also build a new average of the
            weights (timm's ``ModelEmaV3``), because its tensors have the old shapes.
        moments: What to do with the optimizer's state; see :func:`carry_over`.
        new_lr_scale: Factor on the learning rate of new pairs in ``optimizer``. A factor other than
            1 implies ``split``.
        noise: Standard deviation of normal noise that is added to the old pairs of layers that
            grow, relative to the root mean square of their keys or values. It changes the outputs
            of the model and of its nested sizes.

    Returns:
        ``model``.

    Raises:
        InputError: If a count is smaller than the present one, a list of counts does not have one
            for each block, an argument has an unknown value, ``init`` does not fit the model's Θ,
            counts or nested sizes, the parameters are on the meta device, or ``model`` is only a
            part of a model, whose other blocks would keep their counts.

    Note:
        In float32, outputs stay equal to about 1e-6, because sums of another length round
        differently. On a CPU they stay equal bit for bit if the counts are multiples of 16. New
        zero keys with zero values would also be exact, but under a GELU the gradients of both are
        exactly zero forever; therefore there is no such ``init``.

    Source:
        TokenFormer, arXiv:2410.23168v2, Section 3.3 and Appendix B, for zero keys and the kept τ.
        Its authors advise noise, without a size, for a new cosine schedule on the same data
        (github.com/Haiyang-W/TokenFormer/issues/11). Duplicates and the gate are from this project.
    """
    if freeze not in (None, "old"):
        raise InputError(f"freeze must be 'old' or None, but got {freeze!r}")
    if not 0 <= noise < math.inf:
        raise InputError(f"noise must be at least 0 and finite, but got {noise}")
    layers = pattention_layers(model)
    counts = _counts(layers, num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    check_rebuildable(model, layers)
    how = {"init": init, "gate": gate, "seed": seed, "noise": noise}
    grow_layer = partial(_grow_layer, **how, depth=_depth(layers))
    grown = {
        name: grow_layer(name, index, read_tokens(layer), counts[name], layer.theta)
        for index, (name, layer) in enumerate(sorted(layers.items()))
    }
    grown = _gate_alike(grown)
    before = {name: read_tokens(layer) for name, layer in layers.items()}
    grown = _nested(grown, before, nested, init)
    learn_gate = _kind_of_gate(layers, grown, gate)
    if (
        freeze
        and learn_gate
        and any(each.gate is not None and (each.gate == 0).any() for each in grown.values())
    ):
        raise InputError(
            "freeze is 'old', but a learned gate is one parameter for old and new pairs: give "
            "gate='fixed', or init='duplicate'"
        )
    if not new_lr_scale > 0:
        raise InputError(f"new_lr_scale must be above 0, but got {new_lr_scale}")
    split = split or freeze is not None or new_lr_scale != 1.0
    growing = {
        name: layer
        for name, layer in layers.items()
        if grown[name].num > layer.num_param_tokens
        or is_split(layer)  # pairs that were new in the last growth are now old
        or grown[name].gate is not None
        or grown[name].nested != layer.nested
    }
    parts = [
        p for layer in growing.values() for name in TOKENS for p in token_segments(layer, name)
    ]
    others = [each for layer in growing.values() for each in (layer.gate, layer.nested_tau)]
    parts += [each for each in others if isinstance(each, nn.Parameter)]
    check_optimizer(optimizer, parts, moments)
    changes = []
    for layer in layers.values():
        layer.size = None
    for name, layer in growing.items():
        tokens, num_old = grown[name], layer.num_param_tokens
        changes += write_tokens(layer, tokens, num_old if split else None, learn_gate)
    record_counts(model)
    if freeze:  # before the optimizer, which takes only those new parameters that are trained
        freeze_old(model)
    if optimizer is not None:
        carry_over(optimizer, changes, moments, new_lr_scale)
    return model


def grow_state_dict(
    state_dict: Mapping[str, Tensor],
    num_qkv_param_tokens: Counts = None,
    num_proj_param_tokens: Counts = None,
    num_ffn_param_tokens: Counts = None,
    *,
    theta: str = "gelu_l2",
    init: str = "zero_key",
    gate: str | None = None,
    nested: bool = False,
    seed: int = 0,
    missing_tau: str = "error",
) -> dict[str, Tensor]:
    """Append pairs of parameter tokens in a state dict, as :func:`grow` does in a model.

    Args:
        state_dict: State dict of any model with TokenFormer blocks. Split layers are joined.
        num_qkv_param_tokens: New number of pairs, as in :func:`grow`.
        num_proj_param_tokens: New number of pairs, as in :func:`grow`.
        num_ffn_param_tokens: New number of pairs, as in :func:`grow`.
        theta: Name of the model's Θ, which a state dict does not contain.
        init: Values of new pairs, as in :func:`grow`.
        gate: Gate of new pairs, as in :func:`grow`. With a gate, every layer of the state dict has
            a ``gate``; build the model that loads it with ``pattention_args={"gate": "learned"}``.
        nested: Whether the present size becomes a nested size, as in :func:`grow`.
        seed: Seed of the random numbers; :func:`grow` draws the same numbers from it.
        missing_tau: What to do if a layer stores no τ, as in the authors' checkpoints: ``error``,
            or ``default`` for √P (P under an L1 norm).

    Returns:
        A new state dict. Tensors that did not grow are the same objects.

    Raises:
        InputError: In the cases of :func:`grow`, and if there are no parameter tokens or a layer
            has no τ.
    """
    find_theta(theta)
    result = fuse_state_dict(state_dict)
    suffix = f".{TOKENS[0]}"
    names = sorted(key.removesuffix(suffix) for key in result if key.endswith(suffix))
    if not names:
        raise InputError(
            "the state dict has no parameter tokens (key_param_tokens); give one of a TokenFormer"
        )
    counts = _counts(names, num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    grow_layer = partial(_grow_layer, init=init, gate=gate, seed=seed, depth=_depth(names))
    before, grown = {}, {}
    for index, name in enumerate(names):
        keys, values, tau, gates, sizes, taus = (result.get(f"{name}.{part}") for part in _PARTS)
        if values is None or keys is None or len(values) != len(keys):
            raise InputError(
                f"{name} does not have as many value_param_tokens as key_param_tokens; give the "
                "whole state dict, as it was saved"
            )
        if tau is None:
            if missing_tau != "default":
                raise InputError(
                    f"{name} has no tau; if it was trained with {len(keys)} pairs, give "
                    "missing_tau='default' (--missing-tau default) to compute tau from this number"
                )
            tau = torch.tensor(default_tau(theta, len(keys)))
        own_sizes = () if sizes is None else tuple(sizes.tolist())
        tokens = before[name] = LayerTokens(keys, values, tau, gates, own_sizes, taus)
        grown[name] = grow_layer(name, index, tokens, counts[name], theta)
    for name, tokens in _nested(_gate_alike(grown), before, nested, init).items():
        sizes = torch.tensor(tokens.nested) if tokens.nested else None
        parts = (tokens.keys, tokens.values, tokens.tau, tokens.gate, sizes, tokens.nested_tau)
        for part, tensor in zip(_PARTS, parts, strict=True):
            if tensor is not None:
                result[f"{name}.{part}"] = tensor
    return result


def _counts(names: Iterable[str], qkv: Counts, proj: Counts, ffn: Counts) -> dict[str, int | None]:
    counts = dict(zip(COUNTS.values(), (qkv, proj, ffn), strict=True))
    if all(count is None for count in counts.values()):
        raise InputError(
            "no number of pairs is given: give num_qkv_param_tokens, num_proj_param_tokens or "
            "num_ffn_param_tokens"
        )
    return counts_by_layer(names, **counts)


def _kind_of_gate(
    layers: Mapping[str, Pattention], grown: Mapping[str, LayerTokens], gate: str | None
) -> bool | None:
    """Return whether gates will be learned; None if gates stay as they are or there are none."""
    present = [layer.gate for layer in layers.values() if layer.gate is not None]
    learned = [each for each in present if isinstance(each, nn.Parameter)]
    if gate == "fixed" and learned:
        raise InputError(
            "gate is 'fixed', but the model's gates are learned, and opening new gates would "
            "overwrite them: give gate='learned'"
        )
    if gate == "fixed" and any((each != 1).any() for each in present):
        raise InputError(
            "gate is 'fixed', but gates of the last growth are not open yet: open them first "
            "(open_gates), or grow later"
        )
    if gate == "fixed":
        return False
    # Nothing would open a fixed gate that is closed now.
    shut = any(each.gate is not None and (each.gate == 0).any() for each in grown.values())
    return True if gate == "learned" or shut else None


def _gate_alike(layers: dict[str, LayerTokens]) -> dict[str, LayerTokens]:
    """Give all layers a gate if one has a gate: a model is rebuilt with or without gates."""
    if all(tokens.gate is None for tokens in layers.values()):
        return layers
    return {
        name: tokens
        if tokens.gate is not None
        else replace(tokens, gate=tokens.keys.new_ones(tokens.num))
        for name, tokens in layers.items()
    }


def _nested(
    grown: dict[str, LayerTokens], before: Mapping[str, LayerTokens], nested: bool, init: str
) -> dict[str, LayerTokens]:
    """Keep the nested sizes of all layers; if pairs are new, add the size from before growth."""
    if not nested and not any(tokens.nested for tokens in before.values()):
        return grown
    if all(grown[name].num == before[name].num for name in grown):
        return grown
    if init == "duplicate":
        raise InputError(
            "init is 'duplicate', which changes the values of old pairs and with them the smaller "
            "sizes of a nested model: choose another init"
        )
    return {name: keep_size(tokens, before[name]) for name, tokens in grown.items()}


def _grow_layer(
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


def _depth(names: Iterable[str]) -> int:
    """Count the blocks with these Pattention layers."""
    return max(1, sum(kind_of(name) == "proj" for name in names))


def _normal_like(
    tokens: Tensor, count: int, generator: torch.Generator, std: float | None = None
) -> Tensor:
    """Draw rows with a standard deviation; default: the root mean square of ``tokens``."""
    rms = tokens.double().square().mean().sqrt()
    if std is not None:
        rms = torch.full_like(rms, std)
    drawn = torch.randn(count, tokens.shape[1], generator=generator)
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
