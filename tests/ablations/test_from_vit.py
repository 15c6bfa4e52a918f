"""Trained ViTs are converted and measured once, also after an interruption."""

import from_vit
import pandas as pd
import pytest

from tokenformer_vit.errors import InputError


def test_each_part_is_measured_once(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr(from_vit, "set_fused_attn", lambda on: None)  # it is for the process
    monkeypatch.setattr(from_vit, "TUNE_STEPS", 1)
    monkeypatch.setattr(from_vit, "ROUNDS", 1)
    monkeypatch.setattr(from_vit, "SAVE_EVERY", 1)
    words = ["--data", str(shared_data("cifar10")), "--csv", str(tmp_path / "rows.csv")]
    words += ["--device", "cpu", "--seeds", "0", "--limit", "64", "--width", "12", "--depth", "2"]
    words += ["--epochs", "2", "--batch-size", "32", "--no-compile"]
    words += ["--work-dir", str(tmp_path)]
    train_steps, calls = from_vit.train_steps, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train_steps(*arguments)

    monkeypatch.setattr(from_vit, "train_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        from_vit.main(words)
    for expected in (3 + 12, 3 + 12):  # the second epoch, and twelve tunings; then nothing
        from_vit.main(words)
        assert len(calls) == expected
    rows = pd.read_csv(tmp_path / "rows.csv")
    values = rows.set_index(["part", "variant", "dtype", "name"])["value"].sort_index()
    assert values.index.is_unique
    same = values["accuracy", "converted", "float32"]
    assert same["relative_error"] < 1e-5
    assert same["same_class"] == 100
    assert (values["pairs", :, :, "24/24"] == same["accuracy"]).all()
    assert {*rows["part"]} == {*from_vit.PARTS}
    with pytest.raises(InputError, match="'epochs': 2"):
        from_vit.main([*words, "--epochs", "3"])
