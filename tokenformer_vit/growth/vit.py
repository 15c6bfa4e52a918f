"""How an ordinary ViT grows: the two methods that TokenFormer's growth is compared with.

Net2Net widens the hidden layers by copies of their neurons, which leaves what the model computes
as it is; stacking puts copies of the blocks on top of the blocks, which does not.
"""

import copy
from typing import Any, TypeVar

import torch
from timm.layers import Mlp
from timm.models import VisionTransformer
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError

from .optimizer import carry_over, check_optimizer
from .tokens import Change

# What the copies of a neuron get of its outgoing weights, besides equal shares: without it they
# would stay equal for ever.
_SPREAD = 0.1

Model = TypeVar("Model", bound=nn.Module)


def widen_mlp(
    model: Model,
    hidden_features: int,
    *,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> Model:
    """Widen the hidden layers of a ViT by copies of randomly chosen neurons, in place.

    A copy has the incoming weights of its neuron, and the neuron's outgoing weights are shared
    between the copies, unequally so that these may part; the model computes what it did.

    Args:
        model: timm's ``VisionTransformer``, or a module that holds one, of ordinary blocks.
        hidden_features: Neurons of every hidden layer from now on.
        seed: Of the choice of neurons and of their shares.
        optimizer: Of the model's parameters; it goes on with the new ones.
        moments: What becomes of its state; see :func:`carry_over`.

    Returns:
        ``model``.

    Raises:
        InputError: If there is no such ViT, or a hidden layer is wider already.

    Source:
        Net2WiderNet of Net2Net, arXiv:1511.05641, Section 2.2, applied to the layer inside each
        block whose width is free.
    """
    vit = _find_vit(model)
    check_optimizer(optimizer, vit.blocks.parameters(), moments)
    generator = torch.Generator().manual_seed(seed)
    changes = []
    for name, block in vit.blocks.named_children():
        mlp: Any = block.mlp
        if type(mlp) is not Mlp or not isinstance(mlp.norm, nn.Identity):
            raise InputError(
                f"block {name} has a {type(mlp).__name__} or a norm within it, where Net2Net is "
                "for two linear layers with an activation between them"
            )
        changes += _widen(mlp, f"blocks.{name}.mlp", hidden_features, generator)
    _record(vit, mlp_ratio=_ratio(hidden_features, vit.embed_dim))
    if optimizer is not None:
        carry_over(optimizer, changes, moments)
    return model


@torch.no_grad()
def _widen(mlp: Mlp, name: str, hidden: int, generator: torch.Generator) -> list[Change]:
    fc1: Any = mlp.fc1
    fc2: Any = mlp.fc2
    old = fc1.out_features
    if hidden <= old:
        raise InputError(f"{name} has {old} hidden features and cannot be widened to {hidden}")
    chosen = torch.randint(old, (hidden - old,), generator=generator)
    source = torch.cat((torch.arange(old), chosen))  # which neuron each is a copy of
    shares = 1 + _SPREAD * torch.randn(hidden, generator=generator).clamp(-3, 3)
    shares /= torch.zeros(old).index_add_(0, source, shares)[source]  # to 1 for each neuron
    source, shares = source.to(fc1.weight.device), shares.to(fc2.weight)
    changes = []
    for layer, part, dim, tensor in (
        (fc1, "weight", 0, fc1.weight[source]),
        (fc1, "bias", 0, None if fc1.bias is None else fc1.bias[source]),
        (fc2, "weight", 1, fc2.weight[:, source] * shares),
    ):
        before = getattr(layer, part)
        if tensor is not None:
            after = nn.Parameter(tensor, requires_grad=before.requires_grad)
            setattr(layer, part, after)
            changes.append(Change((before,), (after,), dim))
    fc1.out_features = fc2.in_features = hidden
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
        model: As for :func:`widen_mlp`.
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


def _ratio(hidden: int, width: int) -> float:
    ratio = hidden / width
    # timm multiplies again, and rounds down.
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _record(vit: VisionTransformer, **arguments: Any) -> None:
    """Bring the arguments that timm rebuilds a model from up to date."""
    args = getattr(vit, "_model_args", None)  # what timm's get_model_args() returns
    if args is not None:
        args |= arguments
