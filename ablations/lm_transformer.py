"""How does a TokenFormer language model compare with a Transformer of its width and depth?

A Transformer in GPT-2's form against TokenFormers of the same width C and depth, on the same text
for as many steps (arXiv:2410.23168, Section 4.2). *Matched* has ¾ C pairs in each of q, k, v and o
and 3 C in the feed-forward layer: as many weights and FLOPs in its blocks as the Transformer. The
Transformer also has biases, norms and learned positions. With as many pairs as channels,
like the released models, a TokenFormer is larger and costs more. A course report of 2024 compares
the two at GPT-2's size (163,087,441 parameters against 134,654,545). It gave the TokenFormer 4 C
pairs a block, two thirds of the Transformer's weights, so its row is not an equal comparison. How
the report divided them is not known. Here they are ½ C in each of q, k, v and o and 2 C in the
feed-forward layer, which is half of the Transformer's.
"""

from tokenformer_vit.experiments import LANGUAGE, Baseline, Variant, main
from tokenformer_vit.experiments.language_models import pairs_by_width, transformer

QUESTION = Baseline(
    name="lm_transformer",
    title="Language: TokenFormer and Transformer",
    text=__doc__,
    variants=(
        Variant(
            "transformer",
            "Transformer",
            lambda model, shape: transformer(model, shape, 4 * shape.embed_dim),
            reference=True,
        ),
        Variant("matched", "TokenFormer, matched", pairs_by_width(3 / 4, 3)),
        Variant(
            "matched_learned",
            "matched, learned positions",
            pairs_by_width(3 / 4, 3, positions="learned"),
        ),
        Variant("width", "pairs = width (larger)", pairs_by_width(1, 4)),
        Variant("report", "halved feed-forward (smaller)", pairs_by_width(1 / 2, 2)),
    ),
    field=LANGUAGE,
    baseline="transformer",
)

if __name__ == "__main__":
    main(QUESTION)
