"""The record of loading has the time of each config, relative to the first or to timm."""

import json

import numpy as np
import pytest
from PIL import Image

from tokenformer_vit.training.loading_speed import main


def test_configs_are_measured_in_turn(config, data_root, tmp_path, capsys):
    in_memory = tmp_path / "in_memory.py"
    in_memory.write_text(
        f"_base_ = {str(config)!r}\ntrain_dataloader = dict(dataset=dict(type='ImagesInMemory'))\n"
    )
    out = tmp_path / "records" / "loading.json"
    words = [str(config), str(in_memory), "--data-root", str(data_root), "--out", str(out)]
    main([*words, "--rounds", "3", "--images", "100"])  # more than an epoch has
    record = json.loads(out.read_text())
    assert (record["n"], record["images"], record["threads"]) == (3, 100, 1)
    first, second = record["configs"]
    assert (first["config"], second["config"]) == ("small.py", "in_memory.py")
    assert first["ratio_p20"] == first["ratio_p80"] == 1
    rates = [each["images_per_s"] for each in (first, second)]
    ratios = sorted(mine / other for other, mine in zip(*rates, strict=True))
    assert abs(second["ratio_p50"] / ratios[1] - 1) < 0.02  # both are rounded
    assert f"in_memory.py: {sorted(rates[1])[1]:,} images/s" in capsys.readouterr().out


def test_a_config_is_compared_with_timm(tmp_path, seed, capsys):
    rng = np.random.default_rng(seed)
    for name in ("a/1.jpg", "a/2.png", "b/3.jpg"):
        path = tmp_path / "data" / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    config, out = tmp_path / "own.py", tmp_path / "loading.json"
    config.write_text(
        "_base_ = 'tokenformer_vit::imagenet_tiny.py'\n"
        "model = dict(head=dict(num_classes=2))\ndata_preprocessor = dict(num_classes=2)\n"
        "two = dict(metainfo=dict(classes=['a', 'b']))\n"
        "train_dataloader = dict(batch_size=2, dataset=two)\nval_dataloader = dict(dataset=two)\n"
    )
    words = [str(config), "--timm", "--data-root", str(tmp_path / "data"), "--enlarge", "40"]
    main([*words, "--rounds", "3", "--images", "4", "--out", str(out)])
    record = json.loads(out.read_text())
    assert "shorter side of 40" in record["files"]
    assert 100 < record["bytes_per_file"] < 40 * 60 * 3
    found = {entry["config"]: entry for entry in record["configs"]}
    for use in ("training", "validation"):
        mine, timm = found[f"own.py, {use}"], found[f"timm, {use}"]
        assert mine["compared_with"] == timm["config"] == f"timm, {use}"
        rates = zip(mine["images_per_s"], timm["images_per_s"], strict=True)
        ratios = sorted(own / other for own, other in rates)
        assert mine["ratio_p50"] == pytest.approx(ratios[1], rel=0.05)  # both are rounded
    assert found["timm, validation, bytes"]["compared_with"] == "timm, validation"
    assert "own.py, training" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--timm"], ["--enlarge", "300"]])
def test_options_that_do_not_fit(config, words, capsys):
    with pytest.raises(SystemExit):
        main([str(config), *words])
    assert "--timm" in capsys.readouterr().err
