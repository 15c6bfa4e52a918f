"""torch.compile, block by block."""

from typing import Any

import torch._dynamo
from torch import nn

from tokenformer_vit.errors import InputError

# Blocks of one shape share their compiled code, but training, evaluation, the last batch of an
# epoch and a first block without stochastic depth each have a version of their own. PyTorch would
# by default stop at eight and go on uncompiled without a word.
_MOST_VERSIONS = 64


def compile_blocks(model: nn.Module, **kwargs: Any) -> None:
    """Compile each transformer block of a timm model, in place.

    All blocks run the same code on other weights, so that it is compiled once, in seconds, where
    compiling the whole model takes minutes. State-dict keys stay as they are, and a copy or a
    pickle of the model is an uncompiled one.

    Args:
        model: A model whose blocks are in ``model.blocks``, as those of timm's ViTs are.
        **kwargs: Arguments of ``torch.compile``.

    Raises:
        InputError: If the model has no blocks.

    Note:
        For the whole process, torch.compile's limit of versions is raised from 8 to 64, and its
        ``optimize_ddp`` is switched off.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Module):
        raise InputError(
            f"{type(model).__name__} has no transformer blocks to compile; leave --compile out, or "
            "choose a ViT"
        )
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, limit, max(getattr(config, limit), _MOST_VERSIONS))
    # DistributedDataParallel overlaps its communication block by block anyway. What it does to
    # graphs is meant for whole models, and refuses graphs that hold others, as autograd functions'
    # may.
    config.optimize_ddp = False
    for block in blocks.children():
        block.compile(**kwargs)
