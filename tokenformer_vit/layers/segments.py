"""The pairs of a layer in two parts that are trained apart: the old ones and the new ones.

An optimiser treats a tensor as one. To freeze the old pairs, or to give them another learning rate
than the new ones, keys and values are held as two parameters each; the layer computes as before.
PyTorch's parametrizations hold them (and cannot be pickled, but copied and saved by their state
dict): ``parametrizations.key_param_tokens.original0`` are the old
keys, ``original1`` the new ones, and so for the values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tokenformer_vit.errors import InputError

from .pattention import TOKENS, Pattention, fuse_state_dict

__all__ = [
    "TOKENS",
    "fuse_state_dict",
    "fuse_tokens",
    "is_split",
    "split_tokens",
    "token_segments",
]


class _Segments(nn.Module):
    """Rows of two tensors as those of one, and back."""

    def __init__(self, num_old: int) -> None:
        super().__init__()
        self.num_old = num_old

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat((old, new))

    def right_inverse(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # Copies, so that neither is saved with the other behind it.
        return tokens[: self.num_old].clone(), tokens[self.num_old :].clone()


def is_split(layer: Pattention) -> bool:
    """Tell whether a layer holds its pairs in two parts."""
    return parametrize.is_parametrized(layer, TOKENS[0])


def split_tokens(layer: Pattention, num_old: int) -> None:
    """Hold the first pairs of a layer and the others in parameters of their own.

    Args:
        layer: Changed in place; what it computes stays.
        num_old: Number of pairs in the first part, from 1 to one less than the layer has.

    Raises:
        InputError: If the number is not within that range, or the layer is split already.
    """
    if is_split(layer):
        raise InputError("the layer is split already; fuse_tokens() undoes that")
    if not 0 < num_old < layer.num_param_tokens:
        raise InputError(
            f"num_old is {num_old}, but of a layer's {layer.num_param_tokens} pairs both parts "
            "must have some"
        )
    for name in TOKENS:
        parametrize.register_parametrization(layer, name, _Segments(num_old))


def fuse_tokens(layer: Pattention) -> None:
    """Undo :func:`split_tokens`: hold all pairs of a layer in one parameter each for keys, values.

    Args:
        layer: Changed in place; what it computes stays. A joined parameter needs a gradient if one
            of its parts did.
    """
    if is_split(layer):
        # A copy shares the class that PyTorch made for the layer; it takes the tokens off that.
        own: Any = layer
        shared = type(layer)
        own.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
        for name in TOKENS:
            parts = token_segments(layer, name)
            # Without a gradient PyTorch would leave a plain tensor, where a parameter is wanted.
            joined = nn.Parameter(torch.cat([part.detach() for part in parts]))
            joined.requires_grad_(any(part.requires_grad for part in parts))
            parametrize.remove_parametrizations(layer, name, leave_parametrized=True)
            setattr(layer, name, joined)


def token_segments(layer: Pattention, name: str) -> tuple[nn.Parameter, ...]:
    """Return the parameters that hold a layer's keys or values: one, or the old and the new.

    Args:
        layer: The layer.
        name: ``key_param_tokens`` or ``value_param_tokens``.
    """
    if not is_split(layer):
        return (getattr(layer, name),)
    parts = layer.parametrizations[name]  # type: ignore[index]
    return parts.original0, parts.original1  # type: ignore[union-attr, return-value]
