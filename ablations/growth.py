"""What does growth save? In one schedule, in stages after a trained small model, and at first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from models import (
    TRANSFORMERS,
    Change,
    Config,
    Sizes,
    base_model,
    hook,
    lasting,
    length_key,
    matched_transformer,
    matched_vit,
    resized,
    set_sizes,
    several,
    share_of_pairs,
)
from sweep import Question, Variant, main

GROWTH = """What does growth save? Grown TokenFormers, TokenFormers from scratch, and grown ViTs.

A TokenFormer has a quarter of the config's pairs at first, half of them after a third of the
epochs, and all of them after two thirds. All models have the same learning rate schedule. *Zero
keys* and *duplicates* keep what the model computes; *random* pairs do not (arXiv:2410.23168,
Section 3.3). The ViT grows by its hidden layers (Net2Net, arXiv:1511.05641, which keeps the
function) or by its blocks (stacking, Gong et al. 2019, which does not)."""
LM_GROWTH = """What does growth save a language model? Against models from scratch, and Net2Net.

As for images, from an eighth of the pairs, in quarters of the iterations. In the paper, growth by
30B tokens a stage ends at a perplexity of 11.77, and a Transformer by 300B tokens at 11.63."""
STAGES = """Does a trained small model save most of a large model's training, as the paper claims?

A TokenFormer with a third of the config's pairs, or a quarter for language, is trained to its end.
It is enlarged, and trained on with a schedule of its own, for a tenth and a fifth of a large
model's training (arXiv:2410.23168, Section 3.3). It is compared with the large model from scratch,
at full length and at the cost of the growth; with the small model trained on, at the same cost; and
with a Transformer that grew by Net2Net, whose small model is larger. Costs are FLOPs. The small
model's are *sunk*, *shared* with the two that grow from it, or *counted* in full. New pairs are
zero keys, duplicates, or random, with τ kept or, *as released*, that of the new number of pairs."""
GROWTH_START = """What does growth cost in its first steps, and what makes it cheaper?

A language model with half of the config's pairs gets all of them after the first iteration of a
stage, which lasts a fifth of the iterations. *Not grown* trains on in the same schedule. *New
pairs, × 3* have a larger learning rate. *Noise* is added to the old pairs, relative to their root
mean square, as [the authors advise](https://github.com/Haiyang-W/TokenFormer/issues/11)."""

LM_SCHEDULES = """How often should a language model grow? In 20, 10 or 5 equal steps to one size.

A course report of 2024 has these schedules (G64, G128, G256), resets the optimiser's moments at
each growth, and has a constant learning rate; here it follows the config's schedule."""

Size = Callable[[Sizes, float], Mapping[str, int]]  # of a share of the full size
References = Mapping[str, tuple[str, Change]]

INITS = {
    "zero_key": "zero keys",
    "duplicate": "duplicates",
    "random": "random, τ kept",
    "released": "random, as released",
}
LENGTHS = (10, 20)  # of a stage, in % of the large model's training
ACCOUNTS = {"sunk": 0.0, "shared": 1 / 3, "counted": 1.0}  # shares of the small model's cost
STEPS = 50  # between two validations; each takes about as long as 40 training steps


def depth(sizes: Sizes, share: float) -> dict[str, int]:
    """Return a share of the blocks."""
    return {"depth": max(1, round(share * sizes.depth))}


def during(shares: Sequence[float], size: Size, **how: Any) -> Change:
    """Start with the first share of the full size, and grow through the others in equal stages."""

    def change(cfg: Config, sizes: Sizes) -> None:
        key = length_key(cfg)
        unit = {"max_epochs": "epoch", "max_iters": "iteration"}[key]
        schedule = [
            {unit: round(stage / len(shares) * cfg["train_cfg"][key]), **size(sizes, share)}
            for stage, share in enumerate(shares)
        ]
        set_sizes(cfg, size(sizes, shares[0]))
        kind = "GrowthHook" if size is Sizes.pairs else "Net2NetHook"
        hook(kind, schedule=schedule[1:], **how)(cfg, sizes)

    return change


def at_start(size: Size, share: float, times: int = 1, **how: Any) -> Change:
    """Grow to a multiple of a share, after the first iteration: the warm-up has hardly begun."""

    def change(cfg: Config, sizes: Sizes) -> None:
        kind = "GrowthHook" if size is Sizes.pairs else "Net2NetHook"
        new = {key: times * number for key, number in size(sizes, share).items()}
        hook(kind, schedule=[{"iteration": 1, **new}], **how)(cfg, sizes)

    return change


def in_one_schedule(
    small: Mapping[str, tuple[str, float]], unit: str, short: float, others: Iterable[Variant]
) -> Iterator[Variant]:
    """Compare models that have their size from the start with growth through these sizes.

    Args:
        small: Label and share of all pairs of each smaller model, by name.
        unit: What a run is counted in.
        short: Share of the run after which the grown models have cost as much.
        others: The Transformers.
    """
    for name, (label, share) in small.items():
        yield Variant(name, f"{label} of the pairs", share_of_pairs(share))
    yield Variant("large", "all pairs: the largest", base_model)
    yield Variant("large_short", f"the largest, fewer {unit}", lasting(short))
    name, (label, least) = next(iter(small.items()))
    longer = several(share_of_pairs(least), lasting(2))
    yield Variant(f"{name}_long", f"{label}, twice the {unit}", longer)
    shares = (*(share for _, share in small.values()), 1)
    compare = ("large", "large_short", f"{name}_long")
    for init, label in INITS.items():
        if init != "released":
            # Zero keys are the default of the hook.
            how = {} if init == "zero_key" else {"init": init}
            grown = during(shares, Sizes.pairs, **how)
            yield Variant(init, f"grown, {label}", grown, compare=compare)
    yield from others


def transformers(shares: Sequence[float]) -> Iterator[Variant]:
    """Yield the matched Transformers from scratch, and grown by Net2Net."""
    for prefix, (label, whole) in LM_REFERENCES.items():
        name = prefix.strip("_") or "transformer"
        yield Variant(name, f"{label}, matched", whole)
        grown = several(whole, during(shares, Sizes.hidden))
        yield Variant(f"{prefix}net2net", f"{label}, Net2Net", grown, compare=(name,))


def stages(times: Sequence[int], references: References) -> Iterator[Variant]:
    """Yield a small model, models that are several times as large, and growth between them.

    Args:
        times: How many times as large each large model is; the largest has the config's pairs.
        references: Label and change of each Transformer, by the start of its variants' names.
    """
    last = max(times)

    def ours(number: int) -> Change:
        return resized(lambda s: {k: number * n for k, n in s.pairs(1 / last).items()})

    def theirs(change: Change, number: int) -> Change:
        neurons = resized(lambda s: {k: number * n for k, n in s.hidden(1 / last).items()})
        return several(change, neurons)

    yield Variant("small", "small", ours(1), compare=tuple(f"{p}reference" for p in references))
    for prefix, (label, change) in references.items():
        yield Variant(f"{prefix}reference", f"{label}, small", theirs(change, 1))
    for number in times:
        name, label = f"x{number}", f"× {number}"
        scratch = tuple(f"{name}_{prefix}reference" for prefix in references)
        yield Variant(name, f"{label}, from scratch", ours(number), compare=scratch)
        for prefix, (text, change) in references.items():
            whole = theirs(change, number)
            yield Variant(f"{name}_{prefix}reference", f"{text}, {label}, from scratch", whole)
        for stage in LENGTHS:
            yield from equal_costs(name, label, stage, ours(number))
            yield from grown(number, last, stage, references)


def equal_costs(name: str, label: str, stage: int, whole: Change) -> Iterator[Variant]:
    """Yield what the FLOPs of a stage could also train: the small model, or the large one."""
    cost, same = (name, stage / 100), f"small, not grown, cost of {label}, {stage} %"
    yield Variant(f"{name}_same_{stage}", same, base_model, start="small", costs=(cost,))
    for account, share in ACCOUNTS.items():
        yield Variant(
            f"{name}_{account}_{stage}",
            f"{label}, from scratch, cost of {stage} %, small model {account}",
            whole,
            compare=(name,),
            costs=(cost, ("small", share)),
        )


def grown(number: int, last: int, stage: int, references: References) -> Iterator[Variant]:
    """Yield the small model grown in each way and trained on, and Net2Net."""
    name, label, length = f"x{number}", f"× {number}", lasting(stage / 100)
    others = (*ACCOUNTS, "same", *(f"{prefix}net2net" for prefix in references))
    compare = (name, *(f"{name}_{other}_{stage}" for other in others))
    for init, text in INITS.items():
        yield Variant(
            f"{name}_{init}_{stage}",
            f"{label}, {text}, {stage} %",
            several(at_start(Sizes.pairs, 1 / last, number, init=init), length),
            start="small",
            compare=compare,
        )
    for prefix, (text, _) in references.items():
        yield Variant(
            f"{name}_{prefix}net2net_{stage}",
            f"{text}, {label}, Net2Net, {stage} %",
            several(at_start(Sizes.hidden, 1 / last, number), length),
            start=f"{prefix}reference",
            compare=(f"{name}_{prefix}reference",),
        )


def first_steps() -> Iterator[Variant]:
    """Yield a small model, and stages after it that are validated often."""

    def often(cfg: Config, sizes: Sizes) -> None:
        length = cfg["train_cfg"]["max_iters"]
        cfg["train_cfg"] |= {"max_iters": length // 5, "val_interval": min(STEPS, length // 20)}
        cfg["default_hooks"]["logger"]["interval"] = STEPS // 10

    yield Variant("small", "half of the pairs", share_of_pairs(1 / 2))
    yield Variant("same", "not grown", often, start="small")
    ways: tuple[tuple[str, str, str, float, dict[str, Any]], ...] = (
        ("zero_key", "zero keys", "zero_key", 0, {}),
        ("zero_key_lr3", "zero keys, new pairs × 3", "zero_key", 0, {"new_lr_scale": 3.0}),
        ("zero_key_lr10", "zero keys, new pairs × 10", "zero_key", 0, {"new_lr_scale": 10.0}),
        ("zero_key_noise1", "zero keys, noise 1 %", "zero_key", 0.01, {}),
        ("zero_key_noise10", "zero keys, noise 10 %", "zero_key", 0.1, {}),
        ("duplicate", "duplicates", "duplicate", 0, {}),
        ("random", "random, τ kept", "random", 0, {}),
    )
    for name, label, init, noise, how in ways:
        changes = [hook("NoiseHook", noise=noise)] if noise else []
        changes += [at_start(Sizes.pairs, 1, init=init, **how), often]
        compare = ("same",) if name == "zero_key" else ("same", "zero_key")
        yield Variant(name, label, several(*changes), start="small", compare=compare)


def in_steps() -> Iterator[Variant]:
    """Yield growth by equal numbers of pairs, in equal stages."""
    yield Variant("large", "all pairs from the start", base_model)
    for name, label, number, moments in (
        ("g64", "a twentieth at a time, moments reset (G64)", 20, "reset"),
        ("g128", "a tenth at a time, moments reset (G128)", 10, "reset"),
        ("g256", "a fifth at a time, moments reset (G256)", 5, "reset"),
        ("g256_kept", "a fifth at a time, moments kept", 5, "keep"),
    ):
        shares = [stage / number for stage in range(1, number + 1)]
        change = during(shares, Sizes.pairs, moments=moments)
        yield Variant(name, label, change, compare=("large",))


SHARES = (1 / 4, 1 / 2, 1)
HALF, QUARTER = ("half", 1 / 2), ("a quarter", 1 / 4)
PARTS = {"small": QUARTER, "medium": HALF}
LM_PARTS = {"eighth": ("an eighth", 1 / 8), "quarter": QUARTER, "half": HALF}
VITS = (
    Variant("vit", "ViT, matched", matched_vit),
    Variant(
        "net2net", "ViT, Net2Net", several(matched_vit, during((1 / 4, 1 / 2, 1), Sizes.hidden))
    ),
    Variant("stacking", "ViT, stacking", several(matched_vit, during((1 / 4, 1 / 2, 1), depth))),
)
LM_REFERENCES: References = {
    "": (TRANSFORMERS["learned"], matched_transformer("learned")),
    "rotary_": (TRANSFORMERS["rotary"], matched_transformer("rotary")),
}
IMAGES = (
    ("growth", "Growth", GROWTH, in_one_schedule(PARTS, "epochs", 2 / 3, VITS)),
    ("stages", "Growth in stages", STAGES, stages((2, 3), {"": ("ViT", matched_vit)})),
)
IN_ONE = in_one_schedule(LM_PARTS, "iterations", 3 / 5, transformers((1 / 8, 1 / 4, 1 / 2, 1)))
LANGUAGE = (
    ("lm_growth", "growth", LM_GROWTH, IN_ONE),
    ("lm_stages", "growth in stages", STAGES, stages((2, 4), LM_REFERENCES)),
    ("growth_start", "the first steps after growth", GROWTH_START, first_steps()),
    ("lm_schedules", "schedules of growth", LM_SCHEDULES, in_steps()),
)
QUESTIONS = (
    *(
        Question(name, title, text, tuple(own), same_size=False)
        for name, title, text, own in IMAGES
    ),
    *(
        Question(name, f"Language: {title}", text, tuple(own), "perplexity", same_size=False)
        for name, title, text, own in LANGUAGE
    ),
)

if __name__ == "__main__":
    main(QUESTIONS)
