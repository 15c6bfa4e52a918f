"""What does growth save? In one schedule, in stages after a trained small model, and at first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from models import (
    PAIRS,
    TRANSFORMERS,
    Change,
    Config,
    Size,
    Sizes,
    base_model,
    factory,
    fewer_pairs,
    hook,
    lasting,
    length_key,
    matched_vit,
    resized,
    several,
    transformer,
)
from sweep import Question, Variant, main

GROWTH = """What does growth save? Grown TokenFormers, TokenFormers from scratch, and grown ViTs.

A TokenFormer has a quarter of the pairs, then half, then all, in equal parts of one schedule. The
ViT grows by hidden neurons (Net2Net, arXiv:1511.05641), or by blocks (stacking)."""
LM_GROWTH = """What does growth save a language model? Against models from scratch, and Net2Net.

The paper's perplexities are 11.77 after growth, and 11.63 of a Transformer from scratch."""
STAGES = """Does a trained small model save most of a large model's training, as the paper claims?

A small model is enlarged, and trained on for a tenth and a fifth of a large model's training.
Others cost as many FLOPs: the small model's are *sunk*, *shared* by the two that grow from it, or
*counted* in full. Random pairs have τ kept or, *as released*, that of the new number of pairs."""
GROWTH_START = """What does growth cost in its first steps, and what makes it cheaper?

*New pairs, × 3* have a larger learning rate. *Noise* is the authors' advice
(https://github.com/Haiyang-W/TokenFormer/issues/11)."""
ONE_STEP = """Does one step of growth pay if the learning rate is still high when it comes?

The rate stays as it is after its warm-up, and falls in the last 15 % of the training. Half of the
pairs become all after 25, 50 or 80 % of it; or all, or this half, train for as many FLOPs."""
LM_SCHEDULES = """How often should a language model grow? In 20, 10 or 5 equal steps to one size.

A course report of 2024 has these schedules (G64, G128, G256), at a constant learning rate."""

Part = Callable[[Sizes, float], Mapping[str, int]]  # a method that returns a share of the full size
Named = Mapping[str, tuple[str, Any]]  # a label, and a share of all pairs or a change

INITS = {
    "zero_key": "zero keys",
    "duplicate": "duplicates",
    "random": "random, τ kept",
    "released": "random, as released",
}
LENGTHS = (10, 20)  # of a stage, in % of the large model's training
ACCOUNTS = {"sunk": 0.0, "shared": 1 / 3, "counted": 1.0}  # shares of the small model's cost
UNITS = {"max_epochs": "epoch", "max_iters": "iteration"}  # of the times of a growth
STEPS = 50  # between two validations; each takes about as long as 40 training steps


def growing(schedule: Sequence[Mapping[str, int]], **how: Any) -> Change:
    """Grow by pairs, or a Transformer by what it has instead."""
    kind = "GrowthHook" if PAIRS[0] in schedule[0] else "Net2NetHook"
    return hook(kind, schedule=schedule, **how)


@factory
def during(cfg: Config, sizes: Sizes, shares: Sequence[float], part: Part, **how: Any) -> None:
    """Start with the first share of the full size, and grow through the others in equal stages."""
    key = length_key(cfg)
    schedule = [
        {UNITS[key]: round(stage / len(shares) * cfg["train_cfg"][key]), **part(sizes, share)}
        for stage, share in enumerate(shares)
    ]
    resized(lambda sizes: part(sizes, shares[0]))(cfg, sizes)
    growing(schedule[1:], **how)(cfg, sizes)


@factory
def at_start(cfg: Config, sizes: Sizes, size: Size, **how: Any) -> None:
    """Grow after the first iteration: the warm-up has hardly begun."""
    growing([{"iteration": 1, **size(sizes)}], **how)(cfg, sizes)


def in_one_schedule(small: Named, unit: str, short: float) -> Iterator[Variant]:
    """Compare growth with models that have one size; ``short`` is the share that costs as much."""
    for name, (label, share) in small.items():
        yield Variant(name, f"{label} of the pairs", fewer_pairs(share))
    yield Variant("large", "all pairs: the largest", base_model)
    yield Variant("large_short", f"the largest, fewer {unit}", lasting(short))
    name, (label, least) = next(iter(small.items()))
    longer = several(fewer_pairs(least), lasting(2))
    yield Variant(f"{name}_long", f"{label}, twice the {unit}", longer)
    shares = (*(share for _, share in small.values()), 1)
    compare = ("large", "large_short", f"{name}_long")
    for init in ("zero_key", "duplicate", "random"):
        how = {} if init == "zero_key" else {"init": init}  # the default of the hook
        change = during(shares, Sizes.pairs, **how)
        yield Variant(init, f"grown, {INITS[init]}", change, compare=compare)


def transformers(shares: Sequence[float]) -> Iterator[Variant]:
    """Yield the matched Transformers from scratch, and grown by Net2Net."""
    for prefix, name, positions, label in TRANSFORMERS:
        whole = transformer(positions)
        yield Variant(name, f"{label}, matched", whole)
        wide = several(whole, during(shares, Sizes.hidden))
        yield Variant(f"{prefix}net2net", f"{label}, Net2Net", wide, compare=(name,))


def stages(numbers: Sequence[int], references: Named) -> Iterator[Variant]:
    """Yield a small model, models that are several times as large, and growth between them.

    The largest has the config's pairs.
    """

    def times(number: int, part: Part) -> Size:
        share = 1 / max(numbers)
        return lambda sizes: {key: number * each for key, each in part(sizes, share).items()}

    for number in (1, *numbers):
        name, prefix, label = f"x{number}", f"x{number}_", f"× {number}, from scratch"
        if number == 1:
            name, prefix, label = "small", "", "small"
        ours, theirs = times(number, Sizes.pairs), times(number, Sizes.hidden)
        compare = tuple(f"{prefix}{each}reference" for each in references)
        yield Variant(name, label, resized(ours), compare=compare)
        for each, (text, change) in references.items():
            own = several(change, resized(theirs))
            yield Variant(f"{prefix}{each}reference", f"{text}, {label}", own)
        for stage in LENGTHS if number > 1 else ():
            yield from stage_of(number, stage, ours, theirs, references)


def stage_of(
    number: int, stage: int, ours: Size, theirs: Size, references: Named
) -> Iterator[Variant]:
    """Yield a stage after the small model, and what its FLOPs could also train."""
    name, label, length = f"x{number}", f"× {number}", lasting(stage / 100)
    cost, text = (name, stage / 100), f"small, not grown, cost of {label}, {stage} %"
    yield Variant(f"{name}_same_{stage}", text, base_model, start="small", costs=(cost,))
    for account, share in ACCOUNTS.items():
        text = f"{label}, from scratch, cost of {stage} %, small model {account}"
        own, costs = f"{name}_{account}_{stage}", (cost, ("small", share))
        yield Variant(own, text, resized(ours), compare=(name,), costs=costs)
    others = (*ACCOUNTS, "same", *(f"{prefix}net2net" for prefix in references))
    compare = (name, *(f"{name}_{other}_{stage}" for other in others))
    for init, text in INITS.items():
        own, change = f"{name}_{init}_{stage}", several(at_start(ours, init=init), length)
        yield Variant(own, f"{label}, {text}, {stage} %", change, start="small", compare=compare)
    for prefix, (text, _) in references.items():
        own, small = f"{name}_{prefix}net2net_{stage}", f"{prefix}reference"
        change, text = several(at_start(theirs), length), f"{text}, {label}, Net2Net, {stage} %"
        yield Variant(own, text, change, start=small, compare=(f"{name}_{small}",))


@factory
def once(cfg: Config, sizes: Sizes, when: float, size: Size, **how: Any) -> None:
    """Begin with half of the full size, and grow after a share of the training."""
    key = length_key(cfg)
    resized(lambda sizes: {name: each // 2 for name, each in size(sizes).items()})(cfg, sizes)
    growing([{UNITS[key]: round(when * cfg["train_cfg"][key]), **size(sizes)}], **how)(cfg, sizes)


def stable(cfg: Config, sizes: Sizes) -> None:
    """Keep the rate after its warm-up, until it falls to a fiftieth in the last 15 %."""
    key = length_key(cfg)
    by_epoch, begin = key == "max_epochs", 0.85 * cfg["train_cfg"][key]
    decay = {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.02}
    decay |= {"begin": begin if by_epoch else round(begin)}
    decay |= {"by_epoch": by_epoch, "convert_to_iter_based": by_epoch}
    cfg["param_scheduler"][1:] = [decay]


def one_step(references: Named) -> Iterator[Variant]:
    """Yield growth to twice the pairs at three times, and what its FLOPs could also train."""
    yield Variant("half", "half of the pairs, as long", fewer_pairs(1 / 2))
    yield Variant("large", "all pairs, as long", base_model, compare=("half",))
    for prefix, (label, change) in references.items():
        yield Variant(f"{prefix}reference", f"{label}, matched", change, compare=("large",))
    for when in (25, 50, 80):
        costs, scratch = (("half", when / 100), ("large", 1 - when / 100)), f"scratch_{when}"
        yield Variant(scratch, f"all pairs, cost of {when} %", base_model, costs=costs)
        yield Variant(f"longer_{when}", f"half, cost of {when} %", fewer_pairs(1 / 2), costs=costs)
        compare = ("large", scratch, f"longer_{when}")
        for init in ("zero_key", "duplicate", "released"):
            # Their rate rises in 100 iterations; their moments begin at 0.
            change = once(when / 100, Sizes.pairs, init=init, new_warmup_iters=100)
            yield Variant(f"{init}_{when}", f"{INITS[init]}, {when} %", change, compare=compare)
        for prefix, (label, change) in references.items():
            own, text = several(change, once(when / 100, Sizes.hidden)), f"Net2Net, {when} %"
            compare = (f"{prefix}reference",)
            yield Variant(f"{prefix}net2net_{when}", f"{label}, {text}", own, compare=compare)


def often(cfg: Config, sizes: Sizes) -> None:
    """Train for a fifth of the iterations, and validate often."""
    length = cfg["train_cfg"]["max_iters"]
    cfg["train_cfg"] |= {"max_iters": length // 5, "val_interval": min(STEPS, length // 20)}
    cfg["default_hooks"]["logger"]["interval"] = STEPS // 10


def first_steps() -> Iterator[Variant]:
    """Yield a small model, and stages after it that are validated often."""
    yield Variant("small", "half of the pairs", fewer_pairs(1 / 2))
    yield Variant("same", "not grown", often, start="small")
    for name, label, noise, how in (
        ("zero_key", "zero keys", 0, {}),
        ("zero_key_lr3", "zero keys, new pairs × 3", 0, {"new_lr_scale": 3.0}),
        ("zero_key_lr10", "zero keys, new pairs × 10", 0, {"new_lr_scale": 10.0}),
        ("zero_key_noise1", "zero keys, noise 1 %", 0.01, {}),
        ("zero_key_noise10", "zero keys, noise 10 %", 0.1, {}),
        ("duplicate", "duplicates", 0, {"init": "duplicate"}),
        ("random", "random, τ kept", 0, {"init": "random"}),
    ):
        noisy = hook("NoiseHook", noise=noise) if noise else base_model
        change = several(noisy, at_start(Sizes.pairs, **{"init": "zero_key", **how}), often)
        compare = ("same",) if name == "zero_key" else ("same", "zero_key")
        yield Variant(name, label, change, start="small", compare=compare)


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


SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
WIDER, DEEPER = during(SHARES[1:], Sizes.hidden), during(SHARES[1:], Sizes.depth)
VITS = (
    Variant("vit", "ViT, matched", matched_vit),
    Variant("net2net", "ViT, Net2Net", several(matched_vit, WIDER)),
    Variant("stacking", "ViT, stacking", several(matched_vit, DEEPER)),
)
PARTS = {"small": ("a quarter", 1 / 4), "medium": ("half", 1 / 2)}
LM_PARTS = {"eighth": ("an eighth", 1 / 8), "quarter": PARTS["small"], "half": PARTS["medium"]}
IN_ONE = (*in_one_schedule(PARTS, "epochs", 2 / 3), *VITS)
LM_IN_ONE = (*in_one_schedule(LM_PARTS, "iterations", 3 / 5), *transformers(SHARES))
IN_STAGES = stages((2, 3), {"": ("ViT", matched_vit)})
REFERENCES = {prefix: (label, transformer(kind)) for prefix, _, kind, label in TRANSFORMERS}
LM_IN_STAGES, FIRST = stages((2, 4), REFERENCES), "Language: the first steps after growth"
STEP, LM_STEP = (
    (replace(each, change=several(stable, each.change)) for each in one_step(references))
    for references in ({"": ("ViT", matched_vit)}, REFERENCES)
)
QUESTIONS = tuple(
    Question(name, title, text, tuple(own), metric, same_size=False)
    for name, title, text, own, metric in (
        ("growth", "Growth", GROWTH, IN_ONE, "top1"),
        ("stages", "Growth in stages", STAGES, IN_STAGES, "top1"),
        ("lm_growth", "Language: growth", LM_GROWTH, LM_IN_ONE, "perplexity"),
        ("lm_stages", "Language: growth in stages", STAGES, LM_IN_STAGES, "perplexity"),
        ("growth_start", FIRST, GROWTH_START, first_steps(), "perplexity"),
        ("one_step", "Growth in one step", ONE_STEP, STEP, "top1"),
        ("lm_one_step", "Language: growth in one step", ONE_STEP, LM_STEP, "perplexity"),
        ("lm_schedules", "Language: schedules of growth", LM_SCHEDULES, in_steps(), "perplexity"),
    )
)

if __name__ == "__main__":
    main(QUESTIONS)
