"""Trained ViTs are converted and measured once, also after an interruption."""

from typing import Any

import from_vit
import pandas as pd
import pytest
import timm
from safetensors.torch import save_file


def test_each_part_is_measured_once(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.layers.set_fused_attn", lambda on: None)  # it is for the process
    monkeypatch.setattr(from_vit, "TUNE_STEPS", 1)
    words = ["--data", str(shared_data("cifar10")), "--csv", str(tmp_path / "rows.csv")]
    words += ["--device", "cpu", "--seeds", "0", "--limit", "64", "--width", "12", "--depth", "2"]
    words += ["--epochs", "2", "--batch-size", "32", "--no-compile", "--rounds", "1"]
    words += ["--work-dir", str(tmp_path)]
    whole_file, saved = from_vit.whole_file, []

    def interrupted(path):
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt
        return whole_file(path)

    monkeypatch.setattr(from_vit, "whole_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        from_vit.main(words)
    for _ in range(2):
        from_vit.main(words)
        assert len(saved) == 3  # the second epoch; then nothing
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert [*rows] == [*pd.read_csv(from_vit.__file__.replace(".py", ".csv"), nrows=0)]
    values = rows.set_index(["part", "variant", "dtype", "name"])["value"].sort_index()
    assert values.index.is_unique
    for variant in ("converted", "fused"):
        same = values["accuracy", variant, "float32"]
        assert same["relative_error"] < 1e-5
        assert same["same_class"] == 100
    assert (values["ranks", :, :, "12/12"] == same["accuracy"]).all()
    assert values["size", "fused", "float32", "flops"] == values["size", "vit", "float32", "flops"]
    assert rows.groupby("part").size().to_dict() == {
        "accuracy": 16,
        "ranks": 12,
        "size": 12,
        "tune": 12,
    }
    from_vit.main([*words, "--epochs", "1", "--parts", "accuracy"])
    assert len(saved) == 4  # another model


def test_a_pretrained_vit_gets_a_probe_for_the_images(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.layers.set_fused_attn", lambda on: None)
    vit: Any = timm.create_model("test_vit", img_size=32)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    words = ["--data", str(shared_data("cifar10")), "--csv", str(tmp_path / "rows.csv")]
    words += ["--device", "cpu", "--seeds", "0", "--limit", "300", "--parts", "accuracy", "ranks"]
    words += ["--vit", "test_vit", "--weights", str(tmp_path / "vit.safetensors")]
    from_vit.main(words)
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert rows["model"].unique() == ["test_vit 32 px limit 300"]
    values = rows.set_index(["part", "variant", "dtype", "name"])["value"]
    assert values["accuracy", "vit", "float32", "accuracy"] > 15  # 10 % are chance
    assert values["accuracy", "fused", "float32", "relative_error"] < 1e-5
