"""The tables of 8-bit products are what the records say."""

import json

from tokenformer_vit.experiments import fp8_tables


def test_errors_and_savings(tmp_path):
    parts = {"output": 0.0427, "x": 0.00123, "keys": 0.1, "values": 0.05}
    record = {
        "errors": [
            {"of": "layer", "computed": "fp8", **parts},
            {"of": "layer", "computed": "emulated", **parts, "keys": 0.2},
            {"of": "block", "computed": "fp8", **parts, "x": 0.9},
        ],
        "savings": [
            {
                **{"model": "large", "width": 1024},
                **{"bfloat16_ms": 50.0, "fp8_ms": 40.04, "step_ms": 200.0},
            }
        ],
    }
    path = tmp_path / fp8_tables.RECORD
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    headings, rows = fp8_tables.errors(tmp_path)
    assert headings.endswith("| layer | block")
    assert rows == [
        ["fp8", "4.27 / 0.12 / 10.00 / 5.00", "4.27 / 90.00 / 10.00 / 5.00"],
        ["emulated", "4.27 / 0.12 / 20.00 / 5.00", ""],
    ]
    assert fp8_tables.savings(tmp_path)[1] == [["`large`", "1,024", "50.0", "40.0", "20", "5"]]


def test_trainings_are_compared_seed_by_seed(tmp_path):
    folder = tmp_path / fp8_tables.TRAININGS / "fp8_some"
    folder.mkdir(parents=True)
    losses = {"bfloat16": (1.0, 1.2, 1.4, 9.9), "fp8": (0.9, 1.3, 1.1)}
    for variant, values in losses.items():
        for seed, loss in enumerate(values):
            record = {"variant": variant, "seed": seed, "lr": 1e-3, "loss_last_20_mean": loss}
            record |= {"config": "configs/some.py", "iterations": 1200, "final": {"top1": 50}}
            (folder / f"{variant}_seed{seed}.json").write_text(json.dumps(record))
            if variant == "fp8":  # at another learning rate it is worse
                record |= {"lr": 1e-2, "loss_last_20_mean": 7.0, "final": {"top1": 40}}
                (folder / f"fp8_seed{seed}_lr0.01.json").write_text(json.dumps(record))
    _, rows = fp8_tables.trainings(tmp_path, lambda text, path: f"[{text}]({path})")
    # Differences of -0.1, 0.1 and -0.3: a mean of -0.1, and a standard error of 0.2 / √3.
    assert rows == [
        [
            "[`some`](ablations/results/fp8_some), 1,200 steps, n = 3",
            *("1.2000", "1.1000", "−0.1000 ± 0.1155", "50.00", "50.00", "+0.00 ± 0.00"),
        ]
    ]


def test_one_seed_has_no_error_and_failed_runs_do_not_count(tmp_path):
    for folder, fails in (("fp8_one", False), ("fp8_failed", True)):
        path = tmp_path / fp8_tables.TRAININGS / folder
        path.mkdir(parents=True)
        for variant, loss in (("bfloat16", 1.0), ("fp8", 0.5)):
            record = {"variant": variant, "seed": 0, "lr": 1e-3, "config": "configs/some.py"}
            record |= {"iterations": 12, "loss_last_20_mean": loss, "final": {"top1": 50}}
            if fails and variant == "fp8":
                record = {"variant": variant, "seed": 0, "lr": 1e-3, "failed": "the loss is nan"}
            (path / f"{variant}_seed0.json").write_text(json.dumps(record))
    _, rows = fp8_tables.trainings(tmp_path, lambda text, path: text)
    numbers = ["1.0000", "0.5000", "−0.5000", "50.00", "50.00", "+0.00"]
    assert rows == [["`some`, 12 steps, n = 1", *numbers]]
