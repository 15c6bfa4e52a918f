"""One training for every size? Nested pairs, against models trained alone, pruned and grown.

The first quarter, half and three quarters of the pairs of every layer are smaller models of the
same width. *Nested* trains all sizes in one model: by the *sandwich* rule (in every step the
largest size, the smallest and a random one between them, arXiv:1903.05134), with or without
*distillation* (the smaller sizes learn the predictions of the largest); with *one random size* a
step; or in *parts* (half of each batch trains all pairs, and the smaller sizes divide the rest).
Each size has its own τ, √S for S pairs. *τ kept* uses √P of all pairs at every size.

*Grown* is the quarter trained alone, grown to half, then three quarters, then all pairs, each time
with a training of full length. If everything except the new pairs is *frozen*, the last model
contains the others. *Pruned* and *top-k* take the model with all pairs, without more training.
*Reordered* sorts its pairs by usage, and trains it by the sandwich rule for an eighth of the
epochs. The ViT of each size has as many blocks and as many weights in them, with less width.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from tokenformer_vit.experiments import (
    Line,
    NestedSizes,
    Part,
    Shape,
    Variant,
    arguments,
    main,
    share_of_pairs,
    to_matched_vit,
)

SIZES = (0.25, 0.5, 0.75, 1.0)
SMALLER = list(SIZES[:-1])
RULES = {
    "sandwich": "nested, sandwich",
    "distill": "nested, sandwich, distillation",
    "kept": "nested, sandwich, τ kept",
    "parts": "nested, parts",
    "one": "nested, one random size",
}


def name(family: str, size: float) -> str:
    """Name the variant that is trained at one size only."""
    return f"{family}_{100 * size:g}"


def train_nested(shape: Shape, length: int) -> Part:
    """Train a nested model at all of its sizes."""
    return {"model": {"type": "NestedClassifier"}}


def train_shortly(shape: Shape, length: int) -> Part:
    """Train a nested model for an eighth of the epochs, with a warm-up of 20 iterations."""
    schedule = [
        {"type": "LinearLR", "start_factor": 1e-3, "by_epoch": False, "end": 20},
        {"type": "CosineAnnealingLR", "eta_min": 1e-5, "by_epoch": False, "begin": 20},
    ]
    epochs = {"max_epochs": max(1, length // 8)}
    return {**train_nested(shape, length), "train_cfg": epochs, "param_scheduler": schedule}


def compress(shape: Shape, length: int) -> Part:
    """Measure the trained model with fewer pairs, and sort its pairs by usage."""
    return {"custom_hooks": [{"type": "CompressionHook", "keep": SMALLER}]}


def grow(shape: Shape, length: int, size: float, **how: Any) -> Part:
    """Grow the model that the run starts from."""
    schedule = [{"iteration": 0, **shape.pairs(size)}]
    return {"custom_hooks": [{"type": "GrowthHook", "schedule": schedule, **how}]}


def grown(family: str, **how: Any) -> list[Variant]:
    """Grow the smallest model to each of the larger sizes in turn."""

    def start(backbone: Part, shape: Shape, share: float) -> Part:
        kinds = {kind: f"num_{kind}_param_tokens" for kind in ("qkv", "proj", "ffn")}
        smaller = [shape.pairs(size) for size in SMALLER if size < share and how.get("nested")]
        nested = [{kind: pairs[key] for kind, key in kinds.items()} for pairs in smaller]
        return {**backbone, **shape.pairs(share), **({"nested": nested} if nested else {})}

    return [
        Variant(
            name(family, size),
            f"{family}, {size:g}",
            partial(start, share=before),
            outside=partial(grow, size=size, **how),
            grown=True,
            start=name("alone" if before == SIZES[0] else family, before),
        )
        for before, size in pairwise(SIZES)
    ]


def narrow(shape: Shape, share: float) -> Shape:
    """Narrow a model, with as many weights in its blocks as a share of the pairs has."""
    width = shape.num_heads * round(share**0.5 * shape.embed_dim / shape.num_heads)
    pairs = round(share * shape.num_param_tokens * shape.embed_dim / width)
    # The ViT depends only on the sum of the pairs.
    return replace(
        shape,
        embed_dim=width,
        num_qkv_param_tokens=0,
        num_proj_param_tokens=0,
        num_ffn_param_tokens=pairs,
    )


def vit(share: float) -> Variant:
    """Use the ViT that matches a share of the pairs."""
    return Variant(
        name("vit", share),
        f"ViT, {share:g}",
        lambda backbone, shape: to_matched_vit(backbone, narrow(shape, share)),
        reference=True,
        outside=lambda shape, length: {
            "model": {"head": {"in_channels": narrow(shape, share).embed_dim}}
        },
    )


def every(variant: str) -> tuple[tuple[float, str], ...]:
    """Find every size in one variant."""
    return tuple((size, variant) for size in SIZES)


ALONE = tuple((size, name("alone", size)) for size in SIZES)
WHOLE = name("alone", 1)

QUESTION = NestedSizes(
    name="nested",
    title="Nested sizes",
    text=__doc__,
    sizes=SIZES,
    variants=(
        *(Variant(name("alone", s), f"alone, {s:g}", share_of_pairs(s)) for s in SMALLER),
        Variant(WHOLE, "alone, all pairs", arguments(), outside=compress),
        *(
            Variant(
                key,
                label,
                arguments(nested=SMALLER, **({"nested_tau": "kept"} if key == "kept" else {})),
                outside=train_nested,
                recorded=key not in ("sandwich", "kept"),
            )
            for key, label in RULES.items()
        ),
        Variant(
            "reordered",
            "reordered",
            arguments(nested=SMALLER),
            outside=train_shortly,
            start=WHOLE,
            start_folder="nested",
        ),
        *grown("frozen", nested=True, freeze="old", train_head=False),
        *grown("grown"),
        *map(vit, SIZES),
    ),
    lines=(
        Line("trained alone", ALONE),
        *(Line(label, every(key)) for key, label in RULES.items()),
        Line("reordered, an eighth of the epochs", every("reordered"), also=(WHOLE,)),
        Line("pruned", every(WHOLE), method="prune"),
        Line("top-k", every(WHOLE), method="top-k"),
        Line("grown, the old frozen", (ALONE[0], *((s, name("frozen", s)) for s in SIZES[1:]))),
        Line("grown", (ALONE[0], *((s, name("grown", s)) for s in SIZES[1:]))),
        Line("ViT, trained alone", tuple((size, name("vit", size)) for size in SIZES)),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
