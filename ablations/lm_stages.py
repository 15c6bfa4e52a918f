"""Does a trained small model save most of a large language model's training, as the paper claims?

A TokenFormer with a quarter of the config's pairs is trained to its end. It is enlarged, to twice
and to four times its pairs, and trained on with a warm-up and a schedule of its own, for a tenth
and a fifth of the iterations of a large model (arXiv:2410.23168, Section 3.3: a tenth of the
tokens). New pairs start with *zero keys* or as *duplicates*, which keep what the model computes; at
*random* with τ kept; or at random *as released*, where τ becomes that of the new number of pairs.

A grown model is compared with the large model from scratch, for all iterations and for the cost of
the growth; with the small model trained on without growth, for the cost of the stage; and with
Transformers that grew by Net2Net (arXiv:1511.05641) to as many weights. They have GPT-2's form, or
GPT-NeoX's with the TokenFormer's rotary positions, and their small models are larger. Costs are
training FLOPs. There are three accounts of the small model's cost: it is *sunk*, because the model
exists; it is *shared* by the small model and the two that grow from it; or it is *counted* in full.
"""

from tokenformer_vit.experiments import LANGUAGE, Budgets, main
from tokenformer_vit.experiments.language_models import TRANSFORMERS, to_matched_transformer
from tokenformer_vit.experiments.stages import FULL, Family, Reference

FAMILY = Family(
    LANGUAGE,
    (
        Reference(TRANSFORMERS["learned"], to_matched_transformer()),
        Reference(TRANSFORMERS["rotary"], to_matched_transformer(positions="rotary"), "rotary_"),
    ),
    times=(2, 4),
)

QUESTION = Budgets(
    name="lm_stages",
    title="Language: growth in stages",
    text=__doc__,
    variants=FAMILY.variants,
    field=LANGUAGE,
    accounts=FAMILY.accounts,
    full=FULL,
    measured=FAMILY.measured,
)

if __name__ == "__main__":
    main(QUESTION)
