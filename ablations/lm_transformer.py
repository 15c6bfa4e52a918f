"""How does a TokenFormer language model compare with a Transformer of its width and depth?

python ablations/lm_transformer.py --config configs/lm_shakespeare.py --seeds 3
"""

from tokenformer_vit.experiments.fields import LANGUAGE
from tokenformer_vit.experiments.language_variants import pairs_by_width, transformer
from tokenformer_vit.experiments.questions import Question, Variant

QUESTION = Question(
    name="lm_transformer",
    title="Language: TokenFormer and Transformer",
    text=(
        "A Transformer in GPT-2's form against TokenFormers of the same width C and depth, on the "
        "same text for as many steps (arXiv:2410.23168, Section 4.2). *Matched* has ¾ C pairs in "
        "each of q, k, v and o and 3 C in the feed-forward layer: as many weights, and FLOPs, in "
        "its blocks as the Transformer; what is left of a difference are the Transformer's biases, "
        "norms and learned positions. With as many pairs as channels, as the released models have "
        "them, a TokenFormer is larger and costs more. A course report of 2024, which compares the "
        "two at GPT-2's size (163,087,441 parameters against 134,654,545), gave the TokenFormer "
        "4 C pairs a block, which is two thirds of the Transformer's weights; its row is no equal "
        "comparison. How the report divided them is not known here: they are taken as ½ C in each "
        "of q, k, v and o and 2 C in the feed-forward layer, half of the Transformer's."
    ),
    variants=(
        Variant(
            "transformer",
            "Transformer",
            lambda model, shape: transformer(4 * shape.embed_dim, model, shape),
            reference=True,
        ),
        Variant("matched", "TokenFormer, matched", pairs_by_width(3 / 4, 3)),
        Variant(
            "matched_learned",
            "matched, learned positions",
            pairs_by_width(3 / 4, 3, positions="learned"),
        ),
        Variant("width", "pairs = width (larger)", pairs_by_width(1, 4)),
        Variant(
            "report",
            "halved feed-forward (smaller)",
            pairs_by_width(1 / 2, 2),
        ),
    ),
    field=LANGUAGE,
    baseline="transformer",
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
