"""Merge two models of one shape into one model with the parameter tokens of both."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import find_theta

from .resize import LayerTokens, pattention_layers, read_tokens, record_counts, write_tokens

Model = TypeVar("Model", bound=nn.Module)
# Arguments that may differ: what shapes tell, and what does not change outputs in evaluation.
_FREE = (
    "num_",
    "nested",
    "pattention_args",
    "img_size",
    "dynamic_img_",
    "patch_size",
    "in_chans",
    "embed_dim",
    "depth",
    "weight_init",
    "fix_init",
    "init_values",
    "drop_path_",
)


@torch.no_grad()
def merge(model_a: Model, model_b: nn.Module, ancestor: nn.Module | None = None) -> Model:
    """Join the parameter tokens of two models layer by layer; average everything else.

    Without an ancestor, the merged layer has the keys [K_a; K_b], the values [V_a; V_b]/2 and
    τᵖ = τ_aᵖ + τ_bᵖ. A model that is merged with itself keeps its outputs. With an ancestor, whose
    pairs are the first pairs of both models, the merged layer has these pairs once, then the new
    pairs of model_a, then those of model_b; values do not change, and τ is the ancestor's. README.md
    of this package has the formulas of the outputs.

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
    merged = copy.deepcopy(model_a)
    layers, layers_b = pattention_layers(merged), pattention_layers(model_b)
    layers_0 = None if ancestor is None else pattention_layers(ancestor)
    for other, name in ((model_b, "model_b"), (ancestor, "the ancestor")):
        if other is not None:
            _check_alike(model_a, other, name)
    tokens, learned = {}, False
    for name, layer in layers.items():
        a = read_tokens(layer)
        b = _moved_to(read_tokens(layers_b[name]), a.keys)
        if layers_0 is None:
            tokens[name] = _side_by_side(a, b, find_theta(layer.theta).norm_order)
        else:
            tokens[name] = _appended(_moved_to(read_tokens(layers_0[name]), a.keys), a, b, name)
        learned = isinstance(
            layers_b[name].gate if layer.gate is None else layer.gate, nn.Parameter
        )
    others = _others(model_b)
    for name, tensor in _others(merged).items():
        if tensor.is_floating_point():
            tensor.copy_((tensor + others[name].to(tensor)) / 2)
    write_tokens(layers, tokens, learn_gate=learned)
    record_counts(merged)
    return merged


def _side_by_side(a: LayerTokens, b: LayerTokens, order: int) -> LayerTokens:
    tau = (a.tau.double() ** order + b.tau.double() ** order) ** (1 / order)
    return LayerTokens(
        torch.cat((a.keys, b.keys)), torch.cat((a.values, b.values)) / 2, tau, _gates(a, b)
    )


def _appended(old: LayerTokens, a: LayerTokens, b: LayerTokens, name: str) -> LayerTokens:
    """Append the new pairs of two models to the ancestor's pairs, with which both must begin."""
    num, parts = old.num, [old]
    for model, own in (("model_a", a), ("model_b", b)):
        for what, theirs, mine in (
            ("keys", old.keys, own.keys[:num]),
            ("values", old.values, own.values[:num]),
            ("gates", _opened(old), _opened(own)[:num]),
            ("τ", old.tau, own.tau),
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
    if all(part.gate is None for part in parts):
        return None
    return torch.cat([_opened(part) for part in parts])


def _moved_to(tokens: LayerTokens, like: Tensor) -> LayerTokens:
    gate = None if tokens.gate is None else tokens.gate.to(like)
    tau = tokens.tau.to(like.device)  # its dtype is more precise than bfloat16
    return LayerTokens(tokens.keys.to(like), tokens.values.to(like), tau, gate)


def _others(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model except those of its Pattention layers, by name."""
    prefixes = tuple(f"{name}." for name in pattention_layers(model))
    return {n: t for n, t in model.state_dict().items() if not n.startswith(prefixes)}


def _check_alike(a: nn.Module, b: nn.Module, name: str) -> None:
    """Check that models differ only in weights and in numbers of pairs."""
    kinds = ("in_features", "out_features", "theta", "eps")
    ours, theirs = (
        {
            **{
                f"{layer}.{kind}": getattr(each, kind)
                for layer, each in pattention_layers(model).items()
                for kind in kinds
            },
            **{f"the shape of {key}": tuple(t.shape) for key, t in _others(model).items()},
            **_arguments(model),
        }
        for model in (a, b)
    )
    for key in [*ours, *theirs]:
        mine, other = (found.get(key, "absent") for found in (ours, theirs))
        if mine != other:
            raise InputError(
                f"{key} is {mine} in model_a and {other} in {name}; merge models that differ only "
                "in pairs and weights"
            )


def _arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of a model that affect its outputs and not its shapes."""
    found: dict[str, Any] = {}
    for module in model.modules():
        if hasattr(module, "record_param_tokens"):
            config = getattr(module, "config", None)
            if hasattr(config, "lm_config"):
                config = config.lm_config()
            found |= getattr(module, "_model_args", {}) if config is None else vars(config)
    return {
        name: value
        for name, value in found.items()
        if name == "num_heads" or not name.startswith(_FREE) and not name.endswith("drop_rate")
    }
