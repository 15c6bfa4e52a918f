"""How does a TokenFormer language model compare with a Transformer of its width and depth?

Transformers against TokenFormers of the same width C and depth, on the same text for as many steps
(arXiv:2410.23168, Section 4.2). One Transformer has GPT-2's form, with learned positions. The other
has GPT-NeoX's form, which rotates as many dimensions of each head as the TokenFormer; the parts of
a block follow each other, as in a TokenFormer, and it starts as the Transformers of the TokenFormer
authors do. *Matched* has ¾ C pairs in each of q, k, v and o and 3 C in the feed-forward layer: as
many weights and FLOPs in its blocks as a Transformer, which also has biases and norms with
parameters. With as many pairs as channels, like the released models, a TokenFormer is larger and
costs more. A course report of 2024 compares a TokenFormer with GPT-2's form at its size
(134,654,545 parameters against 163,087,441). It gave the TokenFormer 4 C pairs a block, two thirds
of the Transformer's weights, so its row is not an equal comparison. How the report divided them is
not known. Here they are ½ C in each of q, k, v and o and 2 C in the feed-forward layer, which is
half of the Transformer's.
"""

from tokenformer_vit.experiments import LANGUAGE, Baseline, Part, Shape, Variant, main
from tokenformer_vit.experiments.language_models import TRANSFORMERS, pairs_by_width, transformer


def of(positions: str, name: str) -> Variant:
    """Use the Transformer whose hidden layers have 4 C neurons."""

    def change(model: Part, shape: Shape) -> Part:
        return transformer(model, shape, 4 * shape.embed_dim, positions)

    return Variant(name, TRANSFORMERS[positions], change, reference=True)


ROTARY = ((TRANSFORMERS["rotary"], "rotary"),)

QUESTION = Baseline(
    name="lm_transformer",
    title="Language: TokenFormer and Transformer",
    text=__doc__,
    variants=(
        of("learned", "transformer"),
        of("rotary", "rotary"),
        Variant("matched", "TokenFormer, matched", pairs_by_width(3 / 4, 3), against=ROTARY),
        Variant(
            "matched_learned",
            "matched, learned positions",
            pairs_by_width(3 / 4, 3, positions="learned"),
        ),
        Variant("width", "pairs = width (larger)", pairs_by_width(1, 4), against=ROTARY),
        Variant(
            "report", "halved feed-forward (smaller)", pairs_by_width(1 / 2, 2), against=ROTARY
        ),
    ),
    field=LANGUAGE,
    baseline="transformer",
)

if __name__ == "__main__":
    main(QUESTION)
