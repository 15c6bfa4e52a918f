"""What does growth save a language model? Grown TokenFormers, from-scratch ones, and Net2Net.

A TokenFormer has an eighth of the config's pairs at first, and a quarter, half and all of them
after a quarter, half and three quarters of the iterations. It is compared with models that have
their size from the start, in the same learning rate schedule (arXiv:2410.23168, Section 3.3 and
Figures 3, 4 and 7). *Zero keys* and *duplicates* keep what the model computes; *random* pairs, as
in the paper, do not. Two Transformers have as many weights in their blocks as the whole
TokenFormer: one in GPT-2's form, and one in GPT-NeoX's form with the TokenFormer's rotary
positions. They grow by their hidden layers (Net2Net, arXiv:1511.05641), through the same shares of
them. *The largest, fewer iterations* and *an eighth, twice the iterations* have whole schedules and
cost about as much as the grown models.

The paper's own runs have 576, 2140, 4850 and 8620 pairs, at 12 blocks of width 768 (124M, 354M,
757M and 1.4B parameters as it prints them). They are trained on 30B tokens after each growth, and
each model from scratch on 300B. It reports these validation perplexities on OpenWebText:

| | 124M | 354M | 757M | 1.4B |
|---|---|---|---|---|
| Transformer, from scratch, 300B tokens | 17.06 | 13.02 | 11.93 | 11.63 |
| TokenFormer, grown, 30B tokens a stage | 16.41 (base) | 14.02 | 12.59 | 11.77 |
| TokenFormer, grown, 60B tokens a stage | – | 13.59 | 12.28 | 11.60 |

and for other methods of growth (its Table 8): Net2Net 16.4, 14.3, 12.1; HyperCloning 16.4, 14.1,
12.0; TokenFormer 16.1, 13.7, 11.5, at 124M, 354M and 757M.
"""

from tokenformer_vit.experiments import (
    LANGUAGE,
    Shape,
    TrainingCost,
    Variant,
    in_stages,
    lasting,
    main,
)
from tokenformer_vit.experiments.language_models import TRANSFORMERS, share, to_matched_transformer

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the full size, each for a quarter of the iterations
EIGHTH = share(SHARES[0])


def grown(name: str, label: str, **how: str) -> Variant:
    """Grow a TokenFormer by pairs."""
    schedule = in_stages("iteration", SHARES, Shape.pairs, **how)
    return Variant(name, label, EIGHTH, outside=schedule, grown=True)


def transformers(positions: str, name: str, prefix: str = "") -> tuple[Variant, Variant]:
    """Train the matched Transformer from scratch, and grow it by Net2Net."""
    label = TRANSFORMERS[positions]
    return (
        Variant(
            name,
            f"{label}, matched",
            to_matched_transformer(positions=positions),
            reference=positions,
        ),
        Variant(
            f"{prefix}net2net",
            f"{label}, Net2Net",
            to_matched_transformer(SHARES[0], positions=positions),
            outside=in_stages("iteration", SHARES, Shape.hidden),
            reference=positions,
            grown=True,
        ),
    )


QUESTION = TrainingCost(
    name="lm_growth",
    title="Language: growth",
    text=__doc__,
    variants=(
        Variant("eighth", "an eighth of the pairs", EIGHTH),
        Variant("quarter", "a quarter of the pairs", share(SHARES[1])),
        Variant("half", "half of the pairs", share(SHARES[2])),
        Variant("large", "all pairs: the largest", share(SHARES[3])),
        Variant(
            "large_short",
            "the largest, fewer iterations",
            share(1),
            outside=lasting(3 / 5, "max_iters"),
        ),
        Variant(
            "eighth_long",
            "an eighth, twice the iterations",
            EIGHTH,
            outside=lasting(2, "max_iters"),
        ),
        grown("zero_key", "grown, zero keys"),
        grown("duplicate", "grown, duplicates", init="duplicate"),
        grown("random", "grown, random", init="random"),
        *transformers("learned", "transformer"),
        *transformers("rotary", "rotary", "rotary_"),
    ),
    field=LANGUAGE,
    largest="large",
)

if __name__ == "__main__":
    main(QUESTION)
