"""The savings of growth follow from the records."""

import json

import growth
import numpy as np
import pytest
from PIL import Image
from tables import QUESTIONS

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import tables, training_cost
from tokenformer_vit.experiments.results import read_groups

SIZES = {"small": 100, "medium": 300, "large": 700, "large_short": 700, "small_long": 100}
FLOPS = {"small": 1e15, "medium": 2e15, "large": 4e15, "large_short": 3e15, "small_long": 2e15}
EPOCHS = {"large_short": 4, "small_long": 12}
HOOK = {"type": "GrowthHook", "schedule": [{"epoch": 3, "depth": 2}]}


def write(root, variant, seed, top1, **changes):
    """Write the record of a run; if ``top1`` is an error, the run failed."""
    grown = variant not in SIZES and variant != "vit"
    options, hooks = {"model": {"backbone": {"depth": SIZES.get(variant, 1)}}}, []
    if grown:
        hooks = [{**HOOK, "init": variant}]
        options["custom_hooks"] = hooks
    settings = {
        "randomness": {"seed": seed},
        "model": {"backbone": {**options["model"]["backbone"], "stem_seed": seed}},
        "custom_hooks": [*hooks, {"type": "CostHook"}],
        "train_cfg": {"max_epochs": 6},
    }
    epochs = EPOCHS.get(variant, 6)
    if variant in EPOCHS:
        options["train_cfg"] = settings["train_cfg"] = {"max_epochs": epochs}
    record = {
        "question": "growth",
        "variant": variant,
        "seed": seed,
        "lr": 1e-3,
        "config": "configs/small.py",
        "commit": "abc",
        "options": options,
        "settings": settings,
        "hardware": "GPU",
        "parameters": SIZES.get(variant, 100),
        "loss": {"iteration": [], "loss": []},
    }
    if isinstance(top1, str):
        record["failed"] = top1
    else:
        flops = changes.pop("flops", FLOPS.get(variant, 2e15))
        record |= {"epochs": epochs, "train_images": 50, "images_per_step": 5, "dtype": "float32"}
        record |= {"seconds": 90.0, "resumed_at_iteration": 0, "final": {"top1": top1}}
        record |= {"iterations": 10 * epochs, "flops": flops}
        done = list(range(1, epochs + 1))
        record["validation"] = {
            "epoch": done,
            "top1": [top1 + epoch - epochs for epoch in done],
            "flops": [flops * epoch / epochs for epoch in done],
        }
        if grown:
            record["growth"] = [{"iteration": 30, "parameters": 700, "epoch": 3}]
    path = root / "ablations" / "results" / "growth_small" / f"{variant}_seed{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, **changes}))


def cells(text, variant):
    """Return the cells of a variant's last row."""
    label = next(each.label for each in growth.QUESTION.variants if each.name == variant)
    row = [line for line in text.splitlines() if line.startswith(f"| {label} |")][-1]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def rendered(root):
    text = tables.render(QUESTIONS, read_groups(QUESTIONS, root / "ablations" / "results"))
    return text.partition(tables.LANGUAGE_TITLE)[0]


def test_no_run_lies_above_the_envelope(seed):
    points = [(4, 50.0), (1, 40.0), (3, 39.0), (2, 46.0), (2, 44.0), (8, 50.0)]
    assert training_cost.envelope(points) == [(1, 40.0), (2, 46.0), (4, 50.0)]
    # A run below the line through its neighbours makes the bar no lower.
    points[3] = (2, 44.5)
    assert training_cost.envelope(points) == [(1, 40.0), (4, 50.0)]
    assert training_cost.envelope([(2, 5.0)]) == [(2, 5.0)]
    draw = np.random.default_rng(seed)
    points = list(zip(draw.uniform(1, 9, 30), draw.uniform(0, 99, 30), strict=True))
    flops, top1 = np.array(training_cost.envelope(points)).T
    assert (np.diff(top1) > 0).all()
    for cost, own in points:
        assert own <= np.interp(np.log(cost), np.log(flops), top1) + 1e-9


def test_what_training_from_scratch_needs(seed):
    line = [(1e15, 40.0), (4e15, 50.0), (8e15, 52.0)]
    assert training_cost.needed(45.0, line) == pytest.approx(2e15)  # half of the way by logarithm
    assert training_cost.needed(50.0, line) == pytest.approx(4e15)
    assert training_cost.needed(52.0, line) == pytest.approx(8e15)
    assert training_cost.needed(52.1, line) == np.inf
    assert training_cost.needed(30.0, line) == pytest.approx(1e15)
    # Between two points it is never more than on straight lines over the FLOPs themselves.
    for top1 in np.random.default_rng(seed).uniform(40, 50, 20):
        straight = 1e15 + (top1 - 40) / 10 * 3e15
        assert training_cost.needed(top1, line) <= straight


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((1e15, 45.0), "50 %"),
        ((2e15, 45.0), "0 %"),
        ((3e15, 45.0), "−50 %"),
        ((1e15, 50.1), "> all"),
        ((2e15, 40.0), "−100 %"),
        ((2e15, 39.0), "≤ −100 %"),
    ],
)
def test_savings(own, expected):
    assert training_cost.saved(own, [(1e15, 40.0), (4e15, 50.0)]) == expected


def test_costs_differences_and_savings_of_several_seeds(root):
    for seed, (small, medium, short, large) in enumerate([(37, 44, 43, 50), (39, 46, 45, 50)]):
        write(root, "small", seed, small)
        write(root, "medium", seed, medium)
        write(root, "large_short", seed, short)
        write(root, "small_long", seed, small + 1)  # below the envelope
        write(root, "large", seed, large)
    write(root, "zero_key", 0, 47.0)  # half of the way from medium to large: needs 2.83e15
    write(root, "zero_key", 1, 50.5)
    write(root, "duplicate", 1, 42.5, flops=1e15)  # half of the way from small to medium
    write(root, "duplicate", 2, 49.0, flops=1e15)  # there is nothing from scratch of this seed
    write(root, "random", 0, "the loss is nan")
    write(root, "vit", 0, 39.0, flops=5e15)
    write(root, "net2net", 0, 38.5, flops=3e15)
    text = rendered(root)
    assert "5 a step, 6, 4, 12 epochs, lr 0.001:" in text

    assert cells(text, "small") == [
        *("100", "1.00 · 10¹⁵", "0.25", "38.00 ± 1.41 (n = 2)", "−12.00 (−13.00, −11.00)"),
        *("", "1.5", ""),
    ]
    assert cells(text, "large") == [
        *("700", "4.00 · 10¹⁵", "1.00", "50.00 ± 0.00 (n = 2)", "", "", "1.5", "")
    ]
    row = cells(text, "zero_key")
    assert row[:3] == ["100 → 700", "2.00 · 10¹⁵", "0.50"]
    need = 2e15 * 2 ** ((48.75 - 45) / (50 - 45))  # of the mean, on the envelope of the means
    assert row[4:6] == ["−1.25 (−3.00, +0.50)", f"{100 * (1 - 2e15 / need):.0f} % (29 %, > all)"]
    # Only of the seed that has both, and it is said that this is one of two.
    row = cells(text, "duplicate")
    assert row[3:6] == ["45.75 ± 4.60 (n = 2)", "−7.50 (n = 1)", "29 % (n = 1)"]
    assert cells(text, "random") == ["100", "–", "–", "–", "–", "–", "–", "seed 0: the loss is nan"]
    # A ViT is set against the whole ViT, which has no envelope.
    assert cells(text, "vit")[2:6] == ["1.00", "39.00 (n = 1)", "", ""]
    assert cells(text, "net2net")[2:6] == ["0.60", "38.50 (n = 1)", "−0.50", ""]
    assert cells(text, "stacking")[3] == "not run"


def test_no_saving_is_told_beside_half_an_envelope(root):
    for variant in ("small", "small_long", "large", "large_short", "zero_key"):
        write(root, variant, 0, 45.0)
    write(root, "medium", 0, "out of memory")
    assert cells(rendered(root), "zero_key")[4:6] == ["+0.00", "–"]
    write(root, "medium", 0, 46.0)
    assert cells(rendered(root), "zero_key")[5] == "−100 %"


def test_learning_rates_are_groups_and_the_best_is_marked(root):
    for variant, top1 in (("large", 50.0), ("zero_key", 47.0)):
        write(root, variant, 0, top1)
        write(root, variant, 1, top1 + 1, lr=3e-4)
    lines = rendered(root).splitlines()
    assert [line.split("**")[1] for line in lines if line.startswith("| **")] == [
        *("lr 0.0003", "lr 0.001", "each at its best lr")
    ]
    own = [line for line in lines if line.startswith("| grown, zero keys |")]
    assert ["**48.00 (n = 1)**" in line for line in own] == [False, True, False, False]


def test_the_paper_has_no_such_table(root):
    text = rendered(root)
    section = text[text.index("## Growth") :]
    assert growth.QUESTION.note in section
    assert "in which it grew no model (`python ablations/growth.py --config" in section


def test_seeds_may_be_validated_at_other_epochs(root):
    write(root, "zero_key", 0, 50.0)
    curve = {"epoch": [2, 4, 6], "top1": [40.0, 45.0, 50.0], "flops": [1e15, 1.5e15, 2e15]}
    write(root, "zero_key", 1, 50.0, validation=curve)
    tables.main(QUESTIONS, [], root)
    assert (root / "ablations" / "results" / "growth_small.png").is_file()


def test_charts_and_the_table_of_the_readme(root):
    readme, markers = root / "README.md", "before\n<!-- growth -->\n<!-- /growth -->\nafter\n"
    readme.write_text(markers)
    tables.main(QUESTIONS, [], root)
    assert "| not run |" in readme.read_text()
    for variant in growth.QUESTION.variants:
        write(root, variant.name, 0, 45.0)
    write(root, "zero_key", 1, 46.0)
    tables.main(QUESTIONS, [], root)
    tables.main(QUESTIONS, ["--check"], root)
    assert "(results/growth_small.png)" in (root / "ablations" / "TABLES.md").read_text()
    with Image.open(root / "ablations" / "results" / "growth_small.png") as picture:
        assert picture.width > 400
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 50
    text = readme.read_text()
    assert text.startswith("before\n<!-- growth -->\n| | parameters")
    assert text.endswith("\n<!-- /growth -->\nafter\n")
    assert "| **[`small`](ablations/results/growth_small)**, GPU |" in text
    assert cells(text, "zero_key") == ["100 → 700", "0.50", "45.50 ± 0.71", "2"]
    readme.write_text(markers)
    with pytest.raises(SystemExit, match=r"README\.md"):
        tables.main(QUESTIONS, ["--check"], root)


def test_a_chart_of_runs_that_all_failed(root):
    write(root, "zero_key", 0, "out of memory")
    tables.main(QUESTIONS, [], root)
    assert (root / "ablations" / "results" / "growth_small.png").is_file()


def _settings(**changes):
    return {
        "custom_hooks": [{"type": "CostHook"}],
        "train_cfg": {"max_epochs": 6},
        "model": {"backbone": {"depth": 700}},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 5}, r"epochs is "),
        ({"settings": _settings(train_cfg={"max_epochs": 5})}, r"max_epochs is "),
        ({"settings": _settings(train_cfg={"val_interval": 2})}, r"max_epochs is "),
        (
            {"settings": _settings(custom_hooks=[HOOK, {"type": "CostHook"}])},
            r"settings is .*GrowthHook",
        ),
        (
            {"settings": _settings(model={"backbone": {"depth": 700, "drop_path_rate": 0.3}})},
            r"backbone is .*drop_path_rate",
        ),
        (
            {"settings": _settings(data_preprocessor={"to_rgb": False})},
            r"settings is .*data_preprocessor",
        ),
        (
            {"options": {"model": {"backbone": {"depth": 9}}}},
            r"backbone\.depth is .* and 9 in",
        ),
    ],
)
def test_settings_that_no_variant_changes_are_refused(root, changes, message):
    for variant in ("large", "large_short", "zero_key"):
        write(root, variant, 0, 45.0)
    rendered(root)
    write(root, "large", 1, 45.0, **changes)
    with pytest.raises(InputError, match=rf"{message}.* cannot be compared"):
        rendered(root)


def test_the_schedule_of_growth_is_the_same_in_all_seeds(root):
    write(root, "zero_key", 0, 45.0)
    hook = {**HOOK, "init": "zero_key", "schedule": [{"epoch": 2, "depth": 2}]}
    write(
        root,
        "zero_key",
        1,
        45.0,
        options={"model": {"backbone": {"depth": 1}}, "custom_hooks": [hook]},
        settings=_settings(custom_hooks=[hook, {"type": "CostHook"}], model={}),
    )
    with pytest.raises(InputError, match=r"options\.custom_hooks is .*cannot be compared"):
        rendered(root)
