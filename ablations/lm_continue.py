"""What does growth do when training continues with new text? Against Net2Net, and no growth.

A TokenFormer with half of the config's pairs, and two Transformers with as many weights in their
blocks, train on books (`gutenberg`) and continue with news (`newstest_en`), unchanged or grown
after the first iteration: the TokenFormer to all pairs by zero keys or by random pairs, a
Transformer by Net2Net to as many weights. One Transformer has GPT-2's form, the other GPT-NeoX's
with the TokenFormer's rotary positions. The paper continues with EnWik8 at a constant learning rate
(arXiv:2410.23168, Figure 6). Here every stage has its own learning rate schedule and optimiser.

The texts are the folders gutenberg and newstest_en in data/, or in the folder --data-root.
"""

from collections.abc import Iterator
from typing import Any

from tokenformer_vit.experiments import (
    LANGUAGE,
    ModelChange,
    Part,
    Shape,
    Texts,
    Variant,
    arguments,
    main,
)
from tokenformer_vit.experiments.language_models import TRANSFORMERS, share, to_matched_transformer

FIRST, SECOND = "gutenberg", "newstest_en"
START = 1 / 2  # of the pairs


def grown(init: str) -> ModelChange:
    """Append the other half of the pairs to the end of the first stage."""

    def change(model: Part, shape: Shape) -> Part:
        return {**model, "growth": {**shape.pairs(1), "init": init}}

    return change


def widened(shape: Shape, iterations: int) -> dict[str, Any]:
    """Widen the Transformer to the weights of all pairs, after the first iteration."""
    schedule = [{"iteration": 1, **shape.hidden(1)}]
    return {"custom_hooks": [{"type": "GrowthHook", "schedule": schedule}]}


def second(name: str, label: str, change: ModelChange) -> Variant:
    """Continue from the end of the TokenFormer's first stage."""
    return Variant(name, f"TokenFormer → {label}", change, text=SECOND, start="first")


def transformers(positions: str, name: str, prefix: str = "") -> Iterator[Variant]:
    """Train the matched Transformer, and continue from its end without and with growth."""
    label = TRANSFORMERS[positions]
    matched = to_matched_transformer(pairs=START, positions=positions)
    yield Variant(name, label, matched, text=FIRST, reference=True)
    for stage, how, outside in (
        (f"{name}_same", "not grown", None),
        (f"{prefix}net2net", "Net2Net", widened),
    ):
        yield Variant(
            stage,
            f"{label} → {how}",
            arguments(),
            text=SECOND,
            start=name,
            outside=outside,
            reference=True,
            grown=outside is not None,
        )


QUESTION = Texts(
    name="lm_continue",
    title="Language: new text after growth",
    text=__doc__,
    variants=(
        Variant("first", "TokenFormer", share(START), text=FIRST),
        second("same", "not grown", arguments()),
        second("zero_key", "grown, zero keys", grown("zero_key")),
        second("random", "grown, random", grown("random")),
        *transformers("learned", "transformer"),
        *transformers("rotary", "rotary", "rotary_"),
    ),
    field=LANGUAGE,
    texts=(FIRST, SECOND),
)

if __name__ == "__main__":
    main(QUESTION)
