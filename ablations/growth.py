"""What does growth save? Grown TokenFormers, TokenFormers from scratch, and grown ViTs.

A TokenFormer has a quarter of the config's pairs at first, half of them after a third of the
epochs, and all of them after two thirds. It is compared with models that have their size from the
start, in the same learning rate schedule. *Zero keys* and *duplicates* keep what the model
computes; *random* pairs, as in the paper, do not (arXiv:2410.23168, Section 3.3). The ViT has as
many parameters as the whole TokenFormer. It grows by its hidden layers (Net2Net, arXiv:1511.05641,
which keeps the function) or by its blocks (stacking, Gong et al. 2019, which does not). FLOPs count
all forward and backward passes. *The largest, fewer epochs* has a whole schedule over two
thirds of the epochs, and *a quarter, twice the epochs* one over twice as many: they cost about as
much as the grown models. Published savings for ViTs on ImageNet are 56.7 % (LEMON,
arXiv:2310.07999) and 76 % (Mango, arXiv:2310.10699, DeiT-S to DeiT-B). Both start from a trained
small model and do not count its cost, which is counted here.
"""

from tokenformer_vit.experiments import (
    Part,
    Shape,
    TrainingCost,
    Variant,
    arguments,
    in_stages,
    lasting,
    main,
    share_of_pairs,
    to_matched_vit,
)

SHARES = (1 / 4, 1 / 2, 1)  # of the full size, each for a third of the epochs
QUARTER = share_of_pairs(SHARES[0])


def narrow_vit(backbone: Part, shape: Shape) -> Part:
    """Use the matched ViT with the hidden layers of the first stage."""
    hidden = shape.hidden(SHARES[0])["hidden_features"]
    # The committed records have this ratio; matched.mlp_ratio gives 1.5 for them.
    return {**to_matched_vit(backbone, shape), "mlp_ratio": (hidden + 0.5) / shape.embed_dim}


def shallow_vit(backbone: Part, shape: Shape) -> Part:
    """Use the matched ViT with the blocks of the first stage."""
    return {**to_matched_vit(backbone, shape), **depth(shape, SHARES[0])}


def depth(shape: Shape, share: float) -> dict[str, int]:
    """Return a share of the blocks."""
    return {"depth": max(1, round(share * shape.depth))}


def grown(name: str, label: str, **how: str) -> Variant:
    """Grow a TokenFormer by pairs."""
    schedule = in_stages("epoch", SHARES, Shape.pairs, **how)
    return Variant(name, label, QUARTER, outside=schedule, grown=True)


QUESTION = TrainingCost(
    name="growth",
    title="Growth",
    text=__doc__,
    variants=(
        Variant("small", "a quarter of the pairs", QUARTER),
        Variant("medium", "half of the pairs", share_of_pairs(SHARES[1])),
        Variant("large", "all pairs: the largest", arguments()),
        Variant(
            "large_short",
            "the largest, fewer epochs",
            arguments(),
            outside=lasting(2 / 3, "max_epochs"),
        ),
        Variant(
            "small_long", "a quarter, twice the epochs", QUARTER, outside=lasting(2, "max_epochs")
        ),
        grown("zero_key", "grown, zero keys"),
        grown("duplicate", "grown, duplicates", init="duplicate"),
        grown("random", "grown, random", init="random"),
        Variant("vit", "ViT, matched", to_matched_vit, reference=True),
        Variant(
            "net2net",
            "ViT, Net2Net",
            narrow_vit,
            outside=in_stages("epoch", SHARES, Shape.hidden),
            reference=True,
            grown=True,
        ),
        Variant(
            "stacking",
            "ViT, stacking",
            shallow_vit,
            outside=in_stages("epoch", SHARES, depth),
            reference=True,
            grown=True,
        ),
    ),
    largest="large",
)

if __name__ == "__main__":
    main(QUESTION)
