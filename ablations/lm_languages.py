"""Can a model learn languages in turn, and forget none, if each has its own pairs?

A TokenFormer learns English with the config's pairs, then French and Spanish with as many appended
pairs each. A course report of 2024 did this with 512 pairs a language, but in its published code
the masks were never applied, and perplexity was measured on training text. *Masked*: a language is
trained and read with only its own pairs, and the pairs of other languages do not change; embedding,
positions and final norm continue to train. *Masked, the rest frozen*: embedding, positions and
final norm also do not change after English. *Unmasked*: all pairs are active and train. New pairs
then start with zero keys, which keep what the model computes; new pairs under a mask start at
random. A text in a language that was not trained yet is read with the newest pairs. All variants
share the English stage.

The texts are the folders newstest_en, _fr and _es in data/, or in the folder --data-root.
"""

from collections.abc import Iterator
from typing import Any

from tokenformer_vit.experiments import LANGUAGE, ModelChange, Part, Shape, Texts, Variant, main
from tokenformer_vit.experiments.language_models import sizes

TEXTS = {"newstest_en": "English", "newstest_fr": "French", "newstest_es": "Spanish"}


def appended(stage: int, text: str, masked: bool, **new: Any) -> ModelChange:
    """Append as many pairs as the config has, for the language of a stage.

    Args:
        stage: Number of the stage; English is 0.
        text: Folder of the text.
        masked: Whether a language is trained and read with only its own pairs.
        new: Other arguments of the model.
    """

    def change(model: Part, shape: Shape) -> Part:
        masks = {"new": text} if masked else None
        # Alone under a mask, pairs with zero keys would start with scores of zero everywhere.
        init = "random" if masked else "zero_key"
        growth = {**shape.pairs(stage + 1), "init": init}
        return {**model, "growth": growth, "masks": masks, **new}

    return change


def stages(name: str, label: str, masked: bool, **new: Any) -> Iterator[Variant]:
    """Continue with each language after English, from the end of the language before."""
    start, languages = "first", "English"
    for number, (text, language) in enumerate(TEXTS.items()):
        if not number:
            continue
        variant = f"{name}_{text.rpartition('_')[2]}"
        languages += f" → {language}"
        change = appended(number, text, masked, **new)
        yield Variant(variant, f"{languages}, {label}", change, text=text, start=start)
        start = variant


def first(model: Part, shape: Shape) -> Part:
    """Give all pairs of the config's model to English."""
    return {**sizes()(model, shape), "masks": {"new": next(iter(TEXTS))}}


QUESTION = Texts(
    name="lm_languages",
    title="Language: three languages in turn",
    text=__doc__,
    variants=(
        Variant("first", "English", first, text=next(iter(TEXTS))),
        *stages("masked", "masked", masked=True),
        *stages("frozen", "masked, the rest frozen", masked=True, frozen_stem=True),
        *stages("unmasked", "unmasked", masked=False),
    ),
    field=LANGUAGE,
    texts=tuple(TEXTS),
)

if __name__ == "__main__":
    main(QUESTION)
