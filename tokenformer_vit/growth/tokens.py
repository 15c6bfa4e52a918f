"""The parameter tokens of a model: found, read, and put back in another number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.segments import (
    TOKENS,
    fuse_tokens,
    split_tokens,
    token_segments,
)
from tokenformer_vit.models import TokenFormerLM, TokenFormerViT

# Which of a model's three counts of pairs a layer belongs to, by the layer's own name.
KINDS = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "mlp": "ffn"}


@dataclass(frozen=True)
class LayerTokens:
    """All that a Pattention layer stores.

    Args:
        keys: (P, C_in).
        values: (P, C_out).
        tau: 0-dim, float32.
        gate: (P,), or None where the layer has none.
    """

    keys: Tensor
    values: Tensor
    tau: Tensor
    gate: Tensor | None = None

    @property
    def num(self) -> int:
        """Number of pairs P."""
        return len(self.keys)


@dataclass(frozen=True)
class Change:
    """Parameters that took the place of others, for :func:`~tokenformer_vit.growth.carry_over`.

    Args:
        sources: Those that were there.
        targets: Those that are there now. Along ``dim`` the sources' entries, one source after
            another, are the first of the targets', and what is beyond them is new.
        dim: The dimension that grew.
        like: Where there are no sources, a parameter that is trained as the targets are to be.
    """

    sources: tuple[nn.Parameter, ...]
    targets: tuple[nn.Parameter, ...]
    dim: int = 0
    like: nn.Parameter | None = None


def kind_of(name: str) -> str:
    """Tell which count of pairs, ``qkv``, ``proj`` or ``ffn``, a layer belongs to.

    Args:
        name: Full name of a Pattention layer in a model.

    Raises:
        InputError: If it is not a layer of a TokenFormer block.
    """
    last = name.rpartition(".")[2]
    if last not in KINDS:
        raise InputError(
            f"the Pattention layer {name!r} is none of a TokenFormer block's "
            f"({', '.join(KINDS)}); its pairs cannot be changed by kind"
        )
    return KINDS[last]


def pattention_layers(model: nn.Module) -> dict[str, Pattention]:
    """Find the Pattention layers of a model.

    Args:
        model: Any module that holds TokenFormer blocks: a backbone, a classifier, a language model.

    Returns:
        The layers by name, in the model's order.

    Raises:
        InputError: If there is none.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Pattention)}
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no Pattention layer, hence no parameter tokens to change"
        )
    return layers


def read_tokens(layer: Pattention) -> LayerTokens:
    """Return what a layer stores, without history; of an ordinary layer not copied."""
    gate = layer.gate
    return LayerTokens(
        layer.key_param_tokens.detach(),
        layer.value_param_tokens.detach(),
        layer.tau.detach(),
        None if gate is None else gate.detach(),
    )


@torch.no_grad()
def write_tokens(
    layer: Pattention,
    tokens: LayerTokens,
    num_old: int | None = None,
    learn_gate: bool | None = None,
) -> list[Change]:
    """Give a layer other tokens, in any number.

    Args:
        layer: Changed in place; its parameters are new objects, which need a gradient if the old
            ones did. A selection of pairs (``active``) and ``top_k`` are given up.
        tokens: What it stores from now on.
        num_old: Hold so many pairs apart from the others; None holds all in one.
        learn_gate: Make the gate, if there is one, a parameter (True) or a buffer (False); None
            leaves it what it is, and makes a new one a parameter.

    Returns:
        What an optimiser has to know.
    """
    before = {name: token_segments(layer, name) for name in TOKENS}
    fuse_tokens(layer)
    layer.num_param_tokens = tokens.num
    layer.active, layer.top_k = None, None
    for name, tensor in zip(TOKENS, (tokens.keys, tokens.values), strict=True):
        trained = getattr(layer, name).requires_grad
        setattr(layer, name, nn.Parameter(tensor.clone(), requires_grad=trained))
    if num_old is not None and 0 < num_old < tokens.num:
        split_tokens(layer, num_old)
    changes = [Change(before[name], token_segments(layer, name)) for name in TOKENS]
    layer.tau.copy_(tokens.tau)
    if tokens.gate is not None:
        gate, opened = layer.gate, tokens.gate.clone()
        was_learned = isinstance(gate, nn.Parameter)
        if learn_gate is None:
            learn_gate = gate is None or was_learned
        if learn_gate:
            trained = gate.requires_grad if was_learned else True  # type: ignore[union-attr]
            del layer.gate  # it may be a buffer, maybe an empty one
            layer.gate = nn.Parameter(opened, requires_grad=trained)
            sources = (gate,) if was_learned else ()
            like = None if was_learned else changes[0].targets[-1]
            changes.append(Change(sources, (layer.gate,), like=like))  # type: ignore[arg-type]
        else:
            if was_learned:
                changes.append(Change((gate,), ()))  # type: ignore[arg-type]
            del layer.gate
            layer.register_buffer("gate", opened)
    return changes


def record_counts(model: nn.Module) -> None:
    """Write a model's present counts of pairs into what it is saved and rebuilt by.

    Args:
        model: A module that is, or holds, TokenFormer backbones or language models.
    """
    for module in model.modules():
        if isinstance(module, TokenFormerViT | TokenFormerLM):
            module.record_param_tokens()
