"""Does a trained small model save most of a large model's training? The paper's claim, for images.

A TokenFormer with a third of the config's pairs is trained to its end. It is enlarged, to twice and
to three times its pairs, and trained on with a warm-up and a schedule of its own, for a tenth and a
fifth of the epochs of a large model (the paper's language models train a tenth of the tokens after
each growth, arXiv:2410.23168, Section 3.3). New pairs start with *zero keys* or as *duplicates*,
which keep what the model computes; at *random* with τ kept; or at random *as released*, where τ
becomes that of the new number of pairs, as in the authors' code.

A grown model is compared with the large model from scratch, for all epochs and for the cost of the
growth; with the small model trained on without growth, for the cost of the stage; and with a ViT
that grew by Net2Net (arXiv:1511.05641) to as many weights. Costs are training FLOPs, within half an
epoch. There are three accounts of the small model's cost: it is *sunk*, because the model exists;
it is *shared* by the small model and the two that grow from it; or it is *counted* in full.
"""

from tokenformer_vit.experiments import IMAGES, Budgets, main, to_matched_vit
from tokenformer_vit.experiments.stages import FULL, Family, Reference

FAMILY = Family(IMAGES, (Reference("ViT", to_matched_vit),), times=(2, 3))

QUESTION = Budgets(
    name="stages",
    title="Growth in stages",
    text=__doc__,
    variants=FAMILY.variants,
    accounts=FAMILY.accounts,
    full=FULL,
    measured=FAMILY.measured,
)

if __name__ == "__main__":
    main(QUESTION)
