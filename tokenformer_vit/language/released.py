"""The authors' language checkpoints: their tensors under our names, and back.

Theirs hold no τ, since their code computes it from the number of pairs, and no shape but that of
the tensors: the number of heads is known by the published sizes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.layers.segments import TOKENS, fuse_state_dict
from tokenformer_vit.models import LMConfig, TokenFormerLM, lm_config
from tokenformer_vit.models.weights import read_state_dict
from tokenformer_vit.ops import default_tau

__all__ = ["from_released", "read_released", "released_config", "to_released"]

_EMBEDDING = "sequential.0.word_embeddings.weight"
_FIRST = "sequential.2"  # of the blocks; what comes between and after has no tensors
_HEADS = {
    (config.depth, config.embed_dim): config.num_heads
    for config in map(lm_config, ("150m", "450m", "900m", "1.5b"))
}
# What the released code computes; LMConfig's defaults are just that.
_FIXED = (
    "positions",
    "rotary_share",
    "rotary_base",
    "tie_embeddings",
    "theta",
    "norm",
    "norm_eps",
)


def read_released(
    path: Path, num_heads: int | None = None, context_length: int = 2048, eps: float = 0.0
) -> tuple[LMConfig, dict[str, Tensor]]:
    """Read a released checkpoint, without running its code; see :func:`from_released`.

    Raises:
        InputError: If there is no such file, it is damaged, or is something else.
    """
    if not path.is_file():
        raise InputError(f"there is no checkpoint file {path}")
    state_dict = read_state_dict(path)
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
    """Turn a released state dict into one of ours.

    Args:
        state_dict: Of the released code, complete.
        num_heads: As in :func:`released_config`, and so the next two.
        context_length: As said.
        eps: As said.

    Returns:
        The shape, and what ``TokenFormerLM(shape).load_state_dict`` takes: the same tensors, and
        τ = √P of every layer in float32.

    Raises:
        InputError: As :func:`released_config`.
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
    """Tell the shape of a released model from its tensors, and see that they fit each other.

    Args:
        state_dict: Of the released code, complete.
        num_heads: Attention heads; None where depth and width are those of a published model.
        context_length: Most tokens that a sequence may have.
        eps: Of Pattention; the released code has none.

    Raises:
        InputError: If tensors are missing, of another shape or dtype than the others tell, or not
            of such a model; or the number of heads is not known.
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
            f"this is no released TokenFormer language model: it has no matrix {absent[0]}{others}"
        )
    suffix = pairs["num_ffn_param_tokens"].removeprefix(_FIRST)
    depth = sum(name.startswith("sequential.") and name.endswith(suffix) for name in shapes)
    vocab_size, width = shapes[_EMBEDDING]
    num_heads = num_heads or _HEADS.get((depth, width))
    if num_heads is None:
        raise InputError(
            f"no published model is {depth} blocks deep and {width} wide: say its number of heads "
            "(--num-heads)"
        )
    if width % num_heads:
        raise InputError(f"the width {width} is not a multiple of num_heads {num_heads}")
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
    model = TokenFormerLM(config, device="meta").state_dict()
    wanted = {theirs: tuple(model[own].shape) for theirs, own in _names(depth)}
    _check(shapes, wanted)
    dtypes = {tensor.dtype for tensor in state_dict.values()}
    if len(dtypes) > 1 or not state_dict[_EMBEDDING].is_floating_point():
        raise InputError(
            "all tensors should be of one floating-point type, but there are "
            + ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        )
    return config


def to_released(model: TokenFormerLM) -> dict[str, Tensor]:
    """Name a model's tensors as the released code does.

    Args:
        model: Language model; layers that hold old and new pairs apart are joined.

    Returns:
        What the released code loads; the tensors are the model's own.

    Raises:
        InputError: If the released code would compute something else from them, such as for a
            model that has grown, whose τ is no longer √P.

    Note:
        A model with ``eps`` other than 0 computes there what it does here to about 1e-6.
    """
    default = LMConfig()
    differing = [
        f"{name} is {getattr(model.config, name)}, not {getattr(default, name)}"
        for name in _FIXED
        if getattr(model.config, name) != getattr(default, name)
    ]
    for name, layer in pattention_layers(model).items():
        tau = default_tau(default.theta, layer.num_param_tokens)
        if abs(layer.tau.item() / tau - 1) > 1e-6:
            differing.append(
                f"{name} has τ = {layer.tau.item():.6g}, not √{layer.num_param_tokens} = {tau:.6g}"
            )
    if differing:
        raise InputError(
            f"the released format holds no such model: {_some(differing)}; its code computes τ "
            "from the number of pairs, and has one Θ, norm and kind of position"
        )
    state_dict = fuse_state_dict(model.state_dict())
    return {theirs: state_dict[own] for theirs, own in _names(model.config.depth)}


def _names(depth: int) -> Iterator[tuple[str, str]]:
    """Yield the released name and ours of every tensor of a model."""
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
    """Compare names and shapes; tell all that differs in one line."""
    faults = [f"{name} {wanted[name]} is missing" for name in wanted if name not in found]
    faults += [f"{name} {found[name]} is none of its tensors" for name in found.keys() - wanted]
    faults += [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise InputError(f"this is no complete released language model: {_some(faults)}")


def _some(faults: list[str], most: int = 8) -> str:
    more = f"; and {len(faults) - most} more" if len(faults) > most else ""
    return "; ".join(faults[:most]) + more
