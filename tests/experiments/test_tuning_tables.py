"""The tables of tuning say what was trained, and compare what can be compared."""

import json

import numpy as np
import pytest
from PIL import Image
from tables import QUESTIONS
from tuning import QUESTION

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import tables
from tokenformer_vit.experiments.results import read_groups

TRAINABLE = {"probe": 970, "tokens_small": 31_690, "full": 600_000, "scratch": 600_000}


def write(root, variant, seed, top1, lr=1e-2, start="abc", **changes):
    """Write the record of a run; if ``top1`` is an error, the run failed."""
    vit = variant.startswith(("vit", "lora"))
    rate = {"optim_wrapper": {"optimizer": {"lr": lr}}}
    options = {"model": {"backbone": {"frozen": True, "growth": None}}}
    backbone = dict(options["model"]["backbone"])
    if variant == "tokens_small":
        options, backbone = {}, {}
    if variant == "scratch":
        options["model"]["backbone"]["checkpoint_path"] = backbone["checkpoint_path"] = ""
    if vit:
        backbone = {"_delete_": True, "model_name": "vit_base_patch16_224"}
    elif start != "abc" and variant != "scratch":
        backbone["checkpoint_path"] = f"{start}.safetensors"
    record = {
        "question": "tuning",
        "variant": variant,
        "seed": seed,
        "lr": lr,
        "config": "configs/small.py",
        "commit": "abc",
        "options": options,
        "settings": {"randomness": {"seed": seed}, "model": {"backbone": backbone}, **rate},
        "hardware": "CPU",
        "parameters": 600_000,
        "trainable": TRAINABLE.get(variant, 31_690),
        "start": {"file": f"{start}.safetensors", "sha256": f"{start}{vit}"},
        "loss": {"iteration": [], "loss": []},
    }
    if variant == "scratch":
        record["start"] = None
    if isinstance(top1, str):
        record["failed"] = top1
    else:
        record |= {"epochs": 2, "train_images": 5000, "images_per_step": 64, "dtype": "float32"}
        record |= {"seconds": 90.0, "resumed_at_iteration": 0, "final": {"top1": top1}}
        record |= {"validation": {"epoch": [1, 2], "top1": [top1 - 5, top1]}}
    path = root / "ablations" / "results" / "tuning_small" / f"{variant}_seed{seed}_{lr}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, **changes}))


def rendered(root):
    return tables.render(QUESTIONS, read_groups(QUESTIONS, root / "ablations" / "results"))


def cells(text, variant):
    label = next(each.label for each in QUESTION.variants if each.name == variant)
    rows = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]


def test_trained_parameters_means_and_rates(root):
    top1 = {0: 40.0, 1: 42.5, 2: 41.0}
    for seed, value in top1.items():
        write(root, "probe", seed, value)
        write(root, "tokens_small", seed, value + 5)
        write(root, "tokens_small", seed, value + 4, lr=5e-3)
        write(root, "lora_small", seed, value)
    write(root, "scratch", 0, 30.0)
    write(root, "full", 0, "the loss is nan")
    text = rendered(root)
    spread = f"± {np.std(list(top1.values()), ddof=1):.2f} (n = 3)"
    assert cells(text, "probe") == [["970", "600,000", "0.01", f"41.17 {spread}", "1.5", ""]]
    low, high = cells(text, "tokens_small")
    assert low[:4] == ["31,690", "600,000", "0.005", f"45.17 {spread}"]
    assert high[:4] == ["31,690", "600,000", "0.01", f"**46.17 {spread}**"]
    assert cells(text, "scratch")[0][3] == "30.00 (n = 1)"
    assert cells(text, "full")[0][3:] == ["–", "–", "seed 0: the loss is nan"]
    assert cells(text, "vit_full") == [["", "", "", "not run", "", ""]]
    assert "configs/imagenet_base.py --seeds 3" not in text[text.index("## Tuning") :]

    tables.main(QUESTIONS, [], root)
    with Image.open(root / "ablations" / "results" / "tuning_small.png") as chart:
        assert chart.convert("L").getextrema()[0] < 100
    tables.main(QUESTIONS, ["--check"], root)


def test_what_was_never_run_is_said(root):
    text = rendered(root)
    for variant in QUESTION.variants:
        assert cells(text, variant.name) == [["", "", "", "not run", "", ""]]


def test_weights_given_on_the_command_line_can_be_compared(root):
    for variant in ("probe", "tokens_small", "scratch", "lora_small"):
        write(root, variant, 0, 40.0, start="own")
    assert "40.00 (n = 1)" in rendered(root)


def test_runs_from_other_weights_are_no_comparison(root):
    write(root, "probe", 0, 40.0)
    write(root, "probe", 1, 40.0, start="other")
    with pytest.raises(InputError, match=r"start is .*abc.* and .*other.*cannot be compared"):
        rendered(root)
