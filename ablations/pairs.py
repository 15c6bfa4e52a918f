"""How should the pairs of a block be divided between attention and the feed-forward layer?

q, k, v and o each get pairs in proportion to the width C, and the feed-forward layer gets the rest
of the config's total: parameters and FLOPs stay the same. The paper's base model has C and 4 C, and
its matched model 3/4 C and 3 C; it reports no other shares.
"""

from tokenformer_vit.experiments import Steps, Variant, attention_share, main

QUESTION = Steps(
    name="pairs",
    title="Pairs of attention and feed-forward",
    text=__doc__,
    variants=(
        Variant("half", "1/2 C each", attention_share(0.5)),
        Variant("three_quarters", "3/4 C each", attention_share(0.75)),
        Variant("one", "C each", attention_share(1.0)),
        Variant("five_quarters", "5/4 C each", attention_share(1.25)),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
