"""The pairs of a layer in two parts that are trained apart: the old ones and the new ones.

An optimiser treats a tensor as one. To freeze the old pairs, or to give them another learning rate
than the new ones, keys and values are held as two parameters each: ``old_key_param_tokens`` and
``new_key_param_tokens``, and so for the values. The layer computes as before.

Both parts are views of one tensor. A state dict has that tensor under the usual name, so it is the
state dict of an ordinary layer, and code that averages weights by writing into the tensors of a
state dict (timm's ``ModelEmaV3``) reaches both parts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError

from .pattention import SEGMENT, TOKENS, Pattention, fuse_state_dict

__all__ = [
    "TOKENS",
    "SplitPattention",
    "fuse_state_dict",
    "fuse_tokens",
    "is_split",
    "part_name",
    "split_tokens",
    "token_segments",
]

# Names of the parameters, in the order of TOKENS.
_PARTS = {name: (f"old_{name}", f"new_{name}") for name in TOKENS}


def part_name(name: str) -> str:
    """Return the present name of a parameter, given the one that an earlier version had for it.

    Args:
        name: Full name of any parameter. ``parametrizations.key_param_tokens.original0`` is
            ``old_key_param_tokens`` now.
    """
    part = SEGMENT.fullmatch(name)
    return name if part is None else part[1] + _PARTS[part[2]][int(part[3])]


class SplitPattention(Pattention):
    """A :class:`Pattention` layer that holds old and new pairs in parameters of their own.

    :func:`split_tokens` makes it of an ordinary layer, :func:`fuse_tokens` turns it back.

    Attributes:
        key_param_tokens: (P, C_in) keys of all pairs, old ones first; computed at each access.
        value_param_tokens: (P, C_out) values of all pairs, likewise.

    Note:
        ``state_dict()`` joins the parts. ``state_dict(keep_vars=True)``, by which ``torch.export``
        looks parameters up, has the parameters themselves.
    """

    old_key_param_tokens: Tensor
    new_key_param_tokens: Tensor
    old_value_param_tokens: Tensor
    new_value_param_tokens: Tensor

    @property
    def key_param_tokens(self) -> Tensor:  # type: ignore[override]
        """Join the keys; gradients reach both parts."""
        return torch.cat((self.old_key_param_tokens, self.new_key_param_tokens))

    @property
    def value_param_tokens(self) -> Tensor:  # type: ignore[override]
        """Join the values; gradients reach both parts."""
        return torch.cat((self.old_value_param_tokens, self.new_value_param_tokens))

    @torch.jit.unused
    def whole_tokens(self, name: str) -> Tensor:
        """Return the keys or values of all pairs as one tensor, of which the parts are views.

        Args:
            name: ``key_param_tokens`` or ``value_param_tokens``.

        Returns:
            (P, C). Of parameters that are sharded (FSDP2) it is a copy.
        """
        old, new = token_segments(self, name)
        if type(old.detach()) is not Tensor:
            return torch.cat((old.detach(), new.detach()))
        end = old.storage_offset() + old.numel()
        one = old.untyped_storage() is new.untyped_storage() and new.storage_offset() == end
        if not (one and old.is_contiguous() and new.is_contiguous()):
            # A move, a cast or a copy gave each part memory of its own.
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
            # In the order of an ordinary layer: there is code that goes by position.
            own = {name: self.whole_tokens(name) for name in TOKENS} | others
        for name, tensor in own.items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._join_loaded(state_dict, prefix)
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
    """Tell whether a layer holds its pairs in two parts."""
    return isinstance(layer, SplitPattention)


def split_tokens(layer: Pattention, num_old: int) -> None:
    """Hold the first pairs of a layer and the others in parameters of their own.

    Args:
        layer: Changed in place, its class too; what it computes stays.
        num_old: Number of pairs in the first part, from 1 to one less than the layer has.

    Raises:
        InputError: If the number is not within that range, the layer is split already, or it is of
            a class that is derived from Pattention.
    """
    if is_split(layer):
        raise InputError("the layer is split already; fuse_tokens() undoes that")
    if type(layer) is not Pattention:
        raise InputError(
            f"the layer is a {type(layer).__name__}, derived from Pattention, and cannot hold old "
            "and new pairs apart: grow it without split, freeze and new_lr_scale"
        )
    if not 0 < num_old < layer.num_param_tokens:
        raise InputError(
            f"num_old is {num_old}, but of a layer's {layer.num_param_tokens} pairs both parts "
            "must have some"
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
    """Undo :func:`split_tokens`: hold all pairs of a layer in one parameter each for keys, values.

    Args:
        layer: Changed in place; what it computes stays. A joined parameter needs a gradient if one
            of its parts did.
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
    others = dict(layer._parameters)  # a τ or a gate that is learned
    layer._parameters.clear()
    layer._parameters.update({**joined, **others})


def token_segments(layer: Pattention, name: str) -> tuple[nn.Parameter, ...]:
    """Return the parameters that hold a layer's keys or values: one, or the old and the new.

    Args:
        layer: The layer.
        name: ``key_param_tokens`` or ``value_param_tokens``.
    """
    return tuple(getattr(layer, part) for part in (_PARTS[name] if is_split(layer) else (name,)))
