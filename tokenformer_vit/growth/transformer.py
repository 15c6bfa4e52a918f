"""How an ordinary Transformer grows: the two methods that TokenFormer's growth is compared with.

Net2Net widens the hidden layers by copies of their neurons, which leaves what the model computes
as it is; stacking puts copies of the blocks on top of the blocks, which does not.
"""

import copy
from typing import Any, NamedTuple, TypeVar

import torch
from timm.layers import Mlp
from timm.models import VisionTransformer
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError

from .optimizer import carry_over, check_optimizer
from .tokens import Change, mark_replaced

__all__ = ["mlp_ratio", "stack_blocks", "widen_mlp"]

# What the copies of a neuron get of its outgoing weights, besides equal shares: without it they
# would stay equal for ever.
_SPREAD = 0.1

Model = TypeVar("Model", bound=nn.Module)


class _Form(NamedTuple):
    """Of the layers before and after a hidden one what they are called, and where it shows."""

    names: tuple[str, str]
    dims: tuple[int, int]  # of their weights
    sizes: tuple[str, str]  # their attributes


_TIMM = _Form(("fc1", "fc2"), (0, 1), ("out_features", "in_features"))
# The layers of transformers' GPT-2 keep their weights as (in, out).
_GPT2 = _Form(("c_fc", "c_proj"), (1, 0), ("nf", "nx"))


def widen_mlp(
    model: Model,
    hidden_features: int,
    *,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> Model:
    """Widen the hidden layers of a Transformer by copies of randomly chosen neurons, in place.

    A copy has the incoming weights of its neuron, and the neuron's outgoing weights are shared
    between the copies, unequally so that these may part; the model computes what it did.

    Args:
        model: timm's ``VisionTransformer`` of ordinary blocks, transformers' GPT-2, or a module
            that holds one of these.
        hidden_features: Neurons of every hidden layer from now on.
        seed: Of the choice of neurons and of their shares.
        optimizer: Of the model's parameters; it goes on with the new ones.
        moments: What becomes of its state; see :func:`carry_over`.

    Returns:
        ``model``. A GPT-2 says the new number in ``config.n_inner``, with which it is saved.

    Raises:
        InputError: If there is no such model, or a hidden layer is as wide already. Nothing is
            changed then.

    Source:
        Net2WiderNet of Net2Net, arXiv:1511.05641, Section 2.2, applied to the layer inside each
        block whose width is free.
    """
    form, transformer = _find_transformer(model)
    blocks = transformer.blocks if form is _TIMM else transformer.h
    for index, block in enumerate(blocks):
        _check_mlp(block.mlp, form, f"block {index}", hidden_features)
    check_optimizer(optimizer, blocks.parameters(), moments)
    generator = torch.Generator().manual_seed(seed)
    changes = []
    for block in blocks:
        changes += _widen(block.mlp, form, hidden_features, generator)
    if form is _TIMM:
        _record(transformer, mlp_ratio=mlp_ratio(hidden_features, transformer.embed_dim))
    else:
        transformer.config.n_inner = hidden_features
    mark_replaced(changes)
    if optimizer is not None:
        carry_over(optimizer, changes, moments)
    return model


def _check_mlp(mlp: Any, form: _Form, name: str, hidden: int) -> None:
    before, after = (getattr(mlp, layer, None) for layer in form.names)
    plain = hasattr(before, form.sizes[0]) and hasattr(after, form.sizes[1])
    if form is _TIMM:
        plain = type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity)
    if not plain:
        raise InputError(
            f"{name} has a {type(mlp).__name__} or a norm within it, where Net2Net is "
            "for two linear layers with an activation between them"
        )
    old = getattr(before, form.sizes[0])
    if hidden <= old:
        raise InputError(f"{name} has {old} hidden features and cannot be widened to {hidden}")


@torch.no_grad()
def _widen(mlp: nn.Module, form: _Form, hidden: int, generator: torch.Generator) -> list[Change]:
    before, after = (getattr(mlp, name) for name in form.names)
    inputs, outputs = form.dims
    old = before.weight.shape[inputs]
    chosen = torch.randint(old, (hidden - old,), generator=generator)
    source = torch.cat((torch.arange(old), chosen))  # which neuron each is a copy of
    shares = 1 + _SPREAD * torch.randn(hidden, generator=generator).clamp(-3, 3).double()
    shares /= shares.new_zeros(old).index_add_(0, source, shares)[source]  # to 1 for each neuron
    source, shares = source.to(before.weight.device), shares.to(after.weight)
    shared = after.weight.index_select(outputs, source) * shares.unsqueeze(1 - outputs)
    changes = []
    for layer, part, dim, tensor in (
        (before, "weight", inputs, before.weight.index_select(inputs, source)),
        (before, "bias", 0, None if before.bias is None else before.bias[source]),
        (after, "weight", outputs, shared),
    ):
        own = getattr(layer, part)
        if tensor is not None:
            new = nn.Parameter(tensor, requires_grad=own.requires_grad)
            setattr(layer, part, new)
            changes.append(Change((own,), (new,), dim))
    for layer, size in zip((before, after), form.sizes, strict=True):
        setattr(layer, size, hidden)
    return changes


def stack_blocks(
    model: Model,
    depth: int,
    *,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> Model:
    """Deepen a ViT by copies of its blocks, from the first on, on top of the last; in place.

    Args:
        model: timm's ``VisionTransformer`` of ordinary blocks, or a module that holds one.
        depth: Number of blocks from now on; usually twice the present one.
        optimizer: Of the model's parameters; it goes on with the new ones besides. What it knows of
            a block is not copied with the block.
        moments: ``keep`` or ``reset`` what it knows of the others.

    Returns:
        ``model``. It does not compute what it did.

    Raises:
        InputError: If there is no such ViT, or it is as deep already.

    Source:
        Progressive stacking: Gong et al., Efficient Training of BERT by Progressively Stacking,
        ICML 2019.
    """
    vit = _find_vit(model)
    blocks: Any = vit.blocks
    old = len(blocks)
    if depth <= old:
        raise InputError(f"the model has {old} blocks and cannot be stacked to {depth}")
    check_optimizer(optimizer, blocks.parameters(), moments)
    changes = []
    if moments == "reset":
        changes += [Change((parameter,), (parameter,)) for parameter in blocks.parameters()]
    for index in range(old, depth):
        block = copy.deepcopy(blocks[index % old])
        blocks.append(block)
        changes += [
            Change((), (parameter,), like=like)
            for parameter, like in zip(
                block.parameters(), blocks[index % old].parameters(), strict=True
            )
        ]
    _record(vit, depth=depth)
    if optimizer is not None:
        carry_over(optimizer, changes, moments)
    return model


def _find_vit(model: nn.Module) -> VisionTransformer:
    for module in model.modules():
        if type(module) is VisionTransformer:
            return module
    raise InputError(
        f"{type(model).__name__} holds no ViT of timm's (VisionTransformer) with ordinary blocks; "
        "a TokenFormer grows by tokenformer_vit.growth.grow()"
    )


def _find_transformer(model: nn.Module) -> tuple[_Form, Any]:
    """Find what holds the blocks, ``blocks`` of a ViT or ``h`` of a GPT-2."""
    for module in model.modules():
        # By what it has, since transformers is not needed here.
        if hasattr(module, "h") and hasattr(getattr(module, "config", None), "n_inner"):
            return _GPT2, module
    return _TIMM, _find_vit(model)


def mlp_ratio(hidden: int, width: int) -> float:
    """Compute the ``mlp_ratio`` with which timm builds exactly so many hidden neurons.

    Args:
        hidden: Number of hidden neurons.
        width: Width C of the model.
    """
    ratio = hidden / width
    # timm multiplies by the width again and rounds down.
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _record(vit: VisionTransformer, **arguments: Any) -> None:
    """Bring the arguments that timm rebuilds a model from up to date."""
    args = getattr(vit, "_model_args", None)  # what timm's get_model_args() returns
    if args is not None:
        args |= arguments
