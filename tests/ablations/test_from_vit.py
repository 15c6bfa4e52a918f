"""Trained ViTs are converted and measured once, also after an interruption."""

import from_vit
import pandas as pd
import pytest


def test_each_part_is_measured_once(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.layers.set_fused_attn", lambda on: None)  # it is for the process
    monkeypatch.setattr(from_vit, "TUNE_STEPS", 1)
    monkeypatch.setattr(from_vit, "ROUNDS", 1)
    words = ["--data", str(shared_data("cifar10")), "--csv", str(tmp_path / "rows.csv")]
    words += ["--device", "cpu", "--seeds", "0", "--limit", "64", "--width", "12", "--depth", "2"]
    words += ["--epochs", "2", "--batch-size", "32", "--no-compile"]
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
    same = values["accuracy", "converted", "float32"]
    assert same["relative_error"] < 1e-5
    assert same["same_class"] == 100
    assert (values["pairs", :, :, "24/24"] == same["accuracy"]).all()
    assert rows.groupby("part").size().to_dict() == {
        "accuracy": 10,
        "pairs": 10,
        "size": 6,
        "tune": 12,
    }
    from_vit.main([*words, "--epochs", "1"])
    assert len(saved) == 4  # another model
