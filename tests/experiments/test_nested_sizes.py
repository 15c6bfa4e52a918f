"""Models of several sizes: their runs, what these cost, and the rows of their table."""

import json

import pytest
from nested import QUESTION, SIZES

from tokenformer_vit.experiments import estimate, tables
from tokenformer_vit.experiments.plan import plan
from tokenformer_vit.experiments.results import read_groups
from tokenformer_vit.experiments.sweep import parse
from tokenformer_vit.training.config import load_config

ALONE = [f"alone_{100 * size:g}" for size in SIZES]


@pytest.fixture
def planned(tmp_path, config, digits):
    """The runs of one seed, by variant."""
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--cfg-options", "train_cfg.max_epochs=8"]
    return {run.about["variant"]: run for run in plan(QUESTION, parse(QUESTION, words))}


def test_every_size_is_trained_in_each_way(planned):
    cost = {name: estimate._cost(run, 1437, 1)[1] for name, run in planned.items()}
    for size, name in zip(SIZES, ALONE, strict=True):
        vit = planned[f"vit_{100 * size:g}"].about["parameters"]
        assert planned[name].about["parameters"] == pytest.approx(vit, rel=0.1)
        if size > SIZES[0]:
            assert cost[f"frozen_{100 * size:g}"] == cost[f"grown_{100 * size:g}"] == cost[name]
    quarter, half, most, whole = (cost[name] for name in ALONE)
    assert cost["sandwich"] == pytest.approx(quarter + (half + most) / 2 + whole, rel=0.02)
    assert not {"distill", "parts", "one"} & planned.keys()  # only their records are left
    assert cost["reordered"] == pytest.approx(cost["sandwich"] / 8)
    before = {"frozen_50": "alone_25", "frozen_75": "frozen_50", "grown_100": "grown_75"}
    for name, earlier in before.items():
        assert planned[name].start is planned[earlier]
    for name in ("kept", "reordered", "frozen_75", "vit_25"):
        planned[name].write_config()
        cfg = load_config(planned[name].config)
    assert cfg.model.head.in_channels == cfg.model.backbone.embed_dim == 48
    cfg = load_config(planned["reordered"].config)
    assert cfg.load_from == f"{planned['alone_100'].folder}/nested/model.safetensors"
    assert (cfg.model.type, cfg.model.backbone.nested) == ("NestedClassifier", [0.25, 0.5, 0.75])


def write(root, variant, seed, final, **more):
    record = {"question": "nested", "variant": variant, "seed": seed, "lr": 1e-3}
    record |= {"config": "configs/small.py", "commit": "abc", "options": {}, "settings": {}}
    record |= {"hardware": "GPU", "dtype": "float32", "epochs": 2, "train_images": 10}
    record |= {"images_per_step": 5, "seconds": 60.0, "resumed_at_iteration": 0, "final": final}
    path = root / "ablations" / "results" / "nested_small" / f"{variant}_{seed}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**record, "flops": 60 * 100, **more}))


def test_a_row_has_the_result_of_each_size(root):
    points = [
        {"method": method, "keep": keep, "top1": top1 * keep, "flops": 90}
        for method, top1 in (("prune", 40), ("top-k", 44))
        for keep in SIZES[:-1]
    ]
    for seed in range(3):
        for size, name in zip(SIZES, ALONE, strict=True):
            more = {"compression": points} if size == 1 else {}
            write(root, name, seed, {"top1": 40 + 10 * size}, flops=6000 * size, **more)
        smaller = {f"top1_at_{size:g}": 40 + 10 * size - 1 for size in SIZES[:-1]}
        write(root, "parts", seed, {"top1": 52 + seed, **smaller}, flops=4500)
    groups = read_groups([QUESTION], root / "ablations" / "results")
    text = tables.render([QUESTION], groups)
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    alone, parts = found["trained alone"], found["nested, parts"]
    results = [f"{40 + 10 * size:.2f} ± 0.00 (n = 3)" for size in SIZES]
    assert alone == [*results, "1.50 · 10⁴", "2.50", "", "", "", "", "4.0"]
    assert parts[:4] == ["41.50 ± 0.00 (n = 3)", *parts[1:3], "53.00 ± 1.00 (n = 3)"]
    assert parts[4:] == [
        *("4.50 · 10³", "0.75"),
        *["−1.00 ± 0.00, worse"] * 3,
        *("+3.00 ± 0.58, better", "1.0"),
    ]
    assert found["pruned"][:4] == ["10.00 ± 0.00 (n = 3)", *found["pruned"][1:3], results[3]]
    assert found["pruned"][4:8] == [
        "6.00 · 10³",
        "1.00",
        "−32.50 ± 0.00, worse",
        *found["pruned"][7:8],
    ]
    assert found["grown"][:2] == [results[0], "–"]
    (groups,) = groups.values()
    figure = QUESTION.draw(groups)
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["nested, parts"][0] == [25, 41.5]
    assert lines["nested, parts"][3] == [100, 53]
    assert lines["top-k"] == [[90, 11], [90, 22], [90, 33], [100, 50]]
