"""What does growth save? Grown TokenFormers against from-scratch ones, and against grown ViTs.

python ablations/growth.py --config configs/cifar10_micro.py --seeds 3
"""

from typing import Any

from tokenformer_vit.experiments.questions import (
    Backbone,
    Change,
    Question,
    Shape,
    Variant,
    arguments,
    matched_vit,
)

# The model has a quarter of its pairs for the first third of the epochs, then half of them.
STAGES = ((0, 1 / 4), (1 / 3, 1 / 2), (2 / 3, 1))


def pairs(share: float) -> Change:
    """Keep a share of all pairs."""
    return lambda backbone, shape: {**backbone, **shape.pairs(share)}


def _hook(epochs: int, sizes: list[dict[str, int]], **how: Any) -> dict[str, Any]:
    schedule = [
        {"epoch": round(begin * epochs), **size}
        for (begin, _), size in zip(STAGES[1:], sizes, strict=True)
    ]
    return {"custom_hooks": [{"type": "GrowthHook", "schedule": schedule, **how}]}


def grown(**how: Any):
    """Grow by pairs at the stages."""
    return lambda shape, epochs: _hook(
        epochs, [shape.pairs(share) for _, share in STAGES[1:]], **how
    )


def _hidden(shape: Shape, share: float) -> int:
    return round(share * (shape.num_param_tokens - 2 * shape.embed_dim))


def narrow_vit(backbone: Backbone, shape: Shape) -> Backbone:
    """Give the matched ViT the hidden layers of the first stage."""
    vit = matched_vit(backbone, shape)
    return {**vit, "mlp_ratio": (_hidden(shape, STAGES[0][1]) + 0.5) / shape.embed_dim}


def widened(shape: Shape, epochs: int) -> dict[str, Any]:
    """Widen hidden layers at the stages; the last width is that of the matched ViT."""
    return _hook(epochs, [{"hidden_features": _hidden(shape, share)} for _, share in STAGES[1:]])


def shallow_vit(backbone: Backbone, shape: Shape) -> Backbone:
    """Give the matched ViT the blocks of the first stage."""
    return {**matched_vit(backbone, shape), "depth": _depth(shape, STAGES[0][1])}


def _depth(shape: Shape, share: float) -> int:
    return max(1, round(share * shape.depth))


def stacked(shape: Shape, epochs: int) -> dict[str, Any]:
    """Stack blocks at the stages."""
    return _hook(epochs, [{"depth": _depth(shape, share)} for _, share in STAGES[1:]])


QUESTION = Question(
    name="growth",
    title="Growth",
    text=(
        "A TokenFormer with a quarter of the config's pairs, with half of them from a third of the "
        "epochs on and with all of them from two thirds on, against models that have their size "
        "from the start, in one schedule of the learning rate. *Zero keys* and *duplicates* leave "
        "what the model computes as it is, *random* pairs, the paper's, do not (arXiv:2410.23168, "
        "Section 3.3). The ViT has as many parameters as the whole TokenFormer; it grows by its "
        "hidden layers (Net2Net, arXiv:1511.05641, which leaves the function as it is) or by its "
        "blocks (stacking, Gong et al. 2019, which does not). FLOPs are those of all forward and "
        "backward passes. *The largest, fewer epochs* has a whole schedule of its own over two "
        "thirds of the epochs, and *a quarter, twice the epochs* one over twice as many, at about "
        "the cost of the grown ones. Published for ViTs on ImageNet are savings of 56.7 % (LEMON, "
        "arXiv:2310.07999) and 76 % (Mango, arXiv:2310.10699, DeiT-S to DeiT-B); both start from a "
        "trained small model and leave its cost out, which is counted here."
    ),
    variants=(
        Variant("small", "a quarter of the pairs", pairs(STAGES[0][1])),
        Variant("medium", "half of the pairs", pairs(STAGES[1][1])),
        Variant("large", "all pairs: the largest", arguments()),
        Variant(
            "large_short",
            "the largest, fewer epochs",
            arguments(),
            outside=lambda shape, epochs: {"train_cfg": {"max_epochs": round(2 / 3 * epochs)}},
        ),
        Variant(
            "small_long",
            "a quarter, twice the epochs",
            pairs(STAGES[0][1]),
            outside=lambda shape, epochs: {"train_cfg": {"max_epochs": 2 * epochs}},
        ),
        Variant("zero_key", "grown, zero keys", pairs(STAGES[0][1]), outside=grown(), grown=True),
        Variant(
            "duplicate",
            "grown, duplicates",
            pairs(STAGES[0][1]),
            outside=grown(init="duplicate"),
            grown=True,
        ),
        Variant(
            "random",
            "grown, random",
            pairs(STAGES[0][1]),
            outside=grown(init="random"),
            grown=True,
        ),
        Variant("vit", "ViT, matched", matched_vit, reference=True),
        Variant("net2net", "ViT, Net2Net", narrow_vit, outside=widened, reference=True, grown=True),
        Variant(
            "stacking", "ViT, stacking", shallow_vit, outside=stacked, reference=True, grown=True
        ),
    ),
    compute="large",
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
