"""One training for every size? Nested pairs, against models trained alone, pruned and grown.

*Nested* trains the first pairs of every layer as smaller models, by the *sandwich* rule
(arXiv:1903.05134); with *Scala's distillation* (arXiv:2412.04786) a smaller size also learns what
a larger one predicts, after a tenth of the training for the whole model alone. A size of S pairs
has τ = √S, or √P if *kept*. *Grown* and *frozen* are the quarter, grown step by step by whole
trainings, and with the old pairs frozen. *Pruned* and *top-k* take the model with all pairs, and
*reordered* trains it nested for an eighth of the epochs.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from models import Config, Sizes, factory, fewer_pairs, hook, lasting, matched_vit, several
from sweep import Question, Variant, main

from tokenformer_vit.layers.arguments import COUNTS

SIZES = (0.25, 0.5, 0.75, 1.0)
SMALLER = list(SIZES[:-1])


@factory
def nested(cfg: Config, sizes: Sizes, **new: Any) -> None:
    """Train a nested model at all of its sizes."""
    cfg["model"]["type"] = "NestedClassifier"
    cfg["model"]["backbone"] |= {"nested": SMALLER, **new}


def scala(cfg: Config, sizes: Sizes) -> None:
    """Train a nested model by labels and predictions."""
    nested()(cfg, sizes)
    cfg["model"]["distill"] = True


def short_warmup(cfg: Config, sizes: Sizes) -> None:
    """Warm up for 20 iterations: an eighth of the epochs may be one."""
    cfg["param_scheduler"] = [
        {"type": "LinearLR", "start_factor": 1e-3, "by_epoch": False, "end": 20},
        {"type": "CosineAnnealingLR", "eta_min": 1e-5, "by_epoch": False, "begin": 20},
    ]


@factory
def enlarged(cfg: Config, sizes: Sizes, before: float, size: float, **how: Any) -> None:
    """Grow from one size to another at the start; with ``nested``, keep the sizes before them."""
    fewer_pairs(before)(cfg, sizes)
    smaller = [each / before for each in SMALLER if each < before]
    if how.get("nested") and smaller:
        cfg["model"]["backbone"]["nested"] = smaller
    hook("GrowthHook", schedule=[{"iteration": 0, **sizes.pairs(size)}], **how)(cfg, sizes)


def grown(family: str, **how: Any) -> Iterator[Variant]:
    """Grow the smallest model to each of the larger sizes in turn."""
    start = "alone_25"
    for before, size in pairwise(SIZES):
        change, alone = enlarged(before, size, **how), f"alone_{100 * size:g}"
        name, label = f"{family}_{100 * size:g}", f"{family}, {size:g}"
        yield Variant(name, label, change, start=start, compare=(alone,))
        start = name


@factory
def narrow_vit(cfg: Config, sizes: Sizes, share: float) -> None:
    """Use a narrower ViT, with as many weights in its blocks as a share of the pairs has."""
    heads = sizes.blocks["num_heads"]
    width = heads * round(share**0.5 * sizes.embed_dim / heads)
    pairs = round(share * sizes.pairs_of_block * sizes.embed_dim / width)
    # The ViT depends only on the sum of the pairs.
    counts = dict.fromkeys(sizes.counts, 0) | {COUNTS["ffn"]: pairs}
    matched_vit(cfg, replace(sizes, blocks={**sizes.blocks, "embed_dim": width}, counts=counts))
    cfg["model"]["head"]["in_channels"] = width


WHOLE = "alone_100"
SHORT = several(nested(), lasting(1 / 8), short_warmup)
TRAINED = {
    "sandwich": ("nested, sandwich", nested()),
    "scala": ("nested, Scala's distillation", scala),
    "distill": ("nested, sandwich, distillation", None),
    "kept": ("nested, sandwich, τ kept", nested(nested_tau="kept")),
    "parts": ("nested, parts", None),
    "one": ("nested, one random size", None),
}
VARIANTS = (
    *(Variant(f"alone_{100 * s:g}", f"alone, {s:g}", fewer_pairs(s)) for s in SMALLER),
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
