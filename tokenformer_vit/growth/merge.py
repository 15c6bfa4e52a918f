"""Merge two models of one shape into one model with the parameter tokens of both."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import find_theta

from .resize import LayerTokens, pattention_layers, read_tokens, record_counts, write_tokens

Model = TypeVar("Model", bound=nn.Module)
# Arguments that outputs of equal shapes in evaluation do not depend on, by their first letters.
_FREE = ("num_p", "num_q", "num_f", "num_c", "nested", "pattention_args", "img_size", "dynamic_img")
_FREE += ("in_chans", "weight_init", "fix_init", "init_values", "drop_", "pos_drop", "patch_drop")


@torch.no_grad()
def merge(model_a: Model, model_b: nn.Module, ancestor: nn.Module | None = None) -> Model:
    """Join the parameter tokens of two models layer by layer; average everything else.

    Without an ancestor, the merged layer has the keys [K_a; K_b], the values [V_a; V_b]/2 and
    τᵖ = τ_aᵖ + τ_bᵖ. A model that is merged with itself keeps its outputs. With an ancestor, whose
    pairs are the first pairs of both models, the merged layer has these pairs once, then the new
    pairs of model_a, then those of model_b; values do not change, and τ is the ancestor's. The
    README has the formulas of the outputs.

    Args:
        model_a: TokenFormer, or a module that holds its blocks. No model is changed; the merged
            model is a copy of this one.
        model_b: Model of the same class and arguments. Its number of pairs may differ. If only one
            model has gates, the gates of the other are 1.
        ancestor: Model from which both models were grown, with its pairs frozen.

    Returns:
        A new model with all pairs in one parameter, without nested sizes. Stem, positions, norms,
        scales and head are the means of both models.

    Raises:
        InputError: If the models do not fit each other, or a layer does not begin with the pairs
            and τ of the ancestor, bit for bit.

    Source:
        This project. Appending pairs is from TokenFormer, arXiv:2410.23168v2, Section 3.3. With an
        ancestor, this is the task arithmetic of arXiv:2212.04089 on pairs instead of weights.
    """
    for other, name in ((model_b, "model_b"), (ancestor, "the ancestor")):
        if other is not None:
            _check_alike(_facts(model_a), _facts(other), name)
    merged = copy.deepcopy(model_a)
    layers, layers_b = pattention_layers(merged), pattention_layers(model_b)
    layers_0 = {} if ancestor is None else pattention_layers(ancestor)
    gates = [layer.gate for name in layers for layer in (layers_b[name], layers[name])]
    tokens = {}
    for name, layer in layers.items():
        like = layer.key_param_tokens
        a, b = (_moved_to(read_tokens(each), like) for each in (layer, layers_b[name]))
        if ancestor is None:
            order = find_theta(layer.theta).norm_order
            tau = (a.tau.double() ** order + b.tau.double() ** order) ** (1 / order)
            values = torch.cat((a.values, b.values)) / 2
            tokens[name] = LayerTokens(torch.cat((a.keys, b.keys)), values, tau, _gates(a, b))
        else:
            tokens[name] = _appended(_moved_to(read_tokens(layers_0[name]), like), a, b, name)
    others = _others(model_b)
    for name, tensor in _others(merged).items():
        if tensor.is_floating_point():
            tensor.copy_((tensor + others[name].to(tensor)) / 2)
    learned = any(isinstance(gate, nn.Parameter) for gate in gates)
    write_tokens(layers, tokens, learn_gate=learned)
    record_counts(merged)
    return merged


def _appended(old: LayerTokens, a: LayerTokens, b: LayerTokens, name: str) -> LayerTokens:
    """Append the new pairs of two models to the ancestor's pairs, with which both must begin."""
    num, parts = old.num, [old]
    for model, own in (("model_a", a), ("model_b", b)):
        for what, mine, theirs in (
            ("keys", own.keys[:num], old.keys),
            ("values", own.values[:num], old.values),
            ("gates", _opened(own)[:num], _opened(old)),
            ("τ", own.tau, old.tau),
        ):
            if not torch.equal(theirs, mine):
                raise InputError(
                    f"{name}: {model} does not begin with the {num} pairs of the ancestor, because "
                    f"their {what} differ: freeze old pairs after growth, or merge without an "
                    "ancestor"
                )
        gate = None if own.gate is None else own.gate[num:]
        parts.append(LayerTokens(own.keys[num:], own.values[num:], own.tau, gate))
    keys, values = (torch.cat([getattr(p, what) for p in parts]) for what in ("keys", "values"))
    return LayerTokens(keys, values, old.tau, _gates(*parts))


def _opened(tokens: LayerTokens) -> Tensor:
    return tokens.keys.new_ones(tokens.num) if tokens.gate is None else tokens.gate


def _gates(*parts: LayerTokens) -> Tensor | None:
    gated = any(part.gate is not None for part in parts)
    return torch.cat([_opened(part) for part in parts]) if gated else None


def _moved_to(own: LayerTokens, like: Tensor) -> LayerTokens:
    gate = None if own.gate is None else own.gate.to(like)
    # The dtype of τ is more precise than bfloat16.
    return LayerTokens(own.keys.to(like), own.values.to(like), own.tau.to(like.device), gate)


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


def _check_alike(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    for key in [*ours, *theirs]:
        mine, other = (facts.get(key, "absent") for facts in (ours, theirs))
        if mine != other:
            raise InputError(
                f"{key} is {mine} in model_a and {other} in {name}; merge models that differ only "
                "in pairs and weights"
            )
