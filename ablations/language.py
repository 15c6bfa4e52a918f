"""Language models beside Transformers, and on one text after another."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models import (
    TRANSFORMERS,
    Change,
    Config,
    Sizes,
    arguments,
    base_model,
    hook,
    matched_transformer,
    pairs_by_width,
    several,
    share_of_pairs,
    transformer,
)
from sweep import Question, Variant, main

TRANSFORMER = """How does a TokenFormer language model compare with a Transformer of its width C?

*GPT-NeoX, rotary* rotates as many dimensions of a head as the TokenFormer. *Matched* has ¾ C pairs
in each of q, k, v and o and 3 C in the feed-forward layer: a Transformer's weights and FLOPs. With
as many pairs as channels, like the released models, a TokenFormer is larger; *halved feed-forward*
is as small as in a course report of 2024."""
CONTINUE = """What does growth do when training continues with new text?

A TokenFormer with half of the config's pairs, and Transformers with as many weights, train on books
(`gutenberg`) and continue with news (`newstest_en`), unchanged or grown after the first iteration
(arXiv:2410.23168, Figure 6). The texts are folders beside that of the config or of --data-root."""
LANGUAGES = """Can a model learn languages in turn, and forget none, if each has its own pairs?

*Masked*: a language is trained and read with only its own pairs, which start at random; embedding,
positions and final norm train, unless they are *frozen* after English. *Unmasked*: all pairs are
active and train; new ones start with zero keys. A text in a language that was not trained yet is
read with the newest pairs. The texts are folders beside that of the config or of --data-root."""

BOOKS, NEWS = "gutenberg", "newstest_en"
LANGUAGE_OF = {"newstest_en": "English", "newstest_fr": "French", "newstest_es": "Spanish"}


def of_width(positions: str) -> Change:
    """Use the Transformer whose hidden layers have 4 C neurons."""
    return transformer(positions, lambda sizes: {"hidden_features": 4 * sizes.embed_dim})


def on(text: str, texts: tuple[str, ...]) -> Change:
    """Train on a text, and measure on all texts."""

    def change(cfg: Config, sizes: Sizes) -> None:
        train = cfg["train_dataloader"]["dataset"]
        folder = Path(train["data_root"]).parent
        train["data_root"] = str(folder / text)
        for name in ("val_dataloader", "test_dataloader"):
            cfg[name]["dataset"]["data_root"] = [str(folder / each) for each in texts]

    return change


def appended(stage: int, **growth: Any) -> Change:
    """Append pairs to the trained model, to a multiple of the config's."""

    def change(cfg: Config, sizes: Sizes) -> None:
        cfg["model"]["growth"] = {**sizes.pairs(stage), **growth}

    return change


def masked(text: str, frozen_stem: bool = False) -> Change:
    """Train and read a text with only the newest pairs."""

    def change(cfg: Config, sizes: Sizes) -> None:
        cfg["model"] |= {"type": "masked_lm.MaskedLM", "masks": {"new": text}}
        if frozen_stem:
            cfg["model"]["frozen_stem"] = True
        hook("masked_lm.MasksHook")(cfg, sizes)

    return change


def continued() -> Iterator[Variant]:
    """Yield models on books, and what becomes of them on news."""
    books, news = on(BOOKS, (BOOKS, NEWS)), on(NEWS, (BOOKS, NEWS))
    yield Variant("first", "TokenFormer", several(share_of_pairs(1 / 2), books))
    yield Variant("same", "TokenFormer → not grown", news, start="first")
    for init, label in (("zero_key", "zero keys"), ("random", "random")):
        change = several(appended(1, init=init), news)
        label, compare = f"TokenFormer → grown, {label}", ("same", "net2net", "rotary_net2net")
        yield Variant(init, label, change, start="first", compare=compare)

    def widened(cfg: Config, sizes: Sizes) -> None:
        hook("Net2NetHook", schedule=[{"iteration": 1, **sizes.hidden(1)}])(cfg, sizes)

    for positions, label in TRANSFORMERS.items():
        name = "transformer" if positions == "learned" else positions
        grown = "net2net" if positions == "learned" else f"{positions}_net2net"
        matched = matched_transformer(positions, pairs=1 / 2)
        yield Variant(name, label, several(matched, books))
        yield Variant(f"{name}_same", f"{label} → not grown", news, start=name)
        wide = several(widened, news)
        yield Variant(grown, f"{label} → Net2Net", wide, start=name, compare=(f"{name}_same",))


def in_turn() -> Iterator[Variant]:
    """Yield the English stage, and both others in each of three ways."""
    texts = tuple(LANGUAGE_OF)
    first = several(masked(texts[0]), on(texts[0], texts))
    yield Variant("first", "English", first)
    ways: Mapping[str, tuple[str, str, Any]] = {
        "masked": ("masked", "random", masked),
        "frozen": ("masked, the rest frozen", "random", lambda text: masked(text, True)),
        "unmasked": ("unmasked", "zero_key", lambda text: base_model),
    }
    for way, (how, init, mask) in ways.items():
        start, label = "first", "English"
        for stage, text in enumerate(texts[1:], 2):
            name, label = f"{way}_{text.rpartition('_')[2]}", f"{label} → {LANGUAGE_OF[text]}"
            change = several(appended(stage, init=init), mask(text), on(text, texts))
            compare = () if way == "unmasked" else (name.replace(way, "unmasked"),)
            yield Variant(name, f"{label}, {how}", change, start=start, compare=compare)
            start = name


BOTH = ("transformer", "rotary")
learned = several(pairs_by_width(3 / 4, 3), arguments(positions="learned"))
QUESTIONS = tuple(
    Question(name, f"Language: {title}", text, tuple(variants), "perplexity", same_size=False)
    for name, title, text, variants in (
        (
            "lm_transformer",
            "TokenFormer and Transformer",
            TRANSFORMER,
            (
                Variant("transformer", TRANSFORMERS["learned"], of_width("learned")),
                Variant("rotary", TRANSFORMERS["rotary"], of_width("rotary")),
                Variant("matched", "TokenFormer, matched", pairs_by_width(3 / 4, 3), compare=BOTH),
                Variant("matched_learned", "matched, learned positions", learned, compare=BOTH[:1]),
                Variant("width", "pairs = width (larger)", pairs_by_width(1, 4), compare=BOTH),
                Variant(
                    "report",
                    "halved feed-forward (smaller)",
                    pairs_by_width(1 / 2, 2),
                    compare=BOTH,
                ),
            ),
        ),
        ("lm_continue", "new text after growth", CONTINUE, continued()),
        ("lm_languages", "three languages in turn", LANGUAGES, in_turn()),
    )
)

if __name__ == "__main__":
    main(QUESTIONS)
