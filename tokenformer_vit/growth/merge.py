"""Merge two models of one shape into one model with the parameter tokens of both."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import find_theta

from .resize import LayerTokens, Model, pattention_layers, read_tokens, write_tokens

# Arguments that outputs of equal shapes in evaluation do not depend on, by their first letters.
_FREE = ("num_p", "num_q", "num_f", "num_c", "nested", "pattention_args", "img_size", "dynamic_img")
_FREE += ("in_chans", "weight_init", "fix_init", "init_values", "drop_", "pos_drop", "patch_drop")


@torch.no_grad()
def merge(model_a: Model, model_b: nn.Module, ancestor: nn.Module | None = None) -> Model:
    """Join the parameter tokens of two models layer by layer; average everything else.

    Without an ancestor, a layer has the keys [K_a; K_b], the values [V_a; V_b]/2 and τᵖ = τ_aᵖ +
    τ_bᵖ; a model that is merged with itself keeps its outputs. With an ancestor, a layer has its
    pairs and τ, then the new pairs of both models. The README has the formulas of the outputs.

    Args:
        model_a: Any module with TokenFormer blocks; the merged model is a copy of it.
        model_b: Model of the same class and arguments. Its number of pairs may differ. If only one
            model has gates, the gates of the other are 1.
        ancestor: Model from which both models were grown, with its pairs frozen.

    Returns:
        A new, ordinary model. Stem, positions, norms, scales and head are the means of both.

    Raises:
        InputError: If the models do not fit, or a layer does not begin with the pairs and τ of
            the ancestor, bit for bit.
    """
    for other, name in ((model_b, "model_b"), (ancestor, "the ancestor")):
        ours, theirs = _facts(model_a), _facts(model_a if other is None else other)
        for key in [*ours, *theirs]:
            mine, its = (facts.get(key, "absent") for facts in (ours, theirs))
            if mine != its:
                raise InputError(
                    f"{key} is {mine} in model_a and {its} in {name}; merge models that differ "
                    "only in pairs and weights"
                )
    merged = copy.deepcopy(model_a)
    layers, layers_b = pattention_layers(merged), pattention_layers(model_b)
    layers_0 = {} if ancestor is None else pattention_layers(ancestor)
    tokens, learned = {}, False
    for name, layer in layers.items():
        a, b = read_tokens(layer), read_tokens(layers_b[name])
        parts, tau, share = [_rows(a), _rows(b)], a.tau, 1.0
        if ancestor is None:
            if order := find_theta(layer.theta).norm_order:
                tau = (tau.double() ** order + b.tau.to(tau).double() ** order) ** (1 / order)
            share = 0.5
        else:
            old = read_tokens(layers_0[name])
            new = (_new_rows(a, old, f"{name}: model_a"), _new_rows(b, old, f"{name}: model_b"))
            parts = [_rows(old), *new]
        keys, values, gate = (
            torch.cat([rows.to(a.keys) for rows in of_parts])
            for of_parts in zip(*parts, strict=True)
        )
        if a.gate is None and b.gate is None:
            gate = None
        tokens[name] = LayerTokens(keys, share * values, tau, gate)
        learned |= any(isinstance(own.gate, nn.Parameter) for own in (layer, layers_b[name]))
    others = _others(model_b)
    for name, tensor in _others(merged).items():
        if tensor.is_floating_point():
            tensor.copy_((tensor + others[name].to(tensor)) / 2)
    write_tokens(merged, tokens, learn_gate=learned)
    return merged


def _rows(own: LayerTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and gates, which are 1 in a layer without gates."""
    return own.keys, own.values, own.keys.new_ones(own.num) if own.gate is None else own.gate


def _new_rows(own: LayerTokens, old: LayerTokens, name: str) -> list[Tensor]:
    """Return the pairs after those of the ancestor, with which a layer must begin."""
    begins = [rows[: old.num] for rows in _rows(own)]
    pairs = zip((*begins, own.tau), (*_rows(old), old.tau), strict=True)
    for what, (mine, theirs) in zip(("keys", "values", "gates", "τ"), pairs, strict=True):
        if not torch.equal(mine, theirs.to(mine)):
            raise InputError(
                f"{name} does not begin with the {old.num} pairs of the ancestor, because their "
                f"{what} differ: freeze old pairs after growth, or merge without an ancestor"
            )
    return [rows[old.num :] for rows in _rows(own)]


def _others(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model except those of its Pattention layers, by name."""
    prefixes = tuple(f"{name}." for name in pattention_layers(model))
    return {n: t for n, t in model.state_dict().items() if not n.startswith(prefixes)}


def _facts(model: nn.Module) -> dict[str, Any]:
    """Return what models must have in common: arguments, layers, and shapes outside the pairs."""
    facts: dict[str, Any] = {}
    for module in model.modules():
        if hasattr(module, "record_param_tokens"):
            config: Any = getattr(module, "config", None)
            config = config.lm_config() if hasattr(config, "lm_config") else config
            given = getattr(module, "_model_args", {}) if config is None else vars(config)
            facts |= {key: value for key, value in given.items() if not key.startswith(_FREE)}
    for name, layer in pattention_layers(model).items():
        for what in ("in_features", "out_features", "theta", "eps"):
            facts[f"{name}.{what}"] = getattr(layer, what)
    return facts | {f"the shape of {key}": [*t.shape] for key, t in _others(model).items()}
