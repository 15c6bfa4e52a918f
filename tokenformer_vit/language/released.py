"""The authors' language checkpoints: convert the names of their tensors to ours, and back.

The released files hold no τ, because the released code computes it from the number of pairs. They
hold no configuration. It is derived from the shapes of the tensors; the number of heads is taken
from the published model of that size.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.layers.arguments import EPS
from tokenformer_vit.layers.block import token_arguments
from tokenformer_vit.layers.segments import TOKENS
from tokenformer_vit.models import LMConfig, TokenFormerDecoder, lm_config
from tokenformer_vit.models.checkpoints import read_checkpoint, state_dict_in
from tokenformer_vit.ops import default_tau

from .modeling import TokenFormerForCausalLM

_EMBEDDING = "sequential.0.word_embeddings.weight"
_FIRST = "sequential.2"  # the first block; the modules without tensors also have numbers
_HEADS = {
    (config.depth, config.embed_dim): config.num_heads
    for config in map(lm_config, ("150m", "450m", "900m", "1.5b"))
}
# Fields that are fixed in the released code; LMConfig has the same values as defaults.
_FIXED = ("positions", "rotary_share", "rotary_base", "tie_embeddings", "theta", "norm", "norm_eps")


def read_released(
    path: Path, num_heads: int | None = None, context_length: int = 2048, eps: float = 0.0
) -> tuple[LMConfig, dict[str, Tensor]]:
    """Read a released checkpoint without running code; arguments as in :func:`from_released`.

    Raises:
        InputError: If there is no such file, it is damaged, or it is not a released checkpoint.
    """
    if not path.is_file():
        raise InputError(f"there is no checkpoint file {path}")
    state_dict = state_dict_in(read_checkpoint(path), path)
    try:
        return from_released(state_dict, num_heads, context_length, eps)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def from_released(
    state_dict: Mapping[str, Tensor],
    num_heads: int | None = None,
    context_length: int = 2048,
    eps: float = 0.0,
) -> tuple[LMConfig, dict[str, Tensor]]:
    """Convert a released state dict to ours.

    Args:
        state_dict: Complete state dict of the released code.
        num_heads: See :func:`released_config`.
        context_length: See :func:`released_config`.
        eps: See :func:`released_config`.

    Returns:
        The configuration, and the state dict of ``TokenFormerDecoder(configuration)``: the same
        tensors, and τ = √P of every layer in float32.

    Raises:
        InputError: As :func:`released_config` does.
    """
    config = released_config(state_dict, num_heads, context_length, eps)
    result = {own: state_dict[theirs] for theirs, own in _names(config.depth)}
    for name, keys in list(result.items()):
        if name.endswith(f".{TOKENS[0]}"):
            tau = default_tau(config.theta, len(keys))
            result[name.replace(TOKENS[0], "tau")] = torch.tensor(tau, dtype=torch.float32)
    return config, result


def released_config(
    state_dict: Mapping[str, Tensor],
    num_heads: int | None = None,
    context_length: int = 2048,
    eps: float = 0.0,
) -> LMConfig:
    """Derive the configuration of a released model from its tensors, and check them.

    Args:
        state_dict: Complete state dict of the released code.
        num_heads: Number of attention heads; None for a model of a published size.
        context_length: Largest number of tokens in a sequence.
        eps: eps of Pattention; the released code has none.

    Returns:
        The configuration.

    Raises:
        InputError: If a tensor is missing, has a wrong shape or dtype, or belongs to another kind
            of model; or the number of heads is unknown.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    pairs = {
        kind: f"{_FIRST}.{layer}.{TOKENS[0]}"
        for kind, layer in (
            ("num_qkv_param_tokens", "attention.query"),
            ("num_proj_param_tokens", "attention.proj"),
            ("num_ffn_param_tokens", "mlp"),
        )
    }
    if absent := [name for name in (_EMBEDDING, *pairs.values()) if len(shapes.get(name, ())) != 2]:
        others = f" (found: {', '.join(list(shapes)[:3])})"
        raise InputError(
            "the file is not a released TokenFormer language model: it has no matrix "
            f"{absent[0]}{others}; give a checkpoint of the authors"
        )
    suffix = pairs["num_ffn_param_tokens"].removeprefix(_FIRST)
    depth = sum(name.startswith("sequential.") and name.endswith(suffix) for name in shapes)
    vocab_size, width = shapes[_EMBEDDING]
    num_heads = num_heads or _HEADS.get((depth, width))
    if num_heads is None:
        raise InputError(
            f"no published model has {depth} blocks of width {width}: give its number of heads "
            "(--num-heads)"
        )
    if width % num_heads:
        raise InputError(
            f"the width {width} is not a multiple of num_heads {num_heads}; give a divisor"
        )
    counts: dict[str, Any] = {kind: shapes[name][0] for kind, name in pairs.items()}
    config = LMConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        embed_dim=width,
        depth=depth,
        num_heads=num_heads,
        pattention_args={"eps": eps},
        **counts,
    )
    model = TokenFormerDecoder(config, device="meta").state_dict()
    wanted = {theirs: tuple(model[own].shape) for theirs, own in _names(depth)}
    _check(shapes, wanted)
    dtypes = {tensor.dtype for tensor in state_dict.values()}
    if len(dtypes) > 1 or not state_dict[_EMBEDDING].is_floating_point():
        raise InputError(
            "all tensors must have the same floating-point type, but there are "
            + ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        )
    return config


def to_released(model: TokenFormerDecoder | TokenFormerForCausalLM) -> dict[str, Tensor]:
    """Convert a model to a state dict of the released code.

    Args:
        model: Language model; a head of its own is not supported.

    Returns:
        A state dict that the released code loads; it shares the tensors of the model.

    Raises:
        InputError: If the released code would compute something else, for example for a grown
            model, whose τ is no longer √P, or while a mask or a size is in use.

    Note:
        The released code has no ``eps``. For a model with the default of 1e-6 its outputs differ by
        about 1e-6; a larger ``eps`` is refused.
    """
    if isinstance(model, TokenFormerForCausalLM):
        model, head = model.model, model.lm_head
    else:
        head = getattr(model, "head", None)
    default, config = LMConfig(), model.config
    differing = [
        f"{name} is {getattr(config, name)}, not {getattr(default, name)}"
        for name in _FIXED
        if getattr(config, name) != getattr(default, name)
    ]
    # transformers loads two weights that differ, whatever the configuration says.
    own_head = head is not None and not torch.equal(head.weight, model.embedding.weight)
    if config.tie_embeddings and own_head:
        differing.append("the head has other weights than the embedding")
    differing += [
        f"{name} is {numbers}, not one number for all blocks"
        for name, numbers in token_arguments(model.blocks).items()  # type: ignore[arg-type]
        if isinstance(numbers, list)
    ]
    for name, layer in pattention_layers(model).items():
        tau = default_tau(default.theta, layer.num_param_tokens)
        if abs(layer.tau.item() / tau - 1) > 1e-6:
            differing.append(
                f"{name} has τ = {layer.tau.item():.6g}, not √{layer.num_param_tokens} = {tau:.6g}"
            )
        if layer.eps > EPS:
            differing.append(f"{name} has eps = {layer.eps:g}, more than {EPS:g}")
        limits = {"a mask": layer.active, "a size": layer.size}
        differing += [f"{name} has {limit}" for limit in limits if limits[limit] is not None]
    if differing:
        raise InputError(
            f"the released code cannot compute this model: {_some(differing)}; give a model "
            "that did not grow and uses all its pairs, with the Θ, eps, norm, positions and head "
            "of the released models"
        )
    state_dict = model.state_dict()
    return {theirs: state_dict[own] for theirs, own in _names(config.depth)}


def _names(depth: int) -> Iterator[tuple[str, str]]:
    """Yield two names of every tensor of a model: the released name and ours."""
    yield _EMBEDDING, "embedding.weight"
    for block in range(depth):
        theirs, own = f"sequential.{block + 2}", f"blocks.{block}"
        for part in ("query", "key", "value", "proj"):
            for tokens in TOKENS:
                yield f"{theirs}.attention.{part}.{tokens}", f"{own}.attn.{part}.{tokens}"
        for tokens in TOKENS:
            yield f"{theirs}.mlp.{tokens}", f"{own}.mlp.{tokens}"
    for part in ("weight", "bias"):
        yield f"sequential.{depth + 3}.norm.{part}", f"norm.{part}"


def _check(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes; name the differences in one line."""
    faults = [f"{name} {wanted[name]} is missing" for name in wanted if name not in found]
    faults += [f"{name} {found[name]} is not part of it" for name in found.keys() - wanted]
    faults += [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise InputError(
            f"this is not a complete released language model: {_some(faults)}; download it again"
        )


def _some(faults: list[str]) -> str:
    more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
    return "; ".join(faults[:8]) + more
