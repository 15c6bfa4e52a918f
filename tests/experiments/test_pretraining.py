"""Pre-training happens once a seed; classifiers start from it, or train as long from scratch."""

import json
import re
from typing import Any

import pytest
from mae import QUESTION as MAE

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.experiments.plan import plan
from tokenformer_vit.experiments.sweep import parse, sweep
from tokenformer_vit.training.config import load_config

# Stands in for a training: a pre-training has no accuracy.
TRAINER = """
import json, sys
from pathlib import Path

config, folder = Path(sys.argv[1]), Path(sys.argv[3])
with open(config.parent / "starts.txt", "a") as file:
    file.write(f"{config.stem}\\n")
scope = {}
exec(config.read_text(), scope)
result = {"reconstruction": 0.5} if "mae_seed" in config.stem else {"accuracy/top1": 40.0}
if "mae_tenth" in config.stem:
    result["accuracy/top1"] += 10 * ("lr0.002" in config.stem)
logs = folder / "20260101_000000" / "vis_data"
logs.mkdir(parents=True)
lines = {"loss": 1.0, "iter": 4, "step": 4}, {**result, "step": 2}
(logs / "scalars.json").write_text("\\n".join(map(json.dumps, lines)))
(folder / "model.safetensors").touch()
record = {"command": "python train.py", "commit": "abc", "seconds": 60.0, "processes": 1}
epochs = scope.get("train_cfg", {}).get("max_epochs", 2)
record |= {"epochs": epochs, "iterations": 8, "resumed_at_iteration": 0}
record |= {"hardware": "a CPU", "dtype": "float32", "images_per_step": 32, **result}
share = scope.get("train_dataloader", {}).get("dataset", {}).get("share", 1)
(folder / "record.json").write_text(json.dumps({**record, "train_images": int(1000 * share)}))
"""


@pytest.fixture
def words(tmp_path, config, digits):
    in_memory = "train_dataloader['dataset'] = dict(type='ImagesInMemory', share=1.0)\n"
    config.write_text(config.read_text() + in_memory)
    options = {"config": config, "data-root": digits, "work-dir": tmp_path / "work"}
    options["out"] = tmp_path / "results" / "mae_small"
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_classifiers_start_from_the_pre_training_of_their_seed(tmp_path, words, replace_training):
    started = replace_training(TRAINER)
    names = ["ours_scratch_tenth", "ours_mae_tenth", "ours_mae_all"]
    rates = ["--lr", "0.001", "0.002", "--lr-seeds", "1", "--seeds", "2"]
    sweep(MAE, [*words, "--variants", *names, *rates])
    of_mae = ["ours_mae_seed0", "ours_mae_seed1"]
    assert [name for name in started() if "mae_seed" in name] == of_mae
    assert "ours_mae_tenth_seed1_lr0.002" in started()  # the best rate of the first seed
    assert "ours_mae_tenth_seed1" not in started()

    def trained(name):
        return load_config(tmp_path / "work" / f"{name}.py")

    pretraining = trained("ours_mae_seed1")
    assert pretraining.model.type == "MaskedAutoencoder"
    assert pretraining.model.backbone.checkpoint_path == ""
    assert pretraining.model.backbone.global_pool == "token"
    tuned = trained("ours_mae_tenth_seed1_lr0.002")
    assert tuned.model.type == "ImageClassifier"
    assert tuned.model.backbone.global_pool == "avg"
    weights = tuned.model.backbone.checkpoint_path
    assert weights == "work/ours_mae_seed1/model.safetensors"
    assert tuned.train_dataloader.dataset.share == 0.1
    scratch = trained("ours_scratch_tenth_seed0")
    assert scratch.model.backbone.checkpoint_path == ""
    both = pretraining.train_cfg.max_epochs + tuned.train_cfg.max_epochs
    assert scratch.train_cfg.max_epochs == both
    assert scratch.optim_wrapper.paramwise_cfg.layer_decay_rate == 1.0

    paths = (tmp_path / "results" / "mae_small").glob("*.json")
    records = [json.loads(path.read_text()) for path in paths]
    assert len(records) == len(started()) == 11
    table = MAE.table(records)
    assert "TokenFormer, MAE, 10% of the labels" in table
    assert "| TokenFormer, MAE |" not in table
    row = next(line for line in table.splitlines() if "MAE, 10%" in line)
    assert "| 100 | 10 | 0.002 | 50.00 ± 0.00 (n = 2) | – | +10.00 ± 0.00 (n = 2) |" in row
    MAE.draw(records)

    for record in records:  # a run that fails does not know how many images it would have had
        if record["variant"] == "ours_mae_tenth" and record["seed"] == 1:
            record["failed"] = "the loss is nan"
            for key in ("train_images", "epochs", "final"):
                del record[key]
    row = next(line for line in MAE.table(records).splitlines() if "MAE, 10%" in line)
    assert "50.00 (n = 1)" in row
    assert row.endswith("| seed 1: the loss is nan |")

    for record in records:  # a rate whose runs fail is not the best one, and is named
        if record["variant"] == "ours_mae_tenth" and record["lr"] == 0.001:
            record["failed"] = "the loss is inf"
    row = next(line for line in MAE.table(records).splitlines() if "MAE, 10%" in line)
    assert "| 0.002 | 50.00 (n = 1)" in row
    failures = "lr 0.001, seed 0: the loss is inf; lr 0.002, seed 1: the loss is nan"
    assert row.endswith(f"| {failures} |")
    MAE.draw(records)


def test_dry_run_counts_shares_of_the_images_and_visible_patches(words, capsys):
    names = ["ours_mae_tenth", "ours_scratch_tenth", "ours_mae_all"]
    words = [*words, "--variants", *names]
    runs = {run.about["variant"]: run for run in plan(MAE, parse(MAE, words))}
    field = runs["ours_mae"].field
    images = {name: field.num_examples(run.whole) for name, run in runs.items()}
    assert images["ours_mae_tenth"] == pytest.approx(images["ours_mae"] / 10, abs=5)  # by class
    sweep(MAE, [*words, "--dry-run"])
    shown = re.search(r"left: ([\d,]+) images", capsys.readouterr().out)[1]
    seen = sum(
        images[name] * run.about["options"]["train_cfg"]["max_epochs"] for name, run in runs.items()
    )
    assert int(shown.replace(",", "")) == seen


def test_flops_of_pre_training_are_of_visible_patches_and_the_decoder(words):
    (run, *_) = plan(MAE, parse(MAE, [*words, "--variants", "ours_mae_all"]))
    cfg = run.whole
    model: Any = run.field.build(cfg)
    encoder, decoder = model.backbone.model, cfg["model"]["neck"]
    patches, width = encoder.patch_embed.num_patches, decoder["decoder_embed_dim"]
    block = (4 + 2 * decoder["mlp_ratio"]) * width**2 + 2 * (1 + patches) * width
    pixels = 3 * encoder.patch_embed.patch_size[0] ** 2
    outside = (1 + patches // 4) * encoder.embed_dim * width + (1 + patches) * width * pixels
    forward = 2 * ((1 + patches) * decoder["decoder_depth"] * block + outside)
    seen = training_flops(encoder, 1 + patches // 4)
    assert run.field.flops(cfg) == seen + 3 * forward
