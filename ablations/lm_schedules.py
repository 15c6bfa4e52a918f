"""How often should a language model grow during training? In 20, 10 or 5 steps to one size.

A course report of 2024 starts a TokenFormer of GPT-2's size with 64, 128 or 256 pairs a layer and
appends as many every 125, 250 or 500 of 2500 epochs (G64, G128, G256). All three have 1280 in the
end. Here they have all of the config's pairs in the end, in 20, 10 or 5 equal steps. The report
resets the optimiser at each growth; *kept* moments are not reset. New pairs start with zero keys.
What the report calls epochs are shares of the run here. The learning rate follows the config's
schedule; the report's is constant.
"""

from tokenformer_vit.experiments import LANGUAGE, Shape, TrainingCost, Variant, in_stages, main
from tokenformer_vit.experiments.language_models import share


def schedule(name: str, label: str, number: int, moments: str) -> Variant:
    """Grow in a number of equal stages, by equal numbers of pairs."""
    shares = [stage / number for stage in range(1, number + 1)]
    growth = in_stages("iteration", shares, Shape.pairs, moments=moments)
    return Variant(name, label, share(1 / number), outside=growth, grown=True)


QUESTION = TrainingCost(
    name="lm_schedules",
    title="Language: schedules of growth",
    text=__doc__,
    variants=(
        Variant("large", "all pairs from the start", share(1)),
        schedule("g64", "a twentieth at a time, moments reset (G64)", 20, "reset"),
        schedule("g128", "a tenth at a time, moments reset (G128)", 10, "reset"),
        schedule("g256", "a fifth at a time, moments reset (G256)", 5, "reset"),
        schedule("g256_kept", "a fifth at a time, moments kept", 5, "keep"),
    ),
    field=LANGUAGE,
    largest="large",
)

if __name__ == "__main__":
    main(QUESTION)
