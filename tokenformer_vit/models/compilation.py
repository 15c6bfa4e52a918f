"""torch.compile, block by block."""

from collections.abc import Mapping
from typing import Any

import torch._dynamo
from torch import nn

from tokenformer_vit.errors import InputError

# Names of the list of blocks: in timm's ViTs and ours, GPT-2 and GPT-NeoX of transformers.
BLOCKS = ("blocks", "h", "layers")


def blocks_of(model: nn.Module) -> Any:
    """Return the list of a model's blocks, or None."""
    return next((getattr(model, name) for name in BLOCKS if hasattr(model, name)), None)


def compile_blocks(
    model: nn.Module, how: bool | str | Mapping[str, Any] = True, **kwargs: Any
) -> None:
    """Compile each transformer block of a model, in place; the names of its tensors stay.

    The blocks share one compilation, which takes seconds; the whole model would take minutes.

    Args:
        model: Model with a list of blocks: a ViT of timm, or a language model without its head.
        how: Mode of ``torch.compile``, or a dict of its arguments; False to compile nothing.
        **kwargs: Arguments of ``torch.compile``.
    """
    if how is False:
        return
    if how is not True:
        kwargs = {**({"mode": how} if isinstance(how, str) else how), **kwargs}
    blocks = blocks_of(model)
    if not isinstance(blocks, nn.Module):
        raise InputError(f"{type(model).__name__} has no transformer blocks: omit --compile")
    dynamo: Any = torch._dynamo.config  # of the whole process
    # Training, evaluation, a last batch and a first block without stochastic depth each need a
    # version. By default PyTorch stops at eight and silently runs the rest uncompiled.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
    # It splits the graph of a whole model, and fails on the graphs of autograd functions.
    dynamo.optimize_ddp = False
    if len(getattr(model, "sizes", ())) > 1:  # else every size would be a version
        dynamo.allow_unspec_int_on_nn_module = True
    for block in blocks.children():
        block.compile(**kwargs)
