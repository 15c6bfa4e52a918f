"""Growth: pairs of parameter tokens are appended, and the model computes what it did before."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import released_stds
from tokenformer_vit.layers.segments import TOKENS, fuse_state_dict, is_split, token_segments
from tokenformer_vit.ops import THETAS, default_tau, find_theta

from .new_pairs import freeze_old
from .optimizer import carry_over, check_optimizer
from .tokens import (
    LayerTokens,
    check_rebuildable,
    kind_of,
    pattention_layers,
    read_tokens,
    record_counts,
    write_tokens,
)

INITS = ("zero_key", "random", "duplicate", "released")
# What the two copies of a pair differ by, relative to the values. Equal copies would get equal
# gradients and stay equal for ever.
_SPREAD = 0.1

Model = TypeVar("Model", bound=nn.Module)


def grow(
    model: Model,
    num_qkv_param_tokens: int | None = None,
    num_proj_param_tokens: int | None = None,
    num_ffn_param_tokens: int | None = None,
    *,
    init: str = "zero_key",
    gate: str | None = None,
    seed: int = 0,
    split: bool = False,
    freeze: str | None = None,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
    new_lr_scale: float = 1.0,
) -> Model:
    """Append pairs of parameter tokens to every layer of a model, in place.

    ============= ====================== ==================== ==========================
    ``init``      new keys, values       τ                    what the model computes
    ============= ====================== ==================== ==========================
    ``zero_key``  zero, random           kept                 stays; ``softmax``: by its gate
    ``duplicate`` those of the old pair, times m (L1 norms)   stays, for every Θ
                  values / m ± δ         or √m (L2 norms)
    ``random``    random, random         kept                 changes (stays behind a gate)
    ``released``  random, random         √P or P anew         changes
    ============= ====================== ==================== ==========================

    Args:
        model: Any module with TokenFormer blocks. Its Pattention parameters are new objects
            afterwards; what timm saves and rebuilds it from says the new counts.
        num_qkv_param_tokens: Pairs of each query, key and value projection from now on; None
            leaves them as they are.
        num_proj_param_tokens: So for the output projections.
        num_ffn_param_tokens: So for the feed-forward layers.
        init: How new pairs start, as above. What is random is normal, of the root mean square of
            the layer's present keys or values. ``duplicate`` takes m times the present count; its
            δ has a tenth of the values' root mean square, and the δ of all copies of a pair sum
            to zero. ``released`` draws as the authors' code does, keys N(0, 0.02²) and values
            N(0, (2 / (depth · √width))²), and sets τ to what a new layer of that many pairs has
            (:func:`~tokenformer_vit.ops.default_tau`): every old pair gets another weight.
        gate: Of ``softmax``: start new pairs behind a gate of 0, ``learned`` or ``fixed`` (to be
            opened by :func:`open_gates`). None takes ``learned`` for ``zero_key`` and no gate for
            the others. All layers have gates of one kind: fixed ones become learned where new ones
            are, and the other way round is refused.
        seed: Of the random numbers. The same seed draws others for each layer and each old count.
        split: Hold new pairs in parameters of their own, as
            :mod:`tokenformer_vit.layers.segments` says, so that they can be trained otherwise.
            Those of an earlier growth are joined to the old ones, in every layer.
        freeze: ``old`` trains the new pairs alone: every other parameter of ``model``, its head
            included, needs no gradient any more. It implies ``split``.
        optimizer: Of the model's parameters; it goes on with the new ones. Any other optimizer of
            them raises InputError at its next step: build a new one. A schedule of learning rates
            that was made before (PyTorch's, timm's) does not know of groups that this adds, for
            gates and for ``new_lr_scale``: make a new one. So it is with an average of the weights
            (timm's ``ModelEmaV3``), whose tensors are of the old shapes.
        moments: What becomes of its state; see :func:`carry_over`.
        new_lr_scale: Factor on the learning rate of the new pairs in ``optimizer``. Other than 1
            implies ``split``.

    Returns:
        ``model``.

    Raises:
        InputError: If a count is smaller than the present one, an argument is none of those that
            exist, ``init`` cannot serve the model's Θ and counts, the parameters are on the meta
            device, or ``model`` is a part of a model whose other blocks would keep their counts.

    Note:
        In float32 what the model computes stays to about 1e-6 (rounding in sums of another
        length); on a CPU it stays to the last bit where the counts are multiples of 16. New zero
        keys with zero values would be exact too, but under a GELU both have gradients of exactly
        zero, for ever: there is no such ``init``.

    Source:
        TokenFormer, arXiv:2410.23168v2, Section 3.3 and Appendix B, for zero keys and the kept τ.
        Doubling and the gate are this project's.
    """
    counts = _counts(num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    if freeze not in (None, "old"):
        raise InputError(f"freeze is {freeze!r}; the one thing that can be frozen is 'old'")
    layers = pattention_layers(model)
    check_rebuildable(model, layers)
    depth = _depth(layers)
    grown = {
        name: _grow_layer(
            read_tokens(layer),
            counts[kind_of(name)],
            layer.theta,
            init,
            gate,
            seed,
            name,
            index,
            depth,
        )
        for index, (name, layer) in enumerate(sorted(layers.items()))
    }
    grown = _gate_alike(grown)
    learn_gate = _kind_of_gate(layers, grown, gate)
    if (
        freeze
        and learn_gate
        and any(each.gate is not None and (each.gate == 0).any() for each in grown.values())
    ):
        raise InputError(
            "freeze is 'old', but the gates behind which new pairs of softmax start are learned, "
            "each one parameter of old and new pairs: give gate='fixed', or init='duplicate'"
        )
    if not new_lr_scale > 0:
        raise InputError(f"new_lr_scale must be positive, but it is {new_lr_scale}")
    split = split or freeze is not None or new_lr_scale != 1.0
    growing = {
        name: layer
        for name, layer in layers.items()
        if grown[name].num > layer.num_param_tokens
        or is_split(layer)  # what was new by the last growth is old by this one
        or grown[name].gate is not None
    }
    parts = [
        p for layer in growing.values() for name in TOKENS for p in token_segments(layer, name)
    ]
    gates = [layer.gate for layer in growing.values() if isinstance(layer.gate, nn.Parameter)]
    check_optimizer(optimizer, [*parts, *gates], moments)
    changes = []
    for name, layer in growing.items():
        tokens, num_old = grown[name], layer.num_param_tokens
        changes += write_tokens(layer, tokens, num_old if split else None, learn_gate)
    record_counts(model)
    if optimizer is not None:
        carry_over(optimizer, changes, moments, new_lr_scale)
    if freeze:
        freeze_old(model)
    return model


def grow_state_dict(
    state_dict: Mapping[str, Tensor],
    num_qkv_param_tokens: int | None = None,
    num_proj_param_tokens: int | None = None,
    num_ffn_param_tokens: int | None = None,
    *,
    theta: str = "gelu_l2",
    init: str = "zero_key",
    gate: str | None = None,
    seed: int = 0,
    missing_tau: str = "error",
) -> dict[str, Tensor]:
    """Append pairs of parameter tokens in a state dict, as :func:`grow` does in a model.

    Args:
        state_dict: Of any model with TokenFormer blocks; layers that are held in two parts are
            joined.
        num_qkv_param_tokens: As in :func:`grow`, and so the next two.
        num_proj_param_tokens: As said.
        num_ffn_param_tokens: As said.
        theta: Θ of the model: a state dict does not tell.
        init: As in :func:`grow`, and so the next two.
        gate: As said. The state dict then holds a ``gate`` for each layer; a model that loads it
            is built with ``pattention_args={"gate": "learned"}``.
        seed: As said. The same seed draws what it draws for the model.
        missing_tau: ``error``, or ``default`` to take √P, or P under an L1 norm, for a checkpoint
            that stores none, such as the authors' own.

    Returns:
        A new state dict; tensors that did not grow are the same objects.

    Raises:
        InputError: As :func:`grow`; also if there are no parameter tokens or a layer has no τ.
    """
    counts = _counts(num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    find_theta(theta)
    result = fuse_state_dict(state_dict)
    suffix = f".{TOKENS[0]}"
    names = sorted(key.removesuffix(suffix) for key in result if key.endswith(suffix))
    if not names:
        raise InputError("the state dict holds no parameter tokens (key_param_tokens) to add to")
    grown = {}
    for index, name in enumerate(names):
        keys, values, tau, gates = (
            result.get(f"{name}.{part}") for part in (*TOKENS, "tau", "gate")
        )
        if values is None or keys is None or len(values) != len(keys):
            raise InputError(f"{name}: there must be as many value_param_tokens as keys")
        if tau is None:
            if missing_tau != "default":
                raise InputError(
                    f"{name} has no tau, so that its scale would have to be guessed from the "
                    f"number of pairs ({len(keys)}); where it was trained with that many, give "
                    "missing_tau='default' (--missing-tau default)"
                )
            tau = torch.tensor(default_tau(theta, len(keys)))
        grown[name] = _grow_layer(
            LayerTokens(keys, values, tau, gates),
            counts[kind_of(name)],
            theta,
            init,
            gate,
            seed,
            name,
            index,
            _depth(names),
        )
    for name, tokens in _gate_alike(grown).items():
        parts = (tokens.keys, tokens.values, tokens.tau, tokens.gate)
        for part, tensor in zip((*TOKENS, "tau", "gate"), parts, strict=True):
            if tensor is not None:
                result[f"{name}.{part}"] = tensor
    return result


def _counts(qkv: int | None, proj: int | None, ffn: int | None) -> dict[str, int | None]:
    counts = {"qkv": qkv, "proj": proj, "ffn": ffn}
    if all(count is None for count in counts.values()):
        raise InputError(
            "no number of pairs is given: say num_qkv_param_tokens, num_proj_param_tokens or "
            "num_ffn_param_tokens"
        )
    return counts


def _kind_of_gate(
    layers: Mapping[str, Pattention], grown: Mapping[str, LayerTokens], gate: str | None
) -> bool | None:
    """Tell whether gates will be learned; None if what there is stays, or there is none."""
    present = [layer.gate for layer in layers.values() if layer.gate is not None]
    learned = [each for each in present if isinstance(each, nn.Parameter)]
    if gate == "fixed" and learned:
        raise InputError(
            "gate is 'fixed', but the model's gates are learned, and would be overwritten while "
            "new ones open: give gate='learned'"
        )
    if gate == "fixed" and any((each != 1).any() for each in present):
        raise InputError(
            "gate is 'fixed', but those of the last growth are not all open yet: open them first "
            "(open_gates), or grow later"
        )
    if gate == "fixed":
        return False
    # Nothing would open a fixed gate that is shut now.
    shut = any(each.gate is not None and (each.gate == 0).any() for each in grown.values())
    return True if gate == "learned" or shut else None


def _gate_alike(layers: dict[str, LayerTokens]) -> dict[str, LayerTokens]:
    """Give all layers a gate if one has: a model is rebuilt with gates or without."""
    if all(tokens.gate is None for tokens in layers.values()):
        return layers
    return {
        name: tokens
        if tokens.gate is not None
        else replace(tokens, gate=tokens.keys.new_ones(tokens.num))
        for name, tokens in layers.items()
    }


def _grow_layer(
    tokens: LayerTokens,
    num: int | None,
    theta: str,
    init: str,
    gate: str | None,
    seed: int,
    name: str,
    index: int,
    depth: int,
) -> LayerTokens:
    """Return a layer's tokens with as many more as are wanted."""
    if init not in INITS:
        hint = " (zero keys with zero values would never learn)" if init == "zero" else ""
        raise InputError(f"unknown init {init!r}{hint}; choose one of {', '.join(INITS)}")
    if gate not in (None, "learned", "fixed"):
        raise InputError(f"unknown gate {gate!r}; choose 'learned' or 'fixed'")
    needs_gate = find_theta(theta).has_gate
    if gate and not (needs_gate and init in ("zero_key", "random")):
        gated = ", ".join(name for name in THETAS if THETAS[name].has_gate)
        raise InputError(
            f"gate is {gate!r}, but {theta} with init {init!r} does not need one; gates are for "
            f"{gated} with zero_key or random"
        )
    if tokens.keys.is_meta or tokens.tau.is_meta:
        raise InputError(
            f"{name} is on the meta device and has no values yet: grow the model after its weights "
            "are loaded, or build it with the new number of pairs"
        )
    if num is None or num == tokens.num:
        return tokens
    if num < tokens.num:
        raise InputError(
            f"{name} has {tokens.num} pairs and cannot grow to {num}; "
            "tokenformer_vit.growth.prune() makes models smaller"
        )
    for what, tensor in (("keys", tokens.keys), ("values", tokens.values)):
        if not tensor.any() and init in ("zero_key", "random"):
            raise InputError(f"all {what} of {name} are zero, which says nothing of their scale")
    text = f"{seed} {index} {tokens.num}".encode()
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    )
    if init == "duplicate":
        return _duplicate(tokens, num, theta, name, generator)
    new = num - tokens.num
    keys_std = values_std = None  # those of the present ones
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
    return LayerTokens(
        torch.cat((tokens.keys, keys)), torch.cat((tokens.values, values)), tokens.tau, gates
    )


def _depth(names: Iterable[str]) -> int:
    """Count the blocks that Pattention layers belong to."""
    return max(1, sum(kind_of(name) == "proj" for name in names))


def _normal_like(
    tokens: Tensor, count: int, generator: torch.Generator, std: float | None = None
) -> Tensor:
    """Draw rows of a standard deviation, or of the root mean square of those that are there."""
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
            f"{name} has {tokens.num} pairs, and 'duplicate' repeats all of them: {num} is no "
            f"multiple; take {max(times, 2) * tokens.num} or {(max(times, 2) + 1) * tokens.num}, "
            "or zero_key"
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
