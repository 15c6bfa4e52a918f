"""Can a model learn languages in turn, and forget none, if each has pairs of its own?

python ablations/lm_languages.py --config configs/lm_newstest.py --seeds 3

The texts are the folders newstest_en, _fr and _es in data/, or in another that --data-root names.
"""

from collections.abc import Iterator
from typing import Any

from tokenformer_vit.experiments.fields import LANGUAGE
from tokenformer_vit.experiments.language_variants import sizes
from tokenformer_vit.experiments.questions import Backbone, Change, Question, TextShape, Variant

TEXTS = {"newstest_en": "English", "newstest_fr": "French", "newstest_es": "Spanish"}


def appended(stage: int, text: str, masked: bool, **new: Any) -> Change:
    """Append as many pairs as the config has, for the language of a stage.

    Args:
        stage: Its number, the first being 0.
        text: Its folder.
        masked: Train and read a language with its own pairs alone.
        new: Other arguments of the model.
    """

    def change(model: Backbone, shape: TextShape) -> Backbone:
        masks = {"new": text} if masked else None
        # By themselves, pairs of zero keys would begin with scores of zero everywhere.
        init = "random" if masked else "zero_key"
        growth = {**shape.pairs(stage + 1), "init": init}
        return {**model, "growth": growth, "masks": masks, **new}

    return change


def stages(name: str, label: str, masked: bool, **new: Any) -> Iterator[Variant]:
    """Go on with each language after the first, from the end of that before."""
    (_, *texts), start = TEXTS, "first"
    told = [next(iter(TEXTS.values()))]
    for number, text in enumerate(texts, start=1):
        variant = f"{name}_{text.rpartition('_')[2]}"
        told.append(TEXTS[text])
        yield Variant(
            variant,
            f"{' → '.join(told)}, {label}",
            appended(number, text, masked, **new),
            text=text,
            start=start,
        )
        start = variant


def first(model: Backbone, shape: TextShape) -> Backbone:
    """Name all pairs of the config's model those of the first language."""
    return {**sizes()(model, shape), "masks": {"new": next(iter(TEXTS))}}


QUESTION = Question(
    name="lm_languages",
    title="Language: three languages in turn",
    text=(
        "A TokenFormer learns English with the config's pairs, then French and Spanish with as "
        "many appended ones each, as in a course report of 2024 (512 pairs a language), in whose "
        "published code the masks were never applied and perplexity was taken on training text. "
        "*Masked*: a language is trained and read with its own pairs alone, and those of the "
        "others stay as they are; embedding, positions and final norm go on training. *Masked, "
        "the rest frozen*: these stay as they are after English, too. *Unmasked*: all pairs are "
        "active and train, and new ones start with zero keys, so that what the model computes "
        "stays; those of a mask start at random. A text whose language was not trained yet is read "
        "with the newest pairs. All have the same English stage."
    ),
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
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
