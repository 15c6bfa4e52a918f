"""The pairs of a layer in two parts that are trained apart: the old ones and the new ones.

An optimiser treats a tensor as one. To freeze the old pairs, or to give them another learning rate
than the new ones, keys and values are held as two parameters each; the layer computes as before.
PyTorch's parametrizations hold them: ``parametrizations.key_param_tokens.original0`` are the old
keys, ``original1`` the new ones, and so for the values.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tokenformer_vit.errors import InputError

from .pattention import Pattention

TOKENS = ("key_param_tokens", "value_param_tokens")
_SEGMENT = re.compile(rf"(.*\.|)parametrizations\.({'|'.join(TOKENS)})\.original([01])")


class _Segments(nn.Module):
    """Rows of two tensors as those of one, and back."""

    def __init__(self, num_old: int) -> None:
        super().__init__()
        self.num_old = num_old

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat((old, new))

    def right_inverse(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[: self.num_old], tokens[self.num_old :]


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
    hooks: Any = layer._load_state_dict_pre_hooks
    if all(hook.hook is not _split_loaded for hook in hooks.values()):
        layer.register_load_state_dict_pre_hook(_split_loaded)


def _split_loaded(
    layer: Pattention, state_dict: dict[str, Tensor], prefix: str, *args: Any
) -> None:
    """Let a split layer load a state dict that holds its tokens in one piece."""
    if not is_split(layer):
        return
    for name in TOKENS:
        if (tokens := state_dict.pop(prefix + name, None)) is not None:
            num_old = len(token_segments(layer, name)[0])
            for index, part in enumerate((tokens[:num_old], tokens[num_old:])):
                state_dict[f"{prefix}parametrizations.{name}.original{index}"] = part


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


def fuse_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the two parts of split layers under the names that they have otherwise.

    Args:
        state_dict: Of a model; one without split layers is returned as it is.

    Returns:
        The same tensors in the same order, joined ones at the place of their first part.
    """
    fused = {}
    for key, tensor in state_dict.items():
        part = _SEGMENT.fullmatch(key)
        if part is None:
            fused[key] = tensor
        elif part[3] == "0":
            fused[part[1] + part[2]] = torch.cat((tensor, state_dict[f"{key[:-1]}1"]))
    return fused
