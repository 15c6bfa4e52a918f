"""The authors' language checkpoints: convert the names of their tensors to ours.

The released files hold no τ, because the released code computes it from the number of pairs. They
hold no configuration either. It is derived from the shapes of the tensors; the number of heads is
taken from the published model of that size.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import lm_config
from tokenformer_vit.models.checkpoints import read_checkpoint
from tokenformer_vit.ops import default_tau

from .modeling import TokenFormerConfig, TokenFormerForCausalLM

_EMBEDDING = "sequential.0.word_embeddings.weight"
_KEYS, _VALUES = "key_param_tokens", "value_param_tokens"
_HEADS = {
    (config.depth, config.embed_dim): config.num_heads
    for config in map(lm_config, ("150m", "450m", "900m", "1.5b"))
}


def read_released(path: Path) -> dict[str, Tensor]:
    """Read the state dict of a checkpoint of the authors' code, without running code.

    Args:
        path: A released file; a file of their training, with the tensors under ``module``; or its
            folder with a file for each layer, ``layer_00-model_00-model_states.pt`` and so on.

    Raises:
        InputError: If there is no such file, or the folder was written by several model-parallel
            processes.
    """
    if path.is_dir():
        tensors = {}
        for file in sorted(path.glob("layer_*-model_*-model_states.pt")):
            layer, rank = re.findall(r"\d+", file.name)[:2]
            if int(rank):
                raise InputError(
                    f"{file} is the part of a second model-parallel process: merge the parts with "
                    "the authors' code"
                )
            own = read_checkpoint(file)
            tensors |= {f"sequential.{int(layer)}.{name}": own[name] for name in own}
        if tensors:
            return tensors
    if not path.is_file():
        raise InputError(f"{path} is no checkpoint file, and no folder with layer_*.pt files")
    loaded = read_checkpoint(path)
    return loaded.get("module", loaded.get("state_dict", loaded))


def from_released(
    state_dict: Mapping[str, Tensor],
    num_heads: int | None = None,
    context_length: int = 2048,
    eps: float = 0.0,
) -> tuple[TokenFormerConfig, dict[str, Tensor]]:
    """Convert a released state dict to ours.

    Args:
        state_dict: Complete state dict of the released code.
        num_heads: Number of attention heads; None for a model of a published size.
        context_length: Largest number of tokens in a sequence.
        eps: eps of Pattention; the released code has none.

    Returns:
        The configuration, and the state dict of ``TokenFormerModel(configuration)``: the same
        tensors, and τ = √P of every layer in float32.

    Raises:
        InputError: If tensors are missing or unknown, or the number of heads is not known.
    """
    keys = [name for name in state_dict if name.endswith(f"mlp.{_KEYS}")]
    names = dict(released_names(len(keys)))
    if wrong := sorted(names.keys() ^ state_dict.keys()):
        fault = "is missing" if wrong[0] in names else "is not part of it"
        raise InputError(
            f"this is not a complete released language model: {wrong[0]} {fault}; give a "
            "checkpoint of the authors, or the --model of a ViT"
        )
    vocab_size, width = state_dict[_EMBEDDING].shape
    num_heads = num_heads or _HEADS.get((len(keys), width))
    if num_heads is None:
        raise InputError(
            f"no published model has {len(keys)} blocks of width {width}: give its number of heads "
            "(--num-heads)"
        )
    first = "sequential.2"  # the modules before it are the embedding and one without tensors
    config = TokenFormerConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        embed_dim=width,
        depth=len(keys),
        num_heads=num_heads,
        num_qkv_param_tokens=len(state_dict[f"{first}.attention.query.{_KEYS}"]),
        num_proj_param_tokens=len(state_dict[f"{first}.attention.proj.{_KEYS}"]),
        num_ffn_param_tokens=len(state_dict[f"{first}.mlp.{_KEYS}"]),
        pattention_args={"eps": eps},
    )
    result = {own: state_dict[theirs] for theirs, own in names.items()}
    for name in [name for name in result if name.endswith(_KEYS)]:
        tau = default_tau("gelu_l2", len(result[name]))
        result[name.replace(_KEYS, "tau")] = torch.tensor(tau, dtype=torch.float32)
    return config, result


def load_released(path: Path, **arguments: Any) -> TokenFormerForCausalLM:
    """Load a checkpoint of the authors' code; ``arguments`` are those of :func:`from_released`."""
    config, weights = from_released(read_released(path), **arguments)
    with torch.device("meta"):
        model = TokenFormerForCausalLM(config)
    model.model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def released_names(depth: int) -> Iterator[tuple[str, str]]:
    """Yield two names of every tensor of a model: the released name and ours."""
    yield _EMBEDDING, "embedding.weight"
    for block in range(depth):
        theirs, own = f"sequential.{block + 2}", f"blocks.{block}"
        for part in ("query", "key", "value", "proj"):
            for tokens in (_KEYS, _VALUES):
                yield f"{theirs}.attention.{part}.{tokens}", f"{own}.attn.{part}.{tokens}"
        for tokens in (_KEYS, _VALUES):
            yield f"{theirs}.mlp.{tokens}", f"{own}.mlp.{tokens}"
    for part in ("weight", "bias"):
        yield f"sequential.{depth + 3}.norm.{part}", f"norm.{part}"
