"""Grow an ordinary Transformer, as a baseline for the growth of a TokenFormer.

Net2Net widens hidden layers with copies of their neurons and keeps the outputs of the model.
Stacking appends copies of blocks and changes the outputs.
"""

import copy
from typing import Any, NamedTuple, TypeVar

import torch
from timm.layers import Mlp
from timm.models import VisionTransformer
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.errors import InputError

from .optimizer import carry_over, check_optimizer, kept_order
from .tokens import Change, mark_replaced, trained_later

# How much the shares of a neuron's copies in its outgoing weights differ. Equal copies would stay
# equal forever.
_SPREAD = 0.1

Model = TypeVar("Model", bound=nn.Module)


class _Form(NamedTuple):
    """Names, dimensions and size attributes of the layers before and after a hidden layer."""

    names: tuple[str, str]
    dims: tuple[int, int]  # the hidden dimension of the weights
    sizes: tuple[str, str]  # attributes with the hidden size
    blocks: str  # attribute with the blocks
    key: str = ""  # of the configuration, for the hidden size


_LINEAR = (0, 1), ("out_features", "in_features")
_TIMM = _Form(("fc1", "fc2"), *_LINEAR, "blocks")
_OF_TRANSFORMERS = (
    # GPT-2 stores weights as (in, out).
    _Form(("c_fc", "c_proj"), (1, 0), ("nf", "nx"), "h", "n_inner"),
    # GPT-NeoX
    _Form(("dense_h_to_4h", "dense_4h_to_h"), *_LINEAR, "layers", "intermediate_size"),
)


@trained_later
def widen_mlp(
    model: Model,
    hidden_features: int,
    *,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> Model:
    """Widen the hidden layers of a Transformer with copies of random neurons, in place.

    A copy has the same incoming weights as its neuron. The outgoing weights are divided among the
    neuron and its copies, in unequal shares, to let them diverge. The outputs of the model do not
    change.

    Args:
        model: timm ``VisionTransformer`` with ordinary blocks, GPT-2 or GPT-NeoX of transformers,
            or a module that holds one of these.
        hidden_features: New number of neurons in every hidden layer.
        seed: Seed of the choice of neurons and of their shares.
        optimizer: Optimizer of the model's parameters, which continues with the new parameters.
        moments: What to do with the optimizer's state; see :func:`carry_over`.

    Returns:
        ``model``. A model of transformers has the new number in its ``config``, with which it is
        saved.

    Raises:
        InputError: If there is no such model, or a hidden layer already has that width or more.
            Then nothing is changed.

    Source:
        Net2WiderNet of Net2Net, arXiv:1511.05641, Section 2.2, for the hidden layer of each block.
    """
    form, transformer = _find_transformer(model)
    blocks = getattr(transformer, form.blocks)
    for index, block in enumerate(blocks):
        mlp = getattr(block, "mlp", None)
        _check_mlp(mlp, form, f"block {index}", hidden_features)
    check_optimizer(optimizer, blocks.parameters(), moments)
    generator = torch.Generator().manual_seed(seed)
    changes = []
    for block in blocks:
        changes += _widen(block.mlp, form, hidden_features, generator)
    if form is _TIMM:
        _record(transformer, mlp_ratio=mlp_ratio(hidden_features, transformer.embed_dim))
    else:
        setattr(transformer.config, form.key, hidden_features)
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
            f"the MLP of {name} is {type(mlp).__name__}, perhaps with a norm; give a model whose "
            "MLPs are two linear layers with an activation between them"
        )
    old = getattr(before, form.sizes[0])
    if hidden <= old:
        raise InputError(f"{name} has {old} hidden features; give more than that, not {hidden}")


@torch.no_grad()
def _widen(mlp: nn.Module, form: _Form, hidden: int, generator: torch.Generator) -> list[Change]:
    before, after = (getattr(mlp, name) for name in form.names)
    inputs, outputs = form.dims
    old = before.weight.shape[inputs]
    drawn: Any = {"generator": generator, "device": "cpu"}
    chosen = torch.randint(old, (hidden - old,), **drawn)
    # Which old neuron each new one copies.
    source = torch.cat((torch.arange(old, device="cpu"), chosen))
    shares = 1 + _SPREAD * torch.randn(hidden, **drawn).clamp(-3, 3).double()
    # The shares of a neuron sum to 1.
    shares /= shares.new_zeros(old).index_add_(0, source, shares)[source]
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


@trained_later
def stack_blocks(
    model: Model, depth: int, *, optimizer: Optimizer | None = None, moments: str = "keep"
) -> Model:
    """Append copies of a ViT's blocks, from the first block on, in place.

    Args:
        model: timm ``VisionTransformer`` with ordinary blocks, or a module that holds one.
        depth: New number of blocks, usually twice the present number.
        optimizer: Optimizer of the model's parameters, which also gets the new parameters. The
            state of a block is not copied.
        moments: ``keep`` or ``reset`` the state of the old blocks.

    Returns:
        ``model``, with other outputs than before.

    Raises:
        InputError: If there is no such ViT, or it already has that depth or more.

    Source:
        Progressive stacking: Gong et al., Efficient Training of BERT by Progressively Stacking,
        ICML 2019.
    """
    vit = _find_vit(model)
    blocks: Any = vit.blocks
    old = len(blocks)
    if depth <= old:
        raise InputError(f"the model has {old} blocks; give more than that, not {depth}")
    check_optimizer(optimizer, blocks.parameters(), moments)
    with kept_order(optimizer, model):
        changes = []
        if moments == "reset":
            changes += [Change((parameter,), (parameter,)) for parameter in blocks.parameters()]
        for index in range(old, depth):
            block = copy.deepcopy(blocks[index % old])
            blocks.append(block)
            changes += [
                Change((), (parameter,), like=(like,))
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
        f"{type(model).__name__} has no timm VisionTransformer with ordinary blocks; to grow a "
        "TokenFormer, use tokenformer_vit.growth.grow()"
    )


def _find_transformer(model: nn.Module) -> tuple[_Form, Any]:
    """Find the module with the blocks of a ViT, a GPT-2 or a GPT-NeoX."""
    for module in model.modules():
        for form in _OF_TRANSFORMERS:
            # Recognised by its attributes, because transformers may not be installed.
            if hasattr(module, form.blocks) and hasattr(getattr(module, "config", None), form.key):
                return form, module
    return _TIMM, _find_vit(model)


def mlp_ratio(hidden: int, width: int) -> float:
    """Compute the ``mlp_ratio`` that gives exactly this number of hidden neurons in timm.

    Args:
        hidden: Number of hidden neurons.
        width: Width C of the model.
    """
    ratio = hidden / width
    # timm multiplies by the width again and rounds down.
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _record(vit: VisionTransformer, **arguments: Any) -> None:
    """Update the arguments from which timm rebuilds a model."""
    args = getattr(vit, "_model_args", None)  # timm's get_model_args() returns this dict
    if args is not None:
        args |= arguments
