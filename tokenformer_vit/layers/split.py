"""Layers with two groups of pairs, old and new, that are frozen or trained differently.

They hold keys and values as two parameters each, because an optimizer treats a tensor as a whole.
What a layer computes does not change, and its state dict is that of an ordinary layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .pattention import Pattention

TOKENS = ("key_param_tokens", "value_param_tokens")
_PARTS = {name: (f"old_{name}", f"new_{name}") for name in TOKENS}


class SplitPattention(Pattention):
    """A Pattention layer that holds old and new pairs in separate parameters."""

    old_key_param_tokens: Tensor
    new_key_param_tokens: Tensor
    old_value_param_tokens: Tensor
    new_value_param_tokens: Tensor

    @property
    def key_param_tokens(self) -> Tensor:  # type: ignore[override]
        """Keys of all pairs, old ones first; gradients reach both parts."""
        return torch.cat((self.old_key_param_tokens, self.new_key_param_tokens))  # (P, C_in)

    @property
    def value_param_tokens(self) -> Tensor:  # type: ignore[override]
        """Values of all pairs, old ones first; gradients reach both parts."""
        return torch.cat((self.old_value_param_tokens, self.new_value_param_tokens))  # (P, C_out)

    @torch.jit.unused
    def whole_tokens(self, name: str) -> Tensor:
        """Return the keys or values of all pairs as one tensor; the parts become views of it."""
        # So timm's ModelEmaV3, which writes into the tensors of a state dict, reaches both parts.
        old, new = token_segments(self, name)
        if type(old.detach()) is not Tensor:  # sharded by FSDP2
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
        if not keep_vars:  # with it, torch.export looks for the parameters themselves
            others = {name: own[name] for name in own if not name.endswith(TOKENS)}
            # The order of an ordinary layer: some code relies on positions.
            own = {name: self.whole_tokens(name) for name in TOKENS} | others
        for name, tensor in own.items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict = dict(state_dict)  # it is the caller's
        for name, parts in _PARTS.items():
            if (tokens := state_dict.pop(prefix + name, None)) is not None:
                num_old = len(token_segments(self, name)[0])
                for part, rows in zip(parts, (tokens[:num_old], tokens[num_old:]), strict=True):
                    state_dict[prefix + part] = rows
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def is_split(layer: Pattention) -> bool:
    """Return whether a layer holds its pairs in two parts."""
    return isinstance(layer, SplitPattention)


def token_segments(layer: Pattention, name: str) -> tuple[nn.Parameter, ...]:
    """Return the parameters that hold a layer's keys or values: one, or old and new."""
    return tuple(map(layer.get_parameter, _PARTS[name] if is_split(layer) else (name,)))


def set_segments(layer: Pattention, segments: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Let a layer hold these parameters, one or two for keys and for values."""
    split = len(segments[TOKENS[0]]) == 2
    own = layer._parameters
    others = {name: p for name, p in own.items() if not name.endswith(TOKENS)}
    own.clear()
    for name, parts in segments.items():
        own.update(zip(_PARTS[name] if split else (name,), parts, strict=True))
    for name in ("gate", "nested_tau"):  # the order of a new layer: optimizers load by position
        if name in others:
            others[name] = others.pop(name)
    own.update(others)
    if split or is_split(layer):
        layer.__class__ = SplitPattention if split else Pattention


def split_tokens(layer: Pattention, num_old: int) -> None:
    """Hold the first pairs of an ordinary layer and the others in separate, new parameters."""
    segments = {}
    for name in TOKENS:
        whole = layer.get_parameter(name)
        parts = whole.detach().tensor_split([num_old])
        segments[name] = [nn.Parameter(part.clone(), whole.requires_grad) for part in parts]
    set_segments(layer, segments)


def fuse_tokens(layer: Pattention) -> None:
    """Hold all keys in one new parameter, and all values in another."""
    segments = {}
    for name in TOKENS:
        parts = token_segments(layer, name)
        whole = torch.cat([part.detach() for part in parts])
        segments[name] = [nn.Parameter(whole, any(part.requires_grad for part in parts))]
    set_segments(layer, segments)
