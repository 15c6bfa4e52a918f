"""What variants change of a language model: its kind, its pairs, and how it grows."""

from collections.abc import Sequence
from typing import Any

from tokenformer_vit.errors import InputError

from .questions import Backbone, Change, Outside, TextShape


def sizes(**new: Any) -> Change:
    """Set sizes and other arguments of the TokenFormer; none leaves the config's as it is."""
    return lambda model, shape: {**model, "config": {**model["config"], **new}}


def share(part: float) -> Change:
    """Keep a share of all pairs; all of them leave the config's model as it is."""
    return lambda model, shape: model if part == 1 else sizes(**shape.pairs(part))(model, shape)


def pairs_by_width(attention: float, ffn: float, **new: Any) -> Change:
    """Give each of q, k, v and o so many pairs a channel, and the feed-forward layer so many.

    Args:
        attention: Pairs of each of q, k, v and o, as a multiple of the width.
        ffn: Those of the feed-forward layer.
        new: What else is set.
    """

    def change(model: Backbone, shape: TextShape) -> Backbone:
        pairs = {
            "num_qkv_param_tokens": round(attention * shape.embed_dim),
            "num_proj_param_tokens": round(attention * shape.embed_dim),
            "num_ffn_param_tokens": round(ffn * shape.embed_dim),
        }
        same = all(getattr(shape, key) == number for key, number in pairs.items())
        # The config's own model is said as the config says it.
        return sizes(**({} if same else pairs), **new)(model, shape)

    return change


def transformer(hidden_features: int, model: Backbone, shape: TextShape) -> Backbone:
    """Take a Transformer in GPT-2's form, of the TokenFormer's width and depth."""
    return {
        **model,
        "architecture": "transformer",
        "config": {
            "vocab_size": shape.vocab_size,
            "context_length": shape.context_length,
            "embed_dim": shape.embed_dim,
            "depth": shape.depth,
            "num_heads": shape.num_heads,
            "hidden_features": hidden_features,
            "tie_embeddings": shape.tie_embeddings,
        },
    }


def matched_hidden(shape: TextShape, part: float = 1, pairs: float = 1) -> int:
    """Return the neurons of a hidden layer with which a Transformer has a TokenFormer's weights.

    A block has 2C(3·P_qkv + P_proj + P_ffn) weights as a TokenFormer and 4C² + 2C·hidden as a
    Transformer.

    Args:
        shape: Of the TokenFormer.
        part: The share of the neurons to return, for one that grows to all.
        pairs: The share of the TokenFormer's pairs whose weights it has.

    Raises:
        InputError: If attention alone takes all weights.
    """
    number = round(pairs * shape.num_param_tokens)
    hidden = number - 2 * shape.embed_dim
    if hidden < 1:
        raise InputError(
            f"no Transformer of width {shape.embed_dim} has as few weights as {number} pairs a "
            f"block: its attention alone takes those of {2 * shape.embed_dim}; leave the "
            "Transformers out by --variants"
        )
    return max(1, round(part * hidden))


def matched_transformer(part: float = 1, pairs: float = 1) -> Change:
    """Take the Transformer of :func:`matched_hidden`."""
    return lambda model, shape: transformer(matched_hidden(shape, part, pairs), model, shape)


def growth(starts: Sequence[float], events: Sequence[dict[str, int]], iterations: int, **how: Any):
    """Say that a model grows.

    Args:
        starts: When, in shares of the run.
        events: What it has from then on.
        iterations: Length of the run.
        how: Other arguments of GrowthHook.
    """
    schedule = [
        {"iteration": round(start * iterations), **event}
        for start, event in zip(starts, events, strict=True)
    ]
    return {"custom_hooks": [{"type": "GrowthHook", "schedule": schedule, **how}]}


def grown(shares: Sequence[float], **how: Any) -> Outside:
    """Grow through shares of all pairs, the first being the start, in equal times.

    Args:
        shares: One for each stage.
        how: Other arguments of GrowthHook.
    """
    starts = [stage / len(shares) for stage in range(1, len(shares))]

    def outside(shape: TextShape, iterations: int) -> dict[str, Any]:
        return growth(starts, [shape.pairs(part) for part in shares[1:]], iterations, **how)

    return outside


def widened(shares: Sequence[float]) -> Outside:
    """Widen the matched Transformer through shares of its hidden neurons, as :func:`grown`."""
    starts = [stage / len(shares) for stage in range(1, len(shares))]

    def outside(shape: TextShape, iterations: int) -> dict[str, Any]:
        events = [{"hidden_features": matched_hidden(shape, part)} for part in shares[1:]]
        return growth(starts, events, iterations)

    return outside


def lasting(part: float) -> Outside:
    """Train for a share, or a multiple, of the iterations, with a whole schedule of the rate."""
    return lambda shape, iterations: {"train_cfg": {"max_iters": round(part * iterations)}}
