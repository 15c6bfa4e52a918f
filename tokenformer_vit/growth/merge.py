"""Merge two models of one shape into one model with the parameter tokens of both."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import timm.layers
import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.drop_path import DropPath
from tokenformer_vit.models import TokenFormerDecoder
from tokenformer_vit.ops import find_theta

from .tokens import (
    LayerTokens,
    check_stored,
    check_unsharded,
    pattention_layers,
    read_tokens,
    record_counts,
    trained_later,
    write_tokens,
)

# Packages whose modules have settings as plain attributes. Attributes of wrappers may be anything.
_KNOWN = ("tokenformer_vit.layers", "tokenformer_vit.models", "timm.", "torch.nn.")
# These do nothing in evaluation, and a model does not have them if the rate is 0.
_DROPS = (nn.Dropout, DropPath, timm.layers.DropPath, timm.layers.PatchDropout)
# Settings of initialization, training or speed, and what the last batch left: they do not change
# outputs.
_FREE = frozenset(
    {
        "backend",
        "distilled_training",
        "drop_prob",
        "feat_shape",
        "fix_init",
        "fused_attn",
        "grad_checkpointing",
        "init_gain",
        "init_tau",
        "init_values",
        "inplace",
        "joint",
        "key_init_scale",
        "key_init_std",
        "nested",
        "num_ffn_param_tokens",
        "num_param_tokens",
        "num_proj_param_tokens",
        "num_qkv_param_tokens",
        "of_model",
        "pattention_args",
        "sizes",
        "training",
        "value_init_std",
        "weight_init_mode",
    }
)

Model = TypeVar("Model", bound=nn.Module)


@trained_later
@torch.no_grad()
def merge(model_a: Model, model_b: nn.Module, ancestor: nn.Module | None = None) -> Model:
    """Join the parameter tokens of two models layer by layer; average everything else.

    Notation: Θ computes h = exp(A) (times the gate) or h = gelu(A) from the scores A, and divides
    each row by r. r is ‖h‖₁/τ for ``softmax``, ‖h‖₁/τ + eps for ``gelu_l1``,
    √(‖h‖₂²/τ² + eps) for ``gelu_l2_post``, and √(‖A‖₂²/τ² + eps) for ``gelu_l2`` and
    ``gelu_tanh_l2``. The weights are h/r; for the last two they are gelu(A/r). p is 1 for the first
    two and 2 for the others. A layer of model m computes O_m = weights · V_m. The formulas hold for
    the same input tokens in all models.

    Without an ancestor, the merged layer has the keys [K_a; K_b], the values [V_a; V_b]/2 and
    τᵖ = τ_aᵖ + τ_bᵖ. Its divisor is a mean of both divisors,
    rᵖ = (τ_aᵖ r_aᵖ + τ_bᵖ r_bᵖ)/(τ_aᵖ + τ_bᵖ), and its output is

    - O = (r_a O_a + r_b O_b)/(2r) for ``softmax``, ``gelu_l1`` and ``gelu_l2_post``: the model
      with the larger scores has more weight. If τ_a = τ_b, the two weights sum to 1 for p = 1, and
      to (r_a + r_b)/√(2 r_a² + 2 r_b²), which is from 0.707 to 1, for p = 2.
    - O = ½ gelu(A_a/r) V_a + ½ gelu(A_b/r) V_b for ``gelu_l2`` and ``gelu_tanh_l2``: the mean of
      both layers, with scores multiplied by r_m/r before the GELU.

    If r_a = r_b, this is the mean (O_a + O_b)/2. Therefore a model that is merged with itself keeps
    its outputs, for every Θ and eps.

    With an ancestor, whose pairs are the first pairs of both models, the merged layer has these
    pairs once, then the new pairs of model_a, then the new pairs of model_b. Values do not change,
    and τ is the ancestor's. The divisor is rᵖ = r_aᵖ + r_bᵖ − r_0ᵖ, and the output is

    - O = (r_a O_a + r_b O_b − r_0 O_0)/r for ``softmax``, ``gelu_l1`` and ``gelu_l2_post``: new
      pairs of either model add their exact sum Σ h v to the ancestor's, under a common divisor.
    - the sum of gelu(A_i/r) v_i over the pairs of all three for ``gelu_l2``, ``gelu_tanh_l2``.

    A model without new pairs has no effect: merging it gives the other model.

    Args:
        model_a: TokenFormer, or a module that holds its blocks. No model is changed; the merged
            model is a copy of this one.
        model_b: Model with the same depth, widths, heads, Θ, eps, classes and other settings. Its
            number of pairs may differ. If only one model has gates, the gates of the other are 1.
        ancestor: Model from which both models were grown, with its pairs frozen.

    Returns:
        A new model with all pairs in one parameter, without nested sizes. Stem, positions, norms,
        scales and head are the means of both models.

    Raises:
        InputError: If the models do not fit each other, one is sharded, tensors of a layer of
            model_a are computed from others, or a layer does not begin with the pairs and τ of the
            ancestor, bit for bit.

    Note:
        √(τ_a² + τ_b²) is rounded to float32, by 6e-8 at most. The formulas hold for each layer; the
        output of the whole model is not a mean or a sum, because layers follow each other.

    Source:
        This project. Appending pairs is from TokenFormer, arXiv:2410.23168v2, Section 3.3. With an
        ancestor, this is the task arithmetic of arXiv:2212.04089 on pairs instead of weights.
    """
    for model in (model_a, model_b, ancestor):
        if model is not None:
            check_unsharded(model)
    layers_a, layers_b = pattention_layers(model_a), pattention_layers(model_b)
    check_stored(layers_a)
    _check_layers(layers_a, layers_b, "model_b")
    others_a, others_b = _others(model_a, layers_a), _others(model_b, layers_b)
    _check_others(others_a, others_b)
    _check_settings(model_a, model_b, "model_b")
    layers_0 = None
    if ancestor is not None:
        layers_0 = pattention_layers(ancestor)
        _check_layers(layers_a, layers_0, "the ancestor")
        _check_settings(model_a, ancestor, "the ancestor")

    merged = copy.deepcopy(model_a)
    for name, layer in pattention_layers(merged).items():
        a = read_tokens(layer)
        b = _moved_to(read_tokens(layers_b[name]), a.keys)
        if layers_0 is None:
            tokens = _side_by_side(a, b, find_theta(layer.theta).norm_order)
        else:
            old = _moved_to(read_tokens(layers_0[name]), a.keys)
            tokens = _appended(old, a, b, name)
        gate = layers_b[name].gate if layer.gate is None else layer.gate
        write_tokens(layer, tokens, learn_gate=isinstance(gate, nn.Parameter))
    for name, tensor in _others(merged, layers_a).items():
        if tensor.is_floating_point():
            tensor.copy_((others_a[name] + others_b[name].to(tensor)) / 2)
    record_counts(merged)
    return merged


def _side_by_side(a: LayerTokens, b: LayerTokens, order: int) -> LayerTokens:
    tau = (a.tau.double() ** order + b.tau.double() ** order) ** (1 / order)
    return LayerTokens(
        torch.cat((a.keys, b.keys)), torch.cat((a.values, b.values)) / 2, tau, _gates(a, b)
    )


def _appended(old: LayerTokens, a: LayerTokens, b: LayerTokens, name: str) -> LayerTokens:
    """Append the new pairs of two models to the ancestor's pairs, with which both must begin."""
    num = old.num
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
    new_a, new_b = (
        LayerTokens(
            own.keys[num:],
            own.values[num:],
            own.tau,
            None if own.gate is None else own.gate[num:],
        )
        for own in (a, b)
    )
    parts = (old, new_a, new_b)
    return LayerTokens(
        torch.cat([part.keys for part in parts]),
        torch.cat([part.values for part in parts]),
        old.tau,
        _gates(*parts),
    )


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


def _others(model: nn.Module, layers: Mapping[str, Pattention]) -> dict[str, Tensor]:
    """Return all tensors of a model except the parameter tokens, by name."""
    prefixes = tuple(f"{name}." for name in layers)
    return {n: t for n, t in model.state_dict().items() if not n.startswith(prefixes)}


def _check_layers(a: Mapping[str, Pattention], b: Mapping[str, Pattention], model: str) -> None:
    if a.keys() != b.keys():
        name = next(name for name in [*a, *b] if name not in a or name not in b)
        raise InputError(
            f"model_a has {len(a)} Pattention layers, {model} has {len(b)}, and only one has "
            f"{name}; merge models with the same blocks"
        )
    for name in a:
        for what in ("in_features", "out_features", "theta", "eps"):
            ours, theirs = getattr(a[name], what), getattr(b[name], what)
            if ours != theirs:
                raise InputError(
                    f"{name}: {what} is {ours} in model_a and {theirs} in {model}; merge models "
                    "that differ only in pairs and weights"
                )


def _check_others(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    for name in [*a, *b]:
        ours, theirs = (
            str(tuple(some[name].shape)) if name in some else "absent" for some in (a, b)
        )
        if ours != theirs:
            raise InputError(
                f"{name} is {ours} in model_a and {theirs} in model_b; merge models with "
                "equal shapes outside the pairs, such as the same number of classes"
            )


def _check_settings(a: nn.Module, b: nn.Module, model: str) -> None:
    """Check that two models have the same settings, such as their numbers of heads."""
    ours, theirs = _settings(a), _settings(b)
    for name in [*ours, *theirs]:
        mine, other = ours.get(name, "absent"), theirs.get(name, "absent")
        if mine != other:
            raise InputError(
                f"{name} is {mine} in model_a and {other} in {model}; merge models that differ "
                "only in pairs and weights"
            )


def _settings(model: nn.Module) -> dict[str, Any]:
    """Return the settings that affect a model's outputs in evaluation, by full name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, (*_DROPS, nn.Identity)):
            continue
        prefix = f"{name}." if name else ""
        if isinstance(module, TokenFormerDecoder):
            own = vars(module.shape)
        elif type(module).__module__.startswith(_KNOWN):
            own = vars(module)
        else:
            continue
        kind = Pattention if isinstance(module, Pattention) else type(module)
        found[f"type of {name or 'the model'}"] = kind.__name__
        for key, value in own.items():
            plain = isinstance(value, bool | int | float | str | tuple)
            if plain and key not in _FREE and not key.startswith("_"):
                found[prefix + key] = value
    return found
