"""What does growth do when training goes on with new text? Against Net2Net, and no growth.

python ablations/lm_continue.py --config configs/lm_newstest.py --seeds 3

The texts are the folders gutenberg and newstest_en in data/, or in another that --data-root names.
"""

from typing import Any

from tokenformer_vit.experiments.fields import LANGUAGE
from tokenformer_vit.experiments.language_variants import (
    growth,
    matched_hidden,
    matched_transformer,
    share,
)
from tokenformer_vit.experiments.questions import (
    Backbone,
    Change,
    Question,
    TextShape,
    Variant,
    arguments,
)

FIRST, SECOND = "gutenberg", "newstest_en"
START = 1 / 2  # of the pairs


def grown(init: str) -> Change:
    """Append the other half of the pairs to the end of the first stage."""

    def change(model: Backbone, shape: TextShape) -> Backbone:
        return {**model, "growth": {**shape.pairs(1), "init": init}}

    return change


def widened(shape: TextShape, iterations: int) -> dict[str, Any]:
    """Widen the Transformer to the weights of all pairs, behind the first iteration."""
    return growth([1 / iterations], [{"hidden_features": matched_hidden(shape)}], iterations)


def second(name: str, label: str, change: Change) -> Variant:
    """Go on from the end of the TokenFormer's first stage."""
    return Variant(name, label, change, text=SECOND, start="first")


QUESTION = Question(
    name="lm_continue",
    title="Language: new text after growth",
    text=(
        "A TokenFormer with half of the config's pairs, and a Transformer with as many weights in "
        "its blocks, train on books (`gutenberg`), and then go on with news (`newstest_en`): as "
        "they are, or grown to all pairs by zero keys or by random pairs, the Transformer by "
        "Net2Net and to as many weights again, behind the first iteration. The paper goes on "
        "with EnWik8 at a constant learning rate (arXiv:2410.23168, Figure 6). Every stage has a "
        "schedule of the learning rate and an optimiser of its own."
    ),
    variants=(
        Variant("first", "TokenFormer", share(START), text=FIRST),
        second("same", "TokenFormer → not grown", arguments()),
        second("zero_key", "TokenFormer → grown, zero keys", grown("zero_key")),
        second("random", "TokenFormer → grown, random", grown("random")),
        Variant(
            "transformer",
            "Transformer",
            matched_transformer(pairs=START),
            text=FIRST,
            reference=True,
        ),
        Variant(
            "transformer_same",
            "Transformer → not grown",
            arguments(),
            text=SECOND,
            start="transformer",
            reference=True,
        ),
        Variant(
            "net2net",
            "Transformer → Net2Net",
            arguments(),
            text=SECOND,
            start="transformer",
            outside=widened,
            reference=True,
            grown=True,
        ),
    ),
    field=LANGUAGE,
    texts=(FIRST, SECOND),
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
