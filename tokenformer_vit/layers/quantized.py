"""Pattention with quantised parameter tokens, for inference."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import theta_weights

from .pattention import Pattention


class QuantizedPattention(nn.Module):
    """Pattention whose keys and values are the weights of two linear layers.

    Libraries that quantise linear layers can then quantise both. The layer has the pairs that
    ``layer`` uses now, and their number cannot change.

    Args:
        layer: Layer to copy. Its parameters get no gradient here.

    Attributes:
        keys: Linear layer C_in -> P; its weight is K_P.
        values: Linear layer P -> C_out; its weight is V_Pᵀ.

    Shape:
        (..., C_in) -> (..., C_out), of the input's dtype.

    Note:
        Θ is computed in float32, as in :class:`Pattention`.
    """

    tau: Tensor
    gate: Tensor | None

    @torch.no_grad()
    def __init__(self, layer: Pattention) -> None:
        super().__init__()
        keys, values, gate, tau = layer.used_tokens()
        self.theta, self.eps = layer.theta, layer.eps
        self.keys, self.values = _linear(keys), _linear(values.t())
        self.register_buffer("tau", tau.clone())
        self.register_buffer("gate", None if gate is None else gate.clone())
        self.train(layer.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedPattention":
        weight, tau = self.keys.weight, self.tau
        moved = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
        if moved.dtype != weight.dtype:
            raise InputError(
                f"a quantised model cannot be cast to {moved.dtype}: load the original model, cast "
                "it, and quantise it last"
            )
        if moved.device != weight.device:  # torchao has no cast to the same dtype
            super()._apply(fn, recurse)
            self.tau = tau.to(moved.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C_in) tokens to (..., C_out)."""
        dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):  # int4 takes one dtype alone
            scores = self.keys(x.to(self.keys.weight.dtype))  # (..., P)
            weights = theta_weights(scores, self.theta, self.tau, self.eps, self.gate)
            return self.values(weights).to(dtype)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return f"theta={self.theta!r}"


def check_plain(model: nn.Module) -> None:
    """Check that the parameter tokens of a model can be changed and saved.

    Args:
        model: Any module.

    Raises:
        InputError: If they are quantised, or an adapter of peft wraps them.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantizedPattention):
            raise InputError(
                "the model is quantised, so its pairs cannot be changed or saved by this package: "
                "load the original model, change it, and quantise it last"
            )
        # peft's wrapper keeps the layer under this name.
        if isinstance(module, Pattention) and name.rpartition(".")[2] == "base_layer":
            raise InputError(
                "an adapter of peft wraps the pairs of the model, so they cannot be changed or "
                "saved by this package: merge the adapter first (merge_and_unload), or load the "
                "original model"
            )


def _linear(weight: Tensor) -> nn.Linear:
    """Return a linear layer with a copy of a (C_out, C_in) weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    copy = weight.clone(memory_format=torch.contiguous_format)
    layer.weight = nn.Parameter(copy, requires_grad=False)
    return layer
