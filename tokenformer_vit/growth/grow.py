"""Growth: append pairs of parameter tokens to a trained model without changing its outputs."""

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
from tokenformer_vit.layers.arguments import COUNTS, Counts
from tokenformer_vit.layers.segments import TOKENS, fuse_state_dict, is_split, token_segments
from tokenformer_vit.ops import default_tau, find_theta

from .initial_pairs import count_blocks, grow_layer
from .nested import keep_size
from .new_pairs import freeze_old
from .optimizer import carry_over, check_optimizer, kept_order
from .tokens import (
    LayerTokens,
    check_rebuildable,
    counts_by_layer,
    pattention_layers,
    read_tokens,
    record_counts,
    trained_later,
    use_all_pairs,
    write_tokens,
)

# Tensors of a layer in a state dict.
_PARTS = (*TOKENS, "tau", "gate", "nested_sizes", "nested_tau")

Model = TypeVar("Model", bound=nn.Module)


@trained_later
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
            the arguments from which timm rebuilds it get the new counts. It uses all pairs then:
            masks and sizes are reset. Take it out of a DistributedDataParallel, and
            wrap it again afterwards.
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
            every layer; without ``split``, old pairs that were frozen are trained again with them.
        freeze: ``old`` trains only the new pairs: no other parameter of ``model``, not even the
            head, needs a gradient. It implies ``split``.
        optimizer: Optimizer of the model's parameters, which continues with the new parameters. Any
            other optimizer of these parameters raises InputError at its next step: build a new one.
            Also build a new learning-rate scheduler (PyTorch's or timm's), because the old one does
            not know the groups for gates and for ``new_lr_scale``; a step after it has left one of
            them out raises InputError. Also build a new average of the weights (timm's
            ``ModelEmaV3``), because its tensors have the old shapes.
        moments: What to do with the optimizer's state; see :func:`carry_over`.
        new_lr_scale: Factor on the learning rate of new pairs in ``optimizer``. A factor other than
            1 implies ``split``.
        noise: Standard deviation of normal noise that is added to the old pairs of layers that
            grow, relative to the root mean square of their keys or values. It changes the outputs
            of the model and of its nested sizes.

    Returns:
        ``model``.

    Raises:
        InputError: If a count is not whole or smaller than the present one, a list of counts does
            not have one for each block, an argument has an unknown value, ``init`` does not fit the
            model's Θ, counts or nested sizes, the parameters are on the meta device, ``model`` is
            sharded or in a DistributedDataParallel, tensors of a layer are computed from others,
            two layers share a parameter, or ``model`` is only a part of a model, whose other blocks
            would keep their counts.

    Note:
        In float32, outputs stay equal to about 1e-6, because sums of another length round
        differently. On a CPU most stay equal bit for bit if the counts are multiples of 16. New
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
    if not new_lr_scale > 0:
        raise InputError(f"new_lr_scale must be above 0, but got {new_lr_scale}")
    layers = pattention_layers(model)
    counts = _counts(layers, num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
    check_rebuildable(model, layers)
    how = {"init": init, "gate": gate, "seed": seed, "noise": noise}
    grow_one = partial(grow_layer, **how, depth=count_blocks(layers))
    before = {name: read_tokens(layer) for name, layer in layers.items()}
    grown = {
        name: grow_one(name, index, before[name], counts[name], layers[name].theta)
        for index, name in enumerate(sorted(layers))
    }
    grown = _nested(_gate_alike(grown), before, nested, init)
    learn_gate = _kind_of_gate(layers, grown, gate)
    if freeze and learn_gate and _has_shut_gates(grown):
        raise InputError(
            "freeze is 'old', but a learned gate is one parameter for old and new pairs: give "
            "gate='fixed', or init='duplicate'"
        )
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
    use_all_pairs(layers.values())
    with kept_order(optimizer, model):
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
    grow_one = partial(grow_layer, init=init, gate=gate, seed=seed, depth=count_blocks(names))
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
            tau = torch.tensor(default_tau(theta, len(keys)), device=keys.device)
        own_sizes = () if sizes is None else tuple(sizes.tolist())
        tokens = before[name] = LayerTokens(keys, values, tau, gates, own_sizes, taus)
        grown[name] = grow_one(name, index, tokens, counts[name], theta)
    for name, tokens in _nested(_gate_alike(grown), before, nested, init).items():
        own, keys = tokens.nested, tokens.keys
        sizes = keys.new_tensor(own, dtype=torch.long) if own else None
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
    return True if gate == "learned" or _has_shut_gates(grown) else None


def _has_shut_gates(layers: Mapping[str, LayerTokens]) -> bool:
    return any(each.gate is not None and (each.gate == 0).any() for each in layers.values())


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
