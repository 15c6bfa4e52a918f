"""The script that converts trained ViTs can be interrupted, and measures what it converts."""

import from_vit
import pandas as pd
import pytest
import torch


@pytest.fixture
def script(shared_data, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(from_vit, "set_fused_attn", lambda on: None)  # it is for the process
    for name in ("TUNE_STEPS", "ROUNDS"):
        monkeypatch.setattr(from_vit, name, 1)

    def run(*words, folder="work"):
        fixed = ["--data", shared_data("cifar10"), "--device", "cpu", "--seeds", 0, "--limit", 64]
        fixed += ["--width", 12, "--depth", 2, "--epochs", 2, "--batch-size", 32, "--no-compile"]
        fixed += ["--csv", tmp_path / "rows.csv", "--work-dir", tmp_path / folder]
        from_vit.main([str(word) for word in (*fixed, *words)])
        return pd.read_csv(tmp_path / "rows.csv")

    return run


def test_measures_each_part_once(script, tmp_path, capsys):
    rows = script()
    values = rows.set_index(["part", "variant", "dtype", "name"])["value"].sort_index()
    same = values["accuracy", "converted", "float32"]
    assert same["relative_error"] < 1e-5
    assert same["same_class"] == 100
    assert same["accuracy"] == values["train", "vit", "float32", "accuracy"]
    assert (values["pairs", :, :, "24/24"] == same["accuracy"]).all()
    assert values["size", "converted"].min() > 0
    assert set(rows["part"]) == {"train", *from_vit.PARTS}
    assert script().equals(rows)  # nothing is measured again
    script("--report")
    assert "| same class as the ViT, float32, % | 100.00 |" in capsys.readouterr().out
    assert (tmp_path / "rows.png").exists()


def test_a_resumed_training_ends_equal(script, tmp_path, monkeypatch):
    whole = ["--parts", "train", "--save-every", 1]
    script(*whole)
    train_steps, calls = from_vit.train_steps, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train_steps(*arguments)

    monkeypatch.setattr(from_vit, "train_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script(*whole, folder="resumed")
    with pytest.raises(from_vit.InputError, match="epoch 1"):
        script("--parts", "accuracy", folder="resumed")
    script(*whole, folder="resumed")
    assert len(calls) == 3
    straight, resumed = (
        torch.load(tmp_path / folder / "vit_0.pt", weights_only=True)["model"]
        for folder in ("work", "resumed")
    )
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name
    with pytest.raises(from_vit.InputError, match="'epochs': 2"):
        script("--parts", "train", "--epochs", 3)
