"""Questions about equal cost: their runs, their comparisons, and stages of growth."""

import json
import os

import numpy as np
import pytest
from budget import QUESTION as BUDGET
from PIL import Image
from stages import QUESTION as STAGES
from tables import QUESTIONS

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import tables
from tokenformer_vit.experiments.plan import plan
from tokenformer_vit.experiments.results import read_groups, read_sweep
from tokenformer_vit.experiments.rows import Row
from tokenformer_vit.experiments.sweep import parse, sweep
from tokenformer_vit.training.config import load_config

EPOCHS = ["--cfg-options", "train_cfg.max_epochs=40"]
NAMES = ("small", "x2", "x2_same_10", "x2_zero_key_10", "x2_counted_10")

# Stands in for tools/train.py: the best learning rate of a variant is in BEST, by its name.
TRAINER = """
import json, os, sys
from pathlib import Path

config, folder = Path(sys.argv[1]), Path(sys.argv[3])
with open(config.parent / "starts.txt", "a") as file:
    file.write(f"{config.stem}\\n")
variant = config.stem.partition("_seed")[0]
if variant == os.environ.get("FAIL"):
    sys.exit("error: the loss is nan")
lr = float(config.stem.partition("_lr")[2] or 1e-3)
top1 = 50 - 1000 * abs(lr - json.loads(os.environ["BEST"]).get(variant, lr))
logs = folder / "20260101_000000" / "vis_data"
logs.mkdir(parents=True)
(logs / "scalars.json").write_text(json.dumps({"accuracy/top1": top1, "flops": 1e6, "step": 40}))
scope = {}
exec(config.read_text(), scope)
epochs = scope["train_cfg"]["max_epochs"]
record = {"command": "python train.py", "commit": "abc", "epochs": epochs, "seconds": 60.0}
record |= {"accuracy/top1": top1, "resumed_at_iteration": 0, "processes": 1, "flops": 1e6}
(folder / "record.json").write_text(json.dumps(record))
"""


@pytest.fixture
def words(tmp_path, config, digits) -> list[str]:
    """The options that every sweep of these tests has."""
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work"}
    options["out"] = tmp_path / "results" / "x_small"
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def trainer(replace_training, monkeypatch):
    """Replace the training; returns the list of what was started."""
    monkeypatch.setenv("BEST", "{}")
    return replace_training(TRAINER)


def planned_runs(question, words, *more):
    runs = plan(question, parse(question, [*words, *more]))
    return {run.about["variant"]: run for run in runs}


def records(tmp_path):
    paths = sorted((tmp_path / "results" / "x_small").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def flops_of(run):
    return run.field.flops(run.whole) * run.length


def test_models_of_a_size_and_budget_cost_as_much(words):
    words += ["--cfg-options", "model.backbone.depth=2", "train_cfg.max_epochs=40"]
    planned = planned_runs(BUDGET, words)
    assert list(planned) == [variant.name for variant in BUDGET.variants]
    for size, depth in (("half", 1), ("one", 2), ("double", 4)):
        for budget, epochs in (("quarter", 10), ("half", 20), ("all", 40)):
            vit, ours = (planned[f"{kind}_{size}_{budget}"] for kind in ("vit", "ours"))
            assert vit.length == ours.length == epochs
            assert flops_of(ours) == pytest.approx(flops_of(vit), rel=1e-3)
            assert ours.about["parameters"] == pytest.approx(vit.about["parameters"], rel=0.02)
            for run in (vit, ours):
                assert run.whole["model"]["backbone"]["depth"] == depth


def test_stages_start_from_the_small_model(words):
    planned = planned_runs(STAGES, words, *EPOCHS)
    assert list(planned) == [variant.name for variant in STAGES.variants]
    pairs = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 128}
    for name, init in (("zero_key", "zero_key"), ("released", "released")):
        run = planned[f"x2_{name}_20"]
        run.write_config()
        cfg = load_config(run.config)
        assert run.start is planned["small"]
        assert cfg.load_from == f"{planned['small'].folder}/model.safetensors"
        assert pairs.items() <= dict(cfg.model.backbone).items()
        (hook,) = (hook for hook in cfg.custom_hooks if "schedule" in hook)
        double = {key: 2 * count for key, count in pairs.items()}
        assert (hook["schedule"], hook["init"]) == ([{"iteration": 1, **double}], init)
        assert cfg.train_cfg.max_epochs == 8
    (hook,) = (h for h in planned["x3_net2net_10"].settings["custom_hooks"] if "schedule" in h)
    assert hook["schedule"] == [{"iteration": 1, "hidden_features": 576}]
    assert planned["x3_net2net_10"].start is planned["reference"]
    # The largest is the model of the config, and its ViT has as many parameters.
    assert planned["x3"].settings.get("model") == {"backbone": {"stem_seed": 0}}
    sizes = {name: planned[name].about["parameters"] for name in ("x3", "x3_reference")}
    assert sizes["x3"] == pytest.approx(sizes["x3_reference"], rel=0.02)
    # Without growth and from scratch, the budgets are equal in FLOPs but for whole epochs.
    for times in (2, 3):
        large = flops_of(planned[f"x{times}"])
        small = flops_of(planned["small"])
        for percent in (10, 20):
            stage = percent / 100 * large
            for name, cost in (
                (f"x{times}_same_{percent}", stage),
                (f"x{times}_sunk_{percent}", stage),
                (f"x{times}_shared_{percent}", stage + small / 3),
                (f"x{times}_counted_{percent}", stage + small),
            ):
                epoch = planned[name].field.flops(planned[name].whole)
                assert abs(flops_of(planned[name]) - cost) <= 0.51 * epoch


def test_a_stage_without_room_for_a_warm_up_is_refused(words, trainer):
    with pytest.raises(InputError, match=r"train_cfg\.max_epochs is 1: "):
        sweep(STAGES, [*words, "--cfg-options", "train_cfg.max_epochs=10"])
    with pytest.raises(InputError, match="load_from is x, but an ablation trains from scratch"):
        sweep(STAGES, [*words, *EPOCHS, "load_from=x"])
    assert trainer() == []


def test_stages_start_from_the_best_rate_of_the_small_model(
    tmp_path, words, trainer, monkeypatch, capfd
):
    monkeypatch.setenv("BEST", json.dumps({"small": 2e-3, "x2_zero_key_10": 4e-3}))
    words += [*EPOCHS, "--variants", "x2_zero_key_10", "--lr", "1e-3", "2e-3", "4e-3"]
    words += ["--lr-seeds", "1"]
    sweep(STAGES, [*words, "--seeds", "2"])
    assert trainer() == [
        *("small_seed0", "small_seed0_lr0.002", "small_seed0_lr0.004"),
        *(f"x2_zero_key_10_seed0{lr}" for lr in ("", "_lr0.002", "_lr0.004")),
        *("small_seed1_lr0.002", "x2_zero_key_10_seed1_lr0.004"),
    ]
    found = records(tmp_path)
    for name, record in found.items():
        if name.startswith("x2"):
            seed = record["seed"]
            start = f"work/small_seed{seed}_lr0.002/model.safetensors"
            assert record["settings"]["load_from"] == start
    sweep(STAGES, [*words, "--seeds", "2"])
    assert len(trainer()) == len(found)
    capfd.readouterr()
    sweep(STAGES, [*words, "--seeds", "2", "--dry-run"])
    assert capfd.readouterr().out == "0 of 8 runs are left\n"
    # The layers of the small model are measured, and those of the stage are not.
    assert len(read_sweep(STAGES, tmp_path / "results" / "x_small")) == len(found)


def test_without_a_small_model_there_are_no_stages(tmp_path, words, trainer, monkeypatch, capfd):
    monkeypatch.setenv("FAIL", "small")
    words += [*EPOCHS, "--variants", "x2_zero_key_10", "--lr", "1e-3", "2e-3"]
    with pytest.raises(SystemExit, match="1"):
        sweep(STAGES, words)
    assert trainer() == ["small_seed0", "small_seed0_lr0.002"]
    assert "failed: small_seed0, small_seed0_lr0.002" in capfd.readouterr().err


def write(root, question, variant, seed, top1, flops, lr=1e-3):
    """Write the record of a run."""
    row = question.named(variant)
    options = {"train_cfg": {"max_epochs": 4}}
    settings = {**options, "randomness": {"seed": seed}}
    settings["optim_wrapper"] = {"optimizer": {"lr": lr}}
    if row.start:
        settings["load_from"] = f"work/{row.start}_seed{seed}/model.safetensors"
    record = {"question": question.name, "variant": variant, "seed": seed, "lr": lr}
    record |= {"config": "configs/small.py", "commit": "abc", "hardware": "CPU", "epochs": 4}
    record |= {"options": options, "settings": settings, "parameters": 1000, "dtype": "float32"}
    record |= {"train_images": 50, "images_per_step": 5, "flops": flops, "seconds": 90.0}
    record |= {"final": {"top1": top1}, "resumed_at_iteration": 0}
    record |= {"loss": {"iteration": [], "loss": []}}
    folder = root / "ablations" / "results" / f"{question.name}_small"
    folder.mkdir(exist_ok=True)
    (folder / f"{variant}_seed{seed}_{lr}.json").write_text(json.dumps(record))


def rendered(root, question):
    return tables.render([question], read_groups([question], root / "ablations" / "results"))


def table(root, question, heading):
    """Return the last cell of a heading for each variant that has run."""
    lines = rendered(root, question).splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows]
    labels = {variant.label: variant.name for variant in question.variants}
    first = max(index for index, row in enumerate(rows) if not row[0])  # the headings
    column = rows[first].index(heading)
    return {labels[row[0]]: row[column] for row in rows[first + 1 :]}


def test_a_verdict_needs_two_standard_errors_and_three_seeds(root, seed):
    ours, vit = np.random.default_rng(seed).normal((52.0, 50.0), 0.1, (4, 2)).round(2).T
    for index, (one, other) in enumerate(zip(ours, vit, strict=True)):
        write(root, BUDGET, "ours_one_all", index, one, 4e12)
        write(root, BUDGET, "vit_one_all", index, other, 4e12)
    for index, (one, other) in enumerate([(50.0, 51.0), (51.0, 50.0), (50.0, 50.5)]):
        write(root, BUDGET, "ours_one_half", index, one, 2e12)
        write(root, BUDGET, "vit_one_half", index, other, 2e12)
    for index in range(2):
        write(root, BUDGET, "ours_half_all", index, 40.0 - index, 2e12)
        write(root, BUDGET, "vit_half_all", index, 50.0 - 2 * index, 2e12)
    steps = ours - vit
    cells = table(root, BUDGET, "Δ to the ViT, ± standard error")
    error = steps.std(ddof=1) / 2
    assert cells["ours_one_all"] == f"+{steps.mean():.2f} ± {error:.2f}, better"
    assert cells["ours_one_half"] == "−0.17 ± 0.60"
    assert cells["ours_half_all"] == "−9.50 ± 0.50 (n = 2)"
    assert cells["vit_one_all"] == ""
    assert "ours_double_all" not in cells
    assert "\nNot run: ViT, 0.5 × the blocks, 0.25 × the epochs; " in rendered(root, BUDGET)
    full = table(root, BUDGET, "× all epochs")
    assert (full["ours_one_half"], full["ours_one_all"]) == ("0.50", "")


@pytest.mark.parametrize(("logarithmic", "verdict"), [(False, "worse"), (True, "better")])
def test_a_lower_perplexity_is_better(logarithmic, verdict):
    (variant, other), measure = BUDGET.variants[:2], BUDGET.field.measure
    measure = type(measure)("top1", "", "", "", logarithmic=logarithmic)
    group = {
        each: [{"seed": seed, "final": {"top1": mean + seed}} for seed in range(3)]
        for each, mean in ((variant, 10.0), (other, 12.0))
    }
    row = Row(variant, group, measure)
    assert row.compared(row.other(other)) == f"−2.00 ± 0.00, {verdict}"


def test_a_difference_of_fewer_seeds_than_a_row_has_says_so():
    variant, other = BUDGET.variants[:2]
    results = {variant: (1.0, 3.0, 2.0, 9.0), other: (0.0, 2.0, 1.0)}
    group = {
        each: [{"seed": seed, "final": {"top1": top1}} for seed, top1 in enumerate(values)]
        for each, values in results.items()
    }
    row = Row(variant, group, BUDGET.field.measure)
    assert row.compared(row.other(other)) == "+1.00 ± 0.00, better (n = 3)"


def test_three_accounts_of_the_small_model(root):
    costs = dict(zip(NAMES, (3e12, 6e12, 0.6e12, 0.6e12, 3.6e12), strict=True))
    for seed in range(3):
        for index, (name, flops) in enumerate(costs.items()):
            write(root, STAGES, name, seed, 40.0 + index + seed, flops)
        write(root, STAGES, "x2_zero_key_10", seed, 30.0, 0.6e12, lr=2e-3)
    for account, times in (("small model sunk", 0.1), ("shared by 3", 0.267), ("counted", 0.6)):
        cells = table(root, STAGES, f"× the full training, {account}")
        assert float(cells["x2_zero_key_10"]) == pytest.approx(times, abs=0.005)
        assert cells["small"] == cells["x2"] == ""
    assert table(root, STAGES, "best lr")["x2_zero_key_10"] == "0.001"
    for heading, expected in (
        ("the full training", "+2.00 ± 0.00, better"),
        ("scratch, counted", "−1.00 ± 0.00, worse"),
        ("scratch, small model sunk", "–"),
        ("not grown", "+1.00 ± 0.00, better"),
    ):
        cells = table(root, STAGES, f"Δ to {heading}, ± standard error")
        assert cells["x2_zero_key_10"] == expected


def test_charts(root):
    for name in NAMES:
        write(root, STAGES, name, 0, 45.0, 1e12)
    write(root, BUDGET, "vit_one_all", 0, 45.0, 1e12)
    tables.main(QUESTIONS, [], root)
    tables.main(QUESTIONS, ["--check"], root)
    for name in ("stages_small", "budget_small"):
        with Image.open(root / "ablations" / "results" / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(1_000_000)) > 20


@pytest.mark.slow
def test_equal_budgets_from_one_end_to_the_other(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    own = ["--cfg-options", "train_cfg.max_epochs=4", "train_cfg.val_interval=2"]
    sweep(BUDGET, [*words, *own, "--variants", "ours_double_half", "vit_double_half"])
    ours, vit = records(tmp_path).values()
    assert ours["options"]["model"]["backbone"] == {"depth": 2}
    assert ours["epochs"] == vit["epochs"] == 2
    assert ours["flops"] == pytest.approx(vit["flops"], rel=1e-3)


@pytest.mark.slow
def test_stages_from_one_end_to_the_other(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    own = ["--cfg-options", "train_cfg.max_epochs=20", "train_cfg.val_interval=2"]
    names = ("x3_zero_key_10", "x3_released_10", "x3_same_10", "x3_net2net_10", "x3_sunk_10")
    sweep(STAGES, [*words, *own, "--variants", *names])
    found = {name.removesuffix("_seed0"): record for name, record in records(tmp_path).items()}
    assert sorted(found) == sorted((*names, "small", "reference"))
    small, images = found["small"], found["small"]["train_images"]
    for name, start in (("zero_key", "small"), ("released", "small"), ("net2net", "reference")):
        record = found[f"x3_{name}_10"]
        (growth,) = record["growth"]
        assert growth["iteration"] == 1
        assert record["parameters"] == found[start]["parameters"] < growth["parameters"]
        # It starts where the small model ended, with the head of the small model.
        assert record["loss"]["loss"][0] < found[start]["loss"]["loss"][0] - 0.3
    # After the first iteration, of 32 images, a stage costs what the large model costs.
    scratch, own = found["x3_sunk_10"]["flops"], found["x3_zero_key_10"]["flops"]
    each, early = scratch / (2 * images), small["flops"] / (20 * images)
    assert own == pytest.approx(scratch - 32 * (each - early), rel=1e-6)
    assert found["x3_zero_key_10"]["final"]["top1"] > found["x3_sunk_10"]["final"]["top1"]
    # Without growth, whole epochs of the small model cost as much.
    assert abs(found["x3_same_10"]["flops"] - scratch) <= 0.51 * small["flops"] / 20
