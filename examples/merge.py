"""Merge two models of one shape into one with the parameter tokens of both.

A layer of the merged model has the keys [K_a; K_b], the values [V_a; V_b] / 2, and τᵖ = τ_aᵖ +
τ_bᵖ with the p of Θ's norm. Everything outside of the layers is the mean of both. A model that is
merged with itself keeps its outputs. After two trainings, train the merged model further.
"""

import copy

import timm
import torch
from torch import nn

import tokenformer_vit  # noqa: F401, registers the models
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.growth.resize import LayerState, read_state, write_states
from tokenformer_vit.ops import find_theta


@torch.no_grad()
def merge(model_a: nn.Module, model_b: nn.Module) -> nn.Module:
    """Return a new model with the pairs of two models of the same class and arguments."""
    merged, states = copy.deepcopy(model_a), {}
    others = pattention_layers(model_b)
    for name, layer in pattention_layers(merged).items():
        a, b = read_state(layer), read_state(others[name])
        order = find_theta(layer.theta).norm_order
        assert layer.theta == others[name].theta
        tau = (a.tau**order + b.tau**order) ** (1 / order) if order else a.tau
        rows = {row: torch.cat((data, b.rows[row])) for row, data in a.rows.items()}
        rows["value_param_tokens"] /= 2
        states[name] = LayerState(rows, tau)
    theirs = model_b.state_dict()
    for name, tensor in merged.state_dict().items():
        if name.endswith(".bias") or not name.startswith(tuple(f"{layer}." for layer in states)):
            tensor.copy_((tensor + theirs[name]) / 2)
    write_states(merged, states)
    return merged


@torch.no_grad()
def main() -> None:
    """Merge the model in the package with itself, which keeps its outputs."""
    model = timm.create_model("tokenformer_cifar10_micro", pretrained=True).eval()
    images = torch.randn(64, 3, 32, 32)
    merged = merge(model, model)
    counts = [sum(p.numel() for p in each.parameters()) for each in (model, merged)]
    change = (merged(images) - model(images)).norm() / model(images).norm()
    print(f"parameters: {counts[0]:,} -> {counts[1]:,}; change of the outputs: {change:.1e}")


if __name__ == "__main__":
    main()
