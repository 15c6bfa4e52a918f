"""Growth: append pairs of parameter tokens to a trained model without changing its outputs."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, Counts, released_stds
from tokenformer_vit.layers.split import TOKENS, is_split, token_segments
from tokenformer_vit.models.sizes import kind_of
from tokenformer_vit.ops import default_tau, find_theta

from .resize import (
    LayerTokens,
    add_parameters,
    counts_by_layer,
    drop_parameters,
    pattention_layers,
    read_tokens,
    record_counts,
    whole_layers,
    write_tokens,
)

INITS = ("zero_key", "random", "duplicate", "released")
# How much the copies of a pair differ, relative to the values. Equal copies would get equal
# gradients and stay equal forever.
_SPREAD = 0.1
# Tensors of a layer in a state dict.
_PARTS = (*TOKENS, "tau", "gate", "nested_sizes", "nested_tau")

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
) -> Model:
    """Append pairs of parameter tokens to every layer of a model, in place, or change nothing.

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
        model: Any module with TokenFormer blocks, not in a DistributedDataParallel and not sharded;
            not under ``torch.inference_mode()``. Its Parameter objects stay the same. Masks and
            sizes are reset. Averages of the weights must be made anew.
        num_qkv_param_tokens: New number of pairs in each query, key and value projection; None
            keeps the present number. A list has a number for each block.
        num_proj_param_tokens: New number of pairs in each output projection.
        num_ffn_param_tokens: New number of pairs in each feed-forward layer.
        init: Values of new pairs; see the table. Random tokens are normal with the root mean square
            of the layer's present keys or values. ``duplicate`` needs m times the present count; δ
            has a tenth of the values' root mean square, and the δ of all copies of a pair sum to
            zero. ``released`` draws as the authors' code does (keys N(0, 0.02²), values
            N(0, (2 / (depth · √width))²)), and gives τ the default of the new count.
        gate: Gate of new pairs under ``softmax``, which starts at 0: ``learned``, or ``fixed`` and
            opened by :func:`open_gates`. None means ``learned`` for ``zero_key`` and no gate
            otherwise. All gates of a model are of one kind.
        nested: Whether an ordinary model becomes a nested one, whose smaller size is the model
            before growth. The present size of a nested model always becomes a nested size. It
            computes bit for bit what it did, if only new pairs are trained (up to rounding with
            gates).
        seed: Seed of the random numbers, which differ between layers and between old counts.
        split: Store new pairs in separate parameters, to train them differently. New pairs of an
            earlier growth become old ones.
        freeze: ``old`` trains only the new pairs: no other parameter of ``model``, not even the
            head, needs a gradient. It implies ``split``.
        optimizer: Optimizer of the model's parameters, which continues. Its schedulers go on by
            themselves, unless new parameters (of ``split`` or of the first gates) need a group of
            their own: then build a new one. An optimizer that has a state and is not given here
            fails at its next step.
        moments: ``keep`` the state of old pairs, or ``reset`` it for all pairs of layers that grow.
            New pairs start with the state of a new parameter.
        new_lr_scale: Factor on the learning rate of new pairs in ``optimizer``. A factor other than
            1 implies ``split``.

    Returns:
        ``model``.

    Raises:
        InputError: If an argument has an unknown value or does not fit the model's counts, Θ or
            nested sizes, the model is in a DistributedDataParallel or sharded, or the optimizer
            cannot continue.

    Note:
        In float32, outputs stay equal to about 1e-6, because sums of another length round
        differently. Zero keys with zero values would also be exact, but under a GELU they would
        never learn. With ``keep`` the step count of a parameter continues, and Adam does not
        correct new moments for their start at zero: the first steps of a new pair that is not
        split are up to (1 − β₁)/√(1 − β₂) times the learning rate.

    Source:
        TokenFormer, arXiv:2410.23168v2, Section 3.3 and Appendix B, for zero keys and the kept τ.
        Duplicates and the gate are from this project.
    """
    if freeze not in (None, "old"):
        raise InputError(f"freeze must be 'old' or None, but got {freeze!r}")
    layers = whole_layers(model)
    before = {name: read_tokens(layer) for name, layer in layers.items()}
    theta = next(iter(layers.values())).theta
    counts = _counts(layers, num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    grown = _grow_all(before, counts, theta, init, gate, seed, nested)
    learn_gate = _kind_of_gate(layers, grown, gate, freeze)
    growing = {
        name: own
        for name, own in grown.items()
        # A gate, or pairs that were new in the last growth and are old now.
        if own is not before[name] or is_split(layers[name]) or own.gate is not None
    }
    joined = write_tokens(
        layers,
        growing,
        appended=True,
        split=split or freeze is not None or new_lr_scale != 1,
        learn_gate=learn_gate,
        optimizer=optimizer,
        moments=moments,
    )
    record_counts(model)
    if freeze:  # before the optimizer, which takes only what is trained
        freeze_old(model)
    if optimizer is not None:
        drop_parameters(optimizer, joined)
        new = [each for name in growing for each in _parts(layers[name], new_lr_scale)]
        add_parameters(optimizer, model, new)
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
        state_dict: State dict of any model with TokenFormer blocks.
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
    suffix = f".{TOKENS[0]}"
    names = [key.removesuffix(suffix) for key in state_dict if key.endswith(suffix)]
    if not names:
        raise InputError(
            "the state dict has no parameter tokens (key_param_tokens); give one of a TokenFormer"
        )
    counts = _counts(names, num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    before = {}
    for name in names:
        keys, values, tau, gates, sizes, taus = (state_dict.get(f"{name}.{p}") for p in _PARTS)
        if tau is None:
            if missing_tau != "default":
                raise InputError(
                    f"{name} has no tau; if it was trained with {len(keys)} pairs, give "
                    "missing_tau='default' (--missing-tau default) to compute tau from this number"
                )
            tau = torch.tensor(default_tau(theta, len(keys)), device=keys.device)
        own_sizes = () if sizes is None else tuple(sizes.tolist())
        before[name] = LayerTokens(keys, values, tau, gates, own_sizes, taus)
    result = dict(state_dict)
    grown = _grow_all(before, counts, theta, init, gate, seed, nested)
    for name, own in grown.items():
        sizes = own.keys.new_tensor(own.nested, dtype=torch.long) if own.nested else None
        parts = (own.keys, own.values, own.tau, own.gate, sizes, own.nested_tau)
        for part, tensor in zip(_PARTS, parts, strict=True):
            if tensor is not None:
                result[f"{name}.{part}"] = tensor
    return result


def freeze_old(model: nn.Module) -> None:
    """Freeze all parameters of a grown model except its new pairs.

    Args:
        model: Model that was grown with ``split=True``. To train also its classifier, call
            ``requires_grad_()`` of ``model.get_classifier()`` afterwards (of both if distilled).

    Raises:
        InputError: If no layer stores new pairs in separate parameters.
    """
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
    """Set the fixed gates of new pairs.

    Args:
        model: Model that was grown with ``gate="fixed"``.
        opened: Value of the gates, from 0 (as at growth) to 1 (the pair counts fully).

    Raises:
        InputError: If ``opened`` is out of range, or no layer has a fixed gate.
    """
    if not 0 <= opened <= 1:
        raise InputError(f"opened must be from 0 to 1, but got {opened}")
    gates = [layer.gate for layer in pattention_layers(model).values()]
    fixed = [gate for gate in gates if gate is not None and not isinstance(gate, nn.Parameter)]
    if not fixed:
        raise InputError("no layer has a fixed gate: grow a softmax model with gate='fixed'")
    for gate in fixed:
        gate[gate != 1] = opened


def join_tokens(model: Model, optimizer: Optimizer | None = None, moments: str = "keep") -> Model:
    """Store the old and the new pairs of a grown model in one parameter again, in place.

    This is not necessary for saving: a state dict always contains joined pairs.

    Args:
        model: Any module with TokenFormer blocks. A joined parameter needs a gradient if one of its
            parts needed one.
        optimizer: Optimizer of the model's parameters, which continues with the joined parameters,
            in the group of the old pairs.
        moments: ``keep`` or ``reset`` the optimizer's state of these parameters.

    Returns:
        ``model``, with the same outputs.

    Raises:
        InputError: If the model has no Pattention layer or is sharded, or the optimizer's state
            cannot be carried over. Then nothing is changed.
    """
    layers = {name: each for name, each in whole_layers(model).items() if is_split(each)}
    tokens = {name: read_tokens(layer) for name, layer in layers.items()}
    masks = {name: layer.active for name, layer in layers.items()}
    joined = write_tokens(layers, tokens, appended=True, optimizer=optimizer, moments=moments)
    for name, mask in masks.items():
        layers[name].active = mask
    if optimizer is not None:
        drop_parameters(optimizer, joined)
    return model


def _counts(names: Iterable[str], qkv: Counts, proj: Counts, ffn: Counts) -> dict[str, int | None]:
    counts = dict(zip(COUNTS.values(), (qkv, proj, ffn), strict=True))
    if all(count is None for count in counts.values()):
        raise InputError(
            "no number of pairs is given: give num_qkv_param_tokens, num_proj_param_tokens or "
            "num_ffn_param_tokens"
        )
    return counts_by_layer(names, **counts)


def _grow_all(
    before: Mapping[str, LayerTokens],
    counts: Mapping[str, int | None],
    theta: str,
    init: str,
    gate: str | None,
    seed: int,
    nested: bool,
) -> dict[str, LayerTokens]:
    """Compute the tensors of all layers after growth; those of other layers are the same object."""
    if init not in INITS:
        hint = " (zero keys with zero values would never learn)" if init == "zero" else ""
        raise InputError(f"unknown init {init!r}{hint}; choose one of {', '.join(INITS)}")
    if gate not in (None, "learned", "fixed"):
        raise InputError(f"unknown gate {gate!r}; choose 'learned' or 'fixed'")
    if gate and not (find_theta(theta).has_gate and init in ("zero_key", "random")):
        raise InputError(
            f"gate is {gate!r}, but {theta} with init {init!r} needs no gate; leave it out, or use "
            "softmax with zero_key or random"
        )
    depth = max(1, sum(kind_of(name) == "proj" for name in before))
    grown = dict(before)
    for index, name in enumerate(sorted(before)):
        own, num = before[name], counts[name]
        if num is not None and num < own.num:
            raise InputError(
                f"{name} has {own.num} pairs and cannot grow to {num}; to remove pairs, use "
                "tokenformer_vit.growth.prune()"
            )
        if num is not None and num > own.num:
            generator = _generator(f"{seed} {index} {own.num}")
            grown[name] = _grow_layer(name, own, num, theta, init, gate, generator, depth)
    if any(own.gate is not None for own in grown.values()):
        # A model is rebuilt with gates in all layers or in none.
        for name, own in grown.items():
            if own.gate is None:
                grown[name] = replace(own, gate=own.keys.new_ones(own.num))
    if (nested or any(own.nested for own in before.values())) and any(
        grown[name].num > before[name].num for name in before
    ):
        if init == "duplicate":
            raise InputError(
                "init is 'duplicate', which changes the values of old pairs and with them the "
                "smaller sizes of a nested model: choose another init"
            )
        for name, own in before.items():  # the present size becomes a nested one
            taus = [] if own.nested_tau is None else [own.nested_tau]
            taus.append(own.tau.reshape(1))
            sizes = (*own.nested, own.num)
            grown[name] = replace(grown[name], nested=sizes, nested_tau=torch.cat(taus))
    return grown


def _grow_layer(
    name: str,
    own: LayerTokens,
    num: int,
    theta: str,
    init: str,
    gate: str | None,
    generator: torch.Generator,
    depth: int,
) -> LayerTokens:
    """Append pairs to the tensors of a layer."""
    if init == "duplicate":
        return _duplicate(name, own, num, theta, generator)
    new, tau, stds = num - own.num, own.tau, (None, None)
    if init == "released":
        stds = released_stds(own.values.shape[1], depth)
        tau = torch.full_like(tau, default_tau(theta, num))
    elif not (own.keys.any() and own.values.any()):
        raise InputError(
            f"all keys or all values of {name} are zero and give no scale; use init='released'"
        )
    keys = _normal_like(own.keys, new, generator, stds[0])
    if init == "zero_key":
        keys.zero_()
    values = _normal_like(own.values, new, generator, stds[1])
    gates = own.gate
    shut = gate is not None or (init == "zero_key" and find_theta(theta).has_gate)
    if shut or gates is not None:
        gates = own.keys.new_ones(own.num) if gates is None else gates
        gates = torch.cat((gates, gates.new_full((new,), 0.0 if shut else 1.0)))
    return replace(
        own,
        keys=torch.cat((own.keys, keys)),
        values=torch.cat((own.values, values)),
        tau=tau,
        gate=gates,
    )


def _duplicate(
    name: str, own: LayerTokens, num: int, theta: str, generator: torch.Generator
) -> LayerTokens:
    times, rest = divmod(num, own.num)
    if rest:
        raise InputError(
            f"{name} has {own.num} pairs and cannot be duplicated to {num}, which is not a "
            f"multiple; give {max(times, 2) * own.num}, or init='zero_key'"
        )
    spread = torch.stack(
        [_SPREAD * _normal_like(own.values, own.num, generator) for _ in range(times)]
    )
    spread -= spread.mean(dim=0)
    return LayerTokens(
        own.keys.repeat(times, 1),
        (own.values / times + spread).flatten(0, 1),
        own.tau * (default_tau(theta, num) / default_tau(theta, own.num)),
        None if own.gate is None else own.gate.repeat(times),
    )


def _generator(text: str) -> torch.Generator:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _normal_like(
    tokens: Tensor, count: int, generator: torch.Generator, std: float | None = None
) -> Tensor:
    """Draw rows with a standard deviation; default: the root mean square of ``tokens``."""
    rms = tokens.double().square().mean().sqrt()
    if std is not None:
        rms = torch.full_like(rms, std)
    drawn = torch.randn(count, tokens.shape[1], generator=generator, device="cpu")
    return (drawn.to(rms) * rms).to(tokens.dtype)


def _parts(
    layer: Pattention, new_lr_scale: float
) -> list[tuple[nn.Parameter, list[nn.Parameter], float]]:
    """List a layer's parameters, those whose settings each may take over, and the rate's factor."""
    own = dict(layer.named_parameters(recurse=False))
    return [
        (
            parameter,
            [own[name.replace("new_", "old_")], *own.values()],
            new_lr_scale if name.startswith("new_") else 1.0,
        )
        for name, parameter in own.items()
    ]


def _kind_of_gate(
    layers: Mapping[str, Pattention],
    grown: Mapping[str, LayerTokens],
    gate: str | None,
    freeze: str | None,
) -> bool | None:
    """Return whether gates will be learned; None if gates stay as they are or there are none."""
    present = [layer.gate for layer in layers.values() if layer.gate is not None]
    if gate == "fixed":
        if any(isinstance(each, nn.Parameter) for each in present):
            raise InputError(
                "gate is 'fixed', but the model's gates are learned, and opening new gates would "
                "overwrite them: give gate='learned'"
            )
        if any((each != 1).any() for each in present):
            raise InputError(
                "gate is 'fixed', but gates of the last growth are not open yet: open them first "
                "(open_gates), or grow later"
            )
        return False
    shut = any(own.gate is not None and (own.gate == 0).any() for own in grown.values())
    if freeze and shut:
        raise InputError(
            "freeze is 'old', but a learned gate is one parameter for old and new pairs: give "
            "gate='fixed', or init='duplicate'"
        )
    # Nothing would open a fixed gate that is closed now.
    return True if gate == "learned" or shut else None
