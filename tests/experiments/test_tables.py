"""The tables say what the records say."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tables import QUESTIONS

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import (
    IMAGES,
    Pretraining,
    Question,
    TrainingCost,
    Tuning,
    plan,
    plots,
    run,
    tables,
)
from tokenformer_vit.experiments.results import read_groups
from tokenformer_vit.training.config import load_config

ROOT = Path(__file__).resolve().parents[2]
OF_IMAGES = [question for question in QUESTIONS if question.field is IMAGES]
SMALLER = ("small", "medium", "small_long")  # than the largest from start to end
LAYERS = [f"blocks.{block}.{part}" for block in (0, 1) for part in ("attn.query", "mlp")]


def write(root, variant, seed, top1, lr=1e-3, folder="softmax_small", **changes):
    """Write the record of a run; if ``top1`` is an error, the run failed."""
    record = {
        "question": "softmax",
        "variant": variant,
        "seed": seed,
        "lr": lr,
        "config": "configs/small.py",
        "commit": "abc",
        "options": {"model": {"backbone": {"theta": variant}}},
        "settings": {
            "randomness": {"seed": seed},
            "model": {"backbone": {"theta": variant, "stem_seed": seed}},
            "optim_wrapper": {"optimizer": {"lr": lr}},
        },
        "hardware": "GPU",
        "parameters": 1_234_567,
        "loss": {"iteration": [1, 2, 3], "loss": [2.5, 2.0, None]},
    }
    if isinstance(top1, str):
        record["failed"] = top1
    else:
        record |= {"epochs": 2, "train_images": 5000, "images_per_step": 64, "dtype": "float32"}
        record |= {"seconds": 90.0, "resumed_at_iteration": 0, "final": {"top1": top1}}
        record |= {"validation": {"epoch": [1, 2], "top1": [top1 - 5, top1]}}
        record["loss"]["loss"] = [2.5, 2.0, 1.5 + seed]
        if variant != "vit":
            record["diagnostics"] = {"epoch": [0, 1, 2], "layers": LAYERS} | {
                name: [[0.1, 0.2, None, 0.4]] * 3 for name in plots.FIGURES
            }
    if variant == "vit":
        backbone = {"_delete_": True, "model_name": "vit_base_patch16_224", "mlp_ratio": 6.0}
        record["options"] = {"model": {"backbone": {"mlp_ratio": 6.0}}}
        record["settings"]["model"]["backbone"] = backbone
    path = root / "ablations" / "results" / folder / f"{variant}_seed{seed}_{lr}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, **changes}))


def rendered(root):
    text = tables.render(QUESTIONS, read_groups(QUESTIONS, root / "ablations" / "results"))
    return text.partition(tables.LANGUAGE_TITLE)[0]


def cells(text, label):
    """Return the cells of all rows of a label, in order."""
    rows = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() == label]


def test_means_deviations_and_steps(root):
    exp = {0: 80.1, 1: 79.3, 2: 80.8}
    gelu = {1: 82.0, 2: 81.4, 3: 83.3}  # of other seeds, too
    for seed, top1 in exp.items():
        write(root, "softmax", seed, top1)
    for seed, top1 in gelu.items():
        write(root, "gelu_l1", seed, top1)
    write(root, "gelu_l1", 0, "the loss is nan | at iteration 3" + 100 * "x")
    write(root, "gelu_l2", 0, 85.0, seconds=30.0)
    write(root, "gelu_l2", 1, "killed by SIGKILL")
    write(root, "vit", 0, 70.0, resumed_at_iteration=5, flops=1.25e15)
    text = rendered(root)
    assert "([records](results/softmax_small)), commit abc: GPU, float32, 5,000 " in text

    _, row = cells(text, "exp + L1")
    values = np.array(list(exp.values()))
    assert row[1:4] == [
        "0.001",
        "1,234,567",
        f"{values.mean():.2f} ± {values.std(ddof=1):.2f} (n = 3)",
    ]
    assert row[4:] == ["79.6", "", "", "+10.10 (n = 1)", "–", "−4.90 (n = 1)", "–", "1.5", ""]

    _, row = cells(text, "GELU + L1")
    values = np.array(list(gelu.values()))
    assert row[3] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f} (n = 3)"
    steps = np.array([gelu[seed] - exp[seed] for seed in (1, 2)])  # seed by seed
    assert row[5:7] == [f"+{steps.mean():.2f} ± {steps.std(ddof=1):.2f} (n = 2)", "+2.1"]
    assert "seed 0: the loss is nan \\" in "|".join(row)
    assert row[-1].endswith("x …")

    # One seed: no deviation. It failed in that of the row above, so that there is no step either.
    _, row = cells(text, "GELU + L2")
    assert row[3:7] == ["85.00 (n = 1)", "82.5", "–", "+0.8"]
    assert row[7:] == ["+15.00 (n = 1)", "–", "", "–", "0.5", "seed 1: killed by SIGKILL"]
    _, row = cells(text, "L2 after GELU")
    assert row[3:] == ["not run", "–", *[""] * 8]
    _, row, *_ = cells(text, "ViT, matched")  # growth has one, too
    assert row[3:] == ["70.00 (n = 1)", "82.3", "", "", "", "", "", "1.25 · 10¹⁵", "–", ""]


def test_a_variant_of_which_all_runs_failed_has_a_row(root):
    write(root, "softmax", 0, "out of memory")
    write(root, "gelu_l1", 0, 50.0)
    text = rendered(root)
    _, row = cells(text, "exp + L1")
    assert row[3:] == ["–", "79.6", "", "", "–", "–", "–", "–", "–", "seed 0: out of memory"]
    _, row = cells(text, "GELU + L1")
    assert row[3:7] == ["50.00 (n = 1)", "81.7", "–", "+2.1"]


@pytest.mark.parametrize(("half_way", "order"), [(60.0, "the same order"), (64.0, "another order")])
def test_the_order_half_way_is_compared_with_the_order_at_the_end(root, half_way, order):
    for lr, end in ((1e-3, 70.0), (3e-4, 50.0)):
        curve = {"epoch": [1, 2, 3, 5], "top1": [10.0, half_way, 90.0, end]}
        write(root, "softmax", 0, end, lr, epochs=5, validation=curve)
        curve = {**curve, "top1": [20.0, 62.0, 10.0, end + 5]}
        write(root, "gelu_l1", 0, end + 5, lr, epochs=5, validation=curve)
    write(root, "gelu_l2", 0, "the loss is nan")
    ours, theirs = f"exp + L1 {half_way:.2f}", "GELU + L1 62.00"
    first = f"{theirs}, {ours}" if half_way < 62 else f"{ours}, {theirs}"
    assert (
        f"\nBest first, after 2 of 5 epochs: {first}. At the end, in {order}: "
        "GELU + L1 75.00, exp + L1 70.00.\n"
    ) in rendered(root)


def test_learning_rates_are_groups_and_the_best_is_marked(root):
    for lr, one, other in ((1e-3, 70.0, 60.0), (3e-4, 71.0, 55.0)):
        for seed in (0, 1):
            write(root, "softmax", seed, one + seed, lr)
            write(root, "gelu_l1", seed, other, lr)
    text = rendered(root)
    groups = [line for line in text.splitlines() if line.startswith("| **")]
    assert [line.split("**")[1] for line in groups] == [
        *("lr 0.0003", "lr 0.001", "each at its best lr")
    ]
    _, low, high, best = cells(text, "exp + L1")
    assert low[3] == "**71.50 ± 0.71 (n = 2)**"
    assert high[3] == "70.50 ± 0.71 (n = 2)"
    assert best[1:4] == ["0.0003", "1,234,567", "71.50 ± 0.71 (n = 2)"]
    _, low, high, best = cells(text, "GELU + L1")
    assert [row[5] for row in (low, high, best)] == [
        "−16.50 ± 0.71",
        "−10.50 ± 0.71",
        "−11.50 ± 0.71",
    ]
    assert [row[3].startswith("**") for row in (low, high, best)] == [False, True, False]

    ends = "variants are best at the largest or the smallest learning rate that they tried"
    assert f"\n2 of 2 {ends}: exp + L1 at 0.0003; GELU + L1 at 0.001.\n" in text
    write(root, "softmax", 0, "the loss is nan", 1e-4)  # a smaller rate was tried
    assert f"\n1 of 2 {ends}: GELU + L1 at 0.001.\n" in rendered(root)


def test_what_was_never_run_is_said(root):
    text = rendered(root)
    for question in OF_IMAGES:
        for row in question.rows([]):
            found = cells(text, row.variant.label)
            assert any("not run" in line[1:] for line in found), row.variant.label
    assert "[records]" not in text
    paper = {"config": "configs/imagenet_base.py", "images_per_step": 4096}
    write(root, "softmax", 0, 70.0, **paper, epochs=4)  # not the paper's schedule
    assert [row[3] for row in cells(rendered(root), "exp + L1")] == ["not run", "70.00 (n = 1)"]
    write(root, "softmax", 0, 82.5, **paper, epochs=300)
    (row,) = cells(rendered(root), "exp + L1")
    assert row[3] == "82.50 (n = 1)"


def test_charts_and_check(root):
    write(root, "softmax", 0, 80.0)
    write(root, "softmax", 1, 81.0)
    write(root, "gelu_l1", 0, "the loss is nan")
    write(root, "vit", 0, 79.0)
    with pytest.raises(SystemExit, match=r"TABLES\.md .*; run `python ablations/tables\.py`"):
        tables.main(QUESTIONS, ["--check"], root)
    tables.main(QUESTIONS, [], root)
    tables.main(QUESTIONS, ["--check"], root)
    text = (root / "ablations" / "TABLES.md").read_text()
    for name in ("softmax_small.png", "softmax_small_diagnostics.png"):
        assert f"(results/{name})" in text
        with Image.open(root / "ablations" / "results" / name) as picture:
            assert picture.width > 400
            assert len(picture.convert("RGB").getcolors(1_000_000)) > 50
    write(root, "softmax", 1, 82.0)
    with pytest.raises(SystemExit):
        tables.main(QUESTIONS, ["--check"], root)


@pytest.mark.parametrize(
    "short", [("softmax", "vit", "gelu_l1"), ("softmax",)], ids=["all runs", "one variant"]
)
def test_runs_without_a_curve_are_drawn_by_their_results(short):
    curve = {"epoch": [1, 2], "top1": [70.0, 80.0]}
    shared = {"lr": 1e-3, "final": {"top1": 80.0}, "epochs": 2, "validation": curve}
    records = [
        {
            **shared,
            "variant": variant,
            "seed": seed,
            "loss": dict.fromkeys(("iteration", "loss"), [] if variant in short else [1, 2]),
        }
        for variant in ("softmax", "vit", "gelu_l1")
        for seed in (0, 1)
    ]
    records[-1]["failed"] = "the loss is nan"
    question = next(each for each in QUESTIONS if each.name == "softmax")
    figure = question.draw(records)
    figure.draw_without_rendering()
    assert len(figure.legends[0].get_texts()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 3}, r"epochs is .* in .*softmax_seed0.* cannot be compared; give"),
        ({"config": "configs/other.py"}, r"config is .* cannot be compared"),
        (
            {"settings": {"optim_wrapper": {"optimizer": {"weight_decay": 0.3}}}},
            r"settings is .*weight_decay.* cannot be compared",
        ),
        (
            {"settings": {"model": {"backbone": {"theta": "softmax", "drop_path_rate": 0.3}}}},
            r"backbone is .*drop_path_rate.* cannot be compared",
        ),
        ({"variant": "gelu_l3"}, r"gelu_l3, .*softmax\.py does not have; add"),
    ],
)
def test_records_that_are_no_comparison_are_refused(root, changes, message):
    write(root, "softmax", 0, 80.0)
    write(root, **{"variant": "softmax", "seed": 1, "top1": 80.0, **changes})
    with pytest.raises(InputError, match=message):
        tables.main(QUESTIONS, [], root)


def test_sweeps_of_own_configs_are_left_out(root, capsys):
    write(root, "softmax", 0, 80.0, config="my_images.py")
    write(root, "gelu_l1", 0, 80.0, folder="softmax_other")
    tables.main(QUESTIONS, [], root)
    assert "softmax_small is left out: my_images.py" in capsys.readouterr().err
    text = (root / "ablations" / "TABLES.md").read_text()
    assert "softmax_small" not in text
    assert "(results/softmax_other.png)" in text
    assert not (root / "ablations" / "results" / "softmax_small.png").exists()


def test_diagnostics_are_averaged_over_runs_and_layers():
    layers = ["blocks.0.attn.query", "blocks.0.attn.key", "blocks.0.mlp"]
    one = {"epoch": [0, 5], "layers": layers, "entropy": [[0.1, 0.3, 0.5], [0.2, None, 0.4]]}
    two = {"epoch": [0, 5], "layers": layers, "entropy": [[0.3, 0.5, 0.7], [0.4, 0.6, 0.8]]}
    averaged = plots.mean_diagnostics([one, two])["entropy"]
    assert averaged[0, "attn"].to_dict() == pytest.approx({0: 0.3, 5: 0.4})
    assert averaged[0, "mlp"].to_dict() == pytest.approx({0: 0.6, 5: 0.6})


@pytest.mark.parametrize(
    "question",
    [question for question in OF_IMAGES if not isinstance(question, Tuning | Pretraining)],
    ids=lambda question: question.name,
)
def test_every_question_can_be_asked_of_the_paper_s_model(question: Question):
    """Each variant builds, and has the parameters of the others unless its size is the question."""
    cfg = load_config(ROOT / tables.PAPERS_CONFIG).to_dict()
    shape, parameters = IMAGES.shape_of(cfg)
    assert (ROOT / "ablations" / f"{question.name}.py").is_file()
    backbone, settings = cfg["model"]["backbone"], []
    ends = {None: backbone}
    for variant in question.variants:
        ends[variant.name] = changed = variant.change(dict(ends[variant.start]), shape)
        outside = variant.outside(shape, 300) if variant.outside else {}
        hooks = [hook["type"] for hook in outside.get("custom_hooks", ())]
        if hooks == ["CompressionHook"]:
            outside = {}  # it measures after the training
        if not variant.recorded:
            settings.append(json.dumps([run.difference(backbone, changed), outside, variant.costs]))
        assert variant.grown == ("GrowthHook" in hooks)
        model = IMAGES.build({**cfg, "model": {**cfg["model"], "backbone": changed}})
        count = sum(parameter.numel() for parameter in model.parameters())
        if question.same_size:
            assert count == pytest.approx(parameters, rel=plan.LARGEST_GAP)
        elif isinstance(question, TrainingCost):
            assert (count < 0.7 * parameters) == (variant.grown or variant.name in SMALLER)
        if variant.name == "large":
            assert count == parameters
        if question.name == "pairs":
            assert count == parameters
    assert len(set(settings)) == len(settings)
    assert settings.count("[{}, {}, []]") == 1  # the model of the config is one of them
