"""How often should a language model grow while it trains? In 20, 10 or 5 steps to one size.

python ablations/lm_schedules.py --config configs/lm_shakespeare.py --seeds 3
"""

from tokenformer_vit.experiments.fields import LANGUAGE
from tokenformer_vit.experiments.language_variants import grown, share
from tokenformer_vit.experiments.questions import Question, Variant


def stages(number: int) -> list[float]:
    """Return the shares of all pairs in so many equal steps."""
    return [stage / number for stage in range(1, number + 1)]


def schedule(name: str, label: str, number: int, moments: str) -> Variant:
    """Grow at equal distances by equal numbers of pairs, the first being the start."""
    return Variant(
        name,
        label,
        share(1 / number),
        outside=grown(stages(number), moments=moments),
        grown=True,
    )


QUESTION = Question(
    name="lm_schedules",
    title="Language: schedules of growth",
    text=(
        "A course report of 2024 starts a TokenFormer of GPT-2's size with 64, 128 or 256 pairs a "
        "layer and appends as many every 125, 250 or 500 of 2500 epochs (G64, G128, G256): all "
        "three have 1280 in the end. Here they have all of the config's pairs in the end, in 20, "
        "10 or 5 equal steps at equal distances. The report resets the optimiser at each growth; "
        "*kept* moments do not. New pairs start with zero keys. What the report calls epochs are "
        "optimiser steps in shares of the run here, and the learning rate has the config's "
        "schedule, where the report's is constant."
    ),
    variants=(
        Variant("large", "all pairs from the start", share(1)),
        schedule("g64", "a twentieth at a time, moments reset (G64)", 20, "reset"),
        schedule("g128", "a tenth at a time, moments reset (G128)", 10, "reset"),
        schedule("g256", "a fifth at a time, moments reset (G256)", 5, "reset"),
        schedule("g256_kept", "a fifth at a time, moments kept", 5, "keep"),
    ),
    field=LANGUAGE,
    compute="large",
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
