"""One training for every size? Nested pairs, against models trained alone, pruned and grown.

*Nested* trains the first pairs of every layer as smaller models of one model: by the *sandwich*
rule (the largest, the smallest and a random size in every step, arXiv:1903.05134). A size of S
pairs has τ = √S, or √P if *kept*. *Grown* and *frozen* are the quarter, grown step by step, each
time with a whole training, and with the old pairs frozen. *Pruned* and *top-k* take the model with
all pairs, and *reordered* trains it by the sandwich rule for an eighth of the epochs.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from models import Change, Config, Sizes, hook, lasting, matched_vit, several, share_of_pairs
from sweep import Question, Variant, main

from tokenformer_vit.layers.arguments import COUNTS

SIZES = (0.25, 0.5, 0.75, 1.0)
SMALLER = list(SIZES[:-1])


def nested(**new: Any) -> Change:
    """Train a nested model at all of its sizes."""

    def change(cfg: Config, sizes: Sizes) -> None:
        cfg["model"]["type"] = "NestedClassifier"
        cfg["model"]["backbone"] |= {"nested": SMALLER, **new}

    return change


def short_warmup(cfg: Config, sizes: Sizes) -> None:
    """Warm up for 20 iterations: an eighth of the epochs may be one."""
    cfg["param_scheduler"] = [
        {"type": "LinearLR", "start_factor": 1e-3, "by_epoch": False, "end": 20},
        {"type": "CosineAnnealingLR", "eta_min": 1e-5, "by_epoch": False, "begin": 20},
    ]


def grown(family: str, **how: Any) -> Iterator[Variant]:
    """Grow the smallest model to each of the larger sizes in turn."""
    for before, size in pairwise(SIZES):

        def change(cfg: Config, sizes: Sizes, before: float = before, size: float = size) -> None:
            share_of_pairs(before)(cfg, sizes)
            smaller = [sizes.pairs(each) for each in SMALLER if each < before]
            if how.get("nested") and smaller:
                parts = [{kind: pairs[COUNTS[kind]] for kind in COUNTS} for pairs in smaller]
                cfg["model"]["backbone"]["nested"] = parts
            schedule = [{"iteration": 0, **sizes.pairs(size)}]
            hook("GrowthHook", schedule=schedule, **how)(cfg, sizes)

        start = f"{'alone' if before == SIZES[0] else family}_{100 * before:g}"
        name, alone = f"{family}_{100 * size:g}", f"alone_{100 * size:g}"
        yield Variant(name, f"{family}, {size:g}", change, start=start, compare=(alone,))


def narrow_vit(share: float) -> Change:
    """Use a narrower ViT, with as many weights in its blocks as a share of the pairs has."""

    def change(cfg: Config, sizes: Sizes) -> None:
        heads = sizes.blocks["num_heads"]
        width = heads * round(share**0.5 * sizes.embed_dim / heads)
        pairs = round(share * sizes.pairs_of_block * sizes.embed_dim / width)
        # The ViT depends only on the sum of the pairs.
        counts = dict.fromkeys(sizes.counts, 0) | {COUNTS["ffn"]: pairs}
        narrow = {**sizes.blocks, "embed_dim": width}
        matched_vit(cfg, replace(sizes, blocks=narrow, counts=counts))
        cfg["model"]["head"]["in_channels"] = width

    return change


WHOLE = "alone_100"
SHORT = several(nested(), lasting(1 / 8), short_warmup)
TRAINED = {
    "sandwich": ("nested, sandwich", nested()),
    "distill": ("nested, sandwich, distillation", None),
    "kept": ("nested, sandwich, τ kept", nested(nested_tau="kept")),
    "parts": ("nested, parts", None),
    "one": ("nested, one random size", None),
}
VARIANTS = (
    *(Variant(f"alone_{100 * s:g}", f"alone, {s:g}", share_of_pairs(s)) for s in SMALLER),
    Variant(WHOLE, "alone, all pairs", hook("CompressionHook", keep=SMALLER)),
    *(Variant(key, label, change, compare=(WHOLE,)) for key, (label, change) in TRAINED.items()),
    Variant("reordered", "reordered", SHORT, start=WHOLE, start_folder="nested", compare=(WHOLE,)),
    *grown("frozen", nested=True, freeze="old", train_head=False),
    *grown("grown"),
    *(Variant(f"vit_{100 * s:g}", f"ViT, {s:g}", narrow_vit(s)) for s in SIZES),
)
QUESTIONS = (Question("nested", "Nested sizes", str(__doc__), VARIANTS, same_size=False),)

if __name__ == "__main__":
    main(QUESTIONS)
