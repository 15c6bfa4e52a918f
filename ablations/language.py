"""Language models beside Transformers, and on one text after another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from growth import at_start
from models import (
    TRANSFORMERS,
    Config,
    Sizes,
    arguments,
    base_model,
    factory,
    fewer_pairs,
    hook,
    pairs_by_width,
    resized,
    several,
    transformer,
)
from sweep import Question, Variant, main

TRANSFORMER = """How does a TokenFormer language model compare with a Transformer of its width C?

*Matched* has a Transformer's weights and FLOPs: ¾ C pairs in each of q, k, v and o, 3 C in the
feed-forward layer. *Halved feed-forward* is as small as in a course report of 2024."""
CONTINUE = """What does growth do when training continues with new text?

Models with half of the config's pairs train on books (`gutenberg`), then on news (`newstest_en`),
unchanged or grown. The texts are folders beside that of the config or of --data-root."""
LANGUAGES = """Can a model learn languages in turn, and forget none, if each has its own pairs?

*Masked*: a language is trained and read with only its own pairs. *Frozen*: what is outside the
blocks is trained in English alone. Texts are folders beside that of the config or --data-root."""

TEXTS = BOOKS, NEWS = ("gutenberg", "newstest_en")
HALF = resized(lambda sizes: sizes.hidden(pairs=1 / 2))
LANGUAGE_OF = {"newstest_en": "English", "newstest_fr": "French", "newstest_es": "Spanish"}


@factory
def on(cfg: Config, sizes: Sizes, text: str, texts: tuple[str, ...]) -> None:
    """Train on a text, and measure on all texts."""
    train = cfg["train_dataloader"]["dataset"]
    folder = Path(train["data_root"]).parent
    train["data_root"] = str(folder / text)
    for name in ("val_dataloader", "test_dataloader"):
        cfg[name]["dataset"]["data_root"] = [str(folder / each) for each in texts]


@factory
def appended(cfg: Config, sizes: Sizes, stage: int, init: str) -> None:
    """Append pairs to the trained model, to a multiple of the config's."""
    cfg["model"]["growth"] = {**sizes.pairs(stage), "init": init}


@factory
def masked(cfg: Config, sizes: Sizes, text: str, **how: Any) -> None:
    """Train and read a text with only the newest pairs."""
    cfg["model"] |= {"type": "masked_lm.MaskedLM", "masks": {"new": text}, **how}
    hook("masked_lm.MasksHook")(cfg, sizes)


def continued() -> Iterator[Variant]:
    """Yield models on books, and what becomes of them on news."""
    books, news = on(BOOKS, TEXTS), on(NEWS, TEXTS)
    yield Variant("first", "TokenFormer", several(fewer_pairs(1 / 2), books))
    yield Variant("same", "TokenFormer → not grown", news, start="first")
    for init, label in (("zero_key", "zero keys"), ("random", "random")):
        change = several(appended(1, init), news)
        label, compare = f"TokenFormer → grown, {label}", ("same", "net2net", "rotary_net2net")
        yield Variant(init, label, change, start="first", compare=compare)
    for prefix, name, positions, label in TRANSFORMERS:
        matched = several(transformer(positions), HALF)
        yield Variant(name, label, several(matched, books))
        same, wide = f"{name}_same", several(at_start(Sizes.hidden), news)
        yield Variant(same, f"{label} → not grown", news, start=name)
        yield Variant(f"{prefix}net2net", f"{label} → Net2Net", wide, start=name, compare=(same,))


def in_turn() -> Iterator[Variant]:
    """Yield the English stage, and both others in each of three ways."""
    texts = tuple(LANGUAGE_OF)
    yield Variant("first", "English", several(masked(texts[0]), on(texts[0], texts)))
    for way, how, init, frozen in (
        ("masked", "masked", "random", {}),
        ("frozen", "masked, the rest frozen", "random", {"frozen_stem": True}),
        ("unmasked", "unmasked", "zero_key", {}),
    ):
        start, label = "first", "English"
        for stage, text in enumerate(texts[1:], 2):
            name, label = f"{way}_{text.rpartition('_')[2]}", f"{label} → {LANGUAGE_OF[text]}"
            mask = base_model if way == "unmasked" else masked(text, **frozen)
            change = several(appended(stage, init), mask, on(text, texts))
            compare = () if way == "unmasked" else (name.replace(way, "unmasked"),)
            yield Variant(name, f"{label}, {how}", change, start=start, compare=compare)
            start = name


BOTH = ("transformer", "rotary")
MATCHED, HALVED = pairs_by_width(3 / 4, 3), pairs_by_width(1 / 2, 2)
LEARNED = several(MATCHED, arguments(positions="learned"))
WIDE = resized(lambda sizes: {"hidden_features": 4 * sizes.embed_dim})
BESIDE = (
    *(
        Variant(name, text, several(transformer(kind), WIDE))
        for _, name, kind, text in TRANSFORMERS
    ),
    Variant("matched", "TokenFormer, matched", MATCHED, compare=BOTH),
    Variant("matched_learned", "matched, learned positions", LEARNED, compare=BOTH[:1]),
    Variant("width", "pairs = width (larger)", pairs_by_width(1, 4), compare=BOTH),
    Variant("report", "halved feed-forward (smaller)", HALVED, compare=BOTH),
)
QUESTIONS = tuple(
    Question(name, f"Language: {title}", text, tuple(variants), "perplexity", same_size=False)
    for name, title, text, variants in (
        ("lm_transformer", "TokenFormer and Transformer", TRANSFORMER, BESIDE),
        ("lm_continue", "new text after growth", CONTINUE, continued()),
        ("lm_languages", "three languages in turn", LANGUAGES, in_turn()),
    )
)

if __name__ == "__main__":
    main(QUESTIONS)
