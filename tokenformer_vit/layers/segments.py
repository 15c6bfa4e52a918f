"""Layers with two groups of pairs, old and new, that are trained differently.

An optimiser treats a tensor as a whole. To freeze the old pairs, or to train them with another
learning rate, a layer holds keys and values as two parameters each: ``old_key_param_tokens`` and
``new_key_param_tokens``, and the same for values. What the layer computes does not change.

Both parts are views of one tensor. The state dict holds this tensor under the usual name, so it
equals the state dict of an ordinary layer. Code that averages weights by writing into the tensors
of a state dict (timm's ``ModelEmaV3``) reaches both parts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError

from .pattention import Pattention

TOKENS = ("key_param_tokens", "value_param_tokens")

__all__ = [
    "TOKENS",
    "SplitPattention",
    "fuse_tokens",
    "is_split",
    "split_tokens",
    "token_segments",
]

# Names of the parameters, in the order of TOKENS.
_PARTS = {name: (f"old_{name}", f"new_{name}") for name in TOKENS}


class SplitPattention(Pattention):
    """A :class:`Pattention` layer that holds old and new pairs in separate parameters.

    :func:`split_tokens` converts an ordinary layer to it, :func:`fuse_tokens` converts it back.

    Attributes:
        key_param_tokens: (P, C_in) keys of all pairs, old ones first; computed at each access.
        value_param_tokens: (P, C_out) values of all pairs, old ones first; computed at each
            access.

    Note:
        ``state_dict()`` joins the parts. ``state_dict(keep_vars=True)``, which ``torch.export``
        uses to find parameters, returns the parts.
    """

    old_key_param_tokens: Tensor
    new_key_param_tokens: Tensor
    old_value_param_tokens: Tensor
    new_value_param_tokens: Tensor

    @property
    def key_param_tokens(self) -> Tensor:  # type: ignore[override]
        """Keys of all pairs; gradients reach both parts."""
        return torch.cat((self.old_key_param_tokens, self.new_key_param_tokens))

    @property
    def value_param_tokens(self) -> Tensor:  # type: ignore[override]
        """Values of all pairs; gradients reach both parts."""
        return torch.cat((self.old_value_param_tokens, self.new_value_param_tokens))

    @torch.jit.unused
    def whole_tokens(self, name: str) -> Tensor:
        """Return the keys or values of all pairs as one tensor; the parts are views of it.

        Args:
            name: ``key_param_tokens`` or ``value_param_tokens``.

        Returns:
            (P, C) tokens; a copy if the parameters are sharded (FSDP2).
        """
        old, new = token_segments(self, name)
        if type(old.detach()) is not Tensor:
            return torch.cat((old.detach(), new.detach()))
        end = old.storage_offset() + old.numel()
        one = old.untyped_storage() is new.untyped_storage() and new.storage_offset() == end
        if not (one and old.is_contiguous() and new.is_contiguous()):
            # A move, a cast or a copy has put the parts into separate memory.
            whole = torch.cat((old.detach(), new.detach()))
            old.data, new.data = whole.split([len(old), len(new)])
        return old.detach().as_strided((len(old) + len(new), old.shape[1]), (old.shape[1], 1))

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        own: dict[str, Tensor] = {}
        super()._save_to_state_dict(own, "", keep_vars)
        if not keep_vars:
            others = {name: own[name] for name in own if not name.endswith(TOKENS)}
            # The order of an ordinary layer: some code relies on positions.
            own = {name: self.whole_tokens(name) for name in TOKENS} | others
        for name, tensor in own.items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, parts in _PARTS.items():
            if (tokens := state_dict.pop(prefix + name, None)) is not None:
                num_old = len(token_segments(self, name)[0])
                for part, rows in zip(parts, (tokens[:num_old], tokens[num_old:]), strict=True):
                    state_dict[prefix + part] = rows
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return f"{super().extra_repr()}, num_old={len(self.old_key_param_tokens)}"


def is_split(layer: Pattention) -> bool:
    """Return whether a layer holds its pairs in two parts."""
    return isinstance(layer, SplitPattention)


def split_tokens(layer: Pattention, num_old: int) -> None:
    """Split the parameters of a layer into the first pairs and the others.

    Args:
        layer: Layer to change in place, including its class. It computes the same as before.
        num_old: Number of pairs in the first part, from 1 to the number of pairs minus one.

    Raises:
        InputError: If ``num_old`` is out of range, the layer is split already, or its class is
            derived from Pattention.
    """
    if is_split(layer):
        raise InputError("the layer is already split; call fuse_tokens() first")
    if type(layer) is not Pattention:
        raise InputError(
            f"a {type(layer).__name__}, which is derived from Pattention, cannot be split into old "
            "and new pairs: grow it without split, freeze and new_lr_scale"
        )
    if not 0 < num_old < layer.num_param_tokens:
        raise InputError(
            f"num_old must be from 1 to {layer.num_param_tokens - 1} in a layer of "
            f"{layer.num_param_tokens} pairs, but got {num_old}"
        )
    tokens = {name: getattr(layer, name) for name in TOKENS}
    for name in TOKENS:
        delattr(layer, name)
    layer.__class__ = SplitPattention
    for name, whole in tokens.items():
        data = whole.detach().clone().split([num_old, len(whole) - num_old])
        for part, rows in zip(_PARTS[name], data, strict=True):
            layer.register_parameter(part, nn.Parameter(rows, whole.requires_grad))


def fuse_tokens(layer: Pattention) -> None:
    """Undo :func:`split_tokens`: hold all keys in one parameter, and all values in another.

    Args:
        layer: Layer to change in place. It computes the same as before. A joined parameter
            requires a gradient if one of its parts did.
    """
    if not is_split(layer):
        return
    joined = {}
    for name in TOKENS:
        parts = token_segments(layer, name)
        trained = any(part.requires_grad for part in parts)
        joined[name] = nn.Parameter(torch.cat([part.detach() for part in parts]), trained)
    for parts in _PARTS.values():
        for part in parts:
            delattr(layer, part)
    layer.__class__ = Pattention
    others = dict(layer._parameters)  # a learned τ or gate
    layer._parameters.clear()
    layer._parameters.update({**joined, **others})


def token_segments(layer: Pattention, name: str) -> tuple[nn.Parameter, ...]:
    """Return the parameters that hold a layer's keys or values: one, or old and new.

    Args:
        layer: Ordinary or split layer.
        name: ``key_param_tokens`` or ``value_param_tokens``.
    """
    return tuple(getattr(layer, part) for part in (_PARTS[name] if is_split(layer) else (name,)))
