"""What does growth save a language model? Grown TokenFormers, from-scratch ones, and Net2Net.

python ablations/lm_growth.py --config configs/lm_shakespeare.py --seeds 3
"""

from tokenformer_vit.experiments.fields import LANGUAGE
from tokenformer_vit.experiments.language_variants import (
    grown,
    lasting,
    matched_transformer,
    share,
    widened,
)
from tokenformer_vit.experiments.questions import Question, Variant

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)

QUESTION = Question(
    name="lm_growth",
    title="Language: growth",
    text=(
        "A TokenFormer with an eighth of the config's pairs that has a quarter, half and all of "
        "them from a quarter, half and three quarters of the iterations on, against models that "
        "have their size from the start, in one schedule of the learning rate "
        "(arXiv:2410.23168, Section 3.3 and Figures 3, 4 and 7). *Zero keys* and *duplicates* "
        "leave what the model computes as it is, *random* pairs, the paper's, do not. The "
        "Transformer, in GPT-2's form, has as many weights in its blocks as the whole TokenFormer; "
        "it grows by its hidden layers (Net2Net, arXiv:1511.05641), through the same shares of "
        "them. *The largest, fewer iterations* and *an eighth, twice the iterations* have whole "
        "schedules of their own and cost about as much as the grown ones.\n\n"
        "The paper's own runs are of 576, 2140, 4850 and 8620 pairs at 12 blocks of width 768 "
        "(124M, 354M, 757M and 1.4B parameters as it prints them), trained anew on 30B tokens "
        "after each growth, where each model from scratch takes 300B. Validation perplexities it "
        "reports on OpenWebText:\n\n"
        "| | 124M | 354M | 757M | 1.4B |\n"
        "|---|---|---|---|---|\n"
        "| Transformer, from scratch, 300B tokens | 17.06 | 13.02 | 11.93 | 11.63 |\n"
        "| TokenFormer, grown, 30B tokens a stage | 16.41 (base) | 14.02 | 12.59 | 11.77 |\n"
        "| TokenFormer, grown, 60B tokens a stage | – | 13.59 | 12.28 | 11.60 |\n\n"
        "and beside other methods of growth (its Table 8): Net2Net 16.4, 14.3, 12.1; HyperCloning "
        "16.4, 14.1, 12.0; TokenFormer 16.1, 13.7, 11.5, at 124M, 354M and 757M."
    ),
    variants=(
        Variant("eighth", "an eighth of the pairs", share(SHARES[0])),
        Variant("quarter", "a quarter of the pairs", share(SHARES[1])),
        Variant("half", "half of the pairs", share(SHARES[2])),
        Variant("large", "all pairs: the largest", share(SHARES[3])),
        Variant("large_short", "the largest, fewer iterations", share(1), outside=lasting(3 / 5)),
        Variant(
            "eighth_long", "an eighth, twice the iterations", share(SHARES[0]), outside=lasting(2)
        ),
        Variant(
            "zero_key", "grown, zero keys", share(SHARES[0]), outside=grown(SHARES), grown=True
        ),
        Variant(
            "duplicate",
            "grown, duplicates",
            share(SHARES[0]),
            outside=grown(SHARES, init="duplicate"),
            grown=True,
        ),
        Variant(
            "random",
            "grown, random",
            share(SHARES[0]),
            outside=grown(SHARES, init="random"),
            grown=True,
        ),
        Variant("transformer", "Transformer, matched", matched_transformer(), reference=True),
        Variant(
            "net2net",
            "Transformer, Net2Net",
            matched_transformer(SHARES[0]),
            outside=widened(SHARES),
            reference=True,
            grown=True,
        ),
    ),
    field=LANGUAGE,
    compute="large",
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
