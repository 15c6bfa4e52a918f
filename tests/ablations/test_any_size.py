"""Smaller ViTs are measured before and after an epoch, once; their table says who leads."""

from typing import Any

import any_size
import pandas as pd
import pytest
import report
import timm
import torch
from safetensors.torch import save_file


def test_each_method_is_measured_once(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.layers.set_fused_attn", lambda on: None)  # it is for the process
    torch.manual_seed(0)  # agreement depends on the weights
    vit: Any = timm.create_model("test_vit", img_size=32)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    words = ["--data", str(shared_data("cifar10")), "--csv", str(tmp_path / "rows.csv")]
    words += ["--vit", "test_vit", "--weights", str(tmp_path / "vit.safetensors"), "--image", "32"]
    words += ["--device", "cpu", "--seeds", "0", "1", "--limit", "120", "--epochs", "1"]
    words += ["--batch-size", "16", "--no-compile", "--work-dir", str(tmp_path / "work")]
    words += ["--targets", "0.8", "0.7", "--methods", "refit", "refit equal", "usage"]
    rows: Any = None
    for _ in range(2):
        any_size.main(words)
        rows = pd.read_csv(tmp_path / "rows.csv").set_index(["seed", "method", "target"])
        # Seed 0 tries all rates, at the last target; the other seed has the best.
        assert rows.loc[0].groupby("method").size().to_dict() == {
            **{"fine-tuning": 2, "whole": 1, "refit": 3, "refit equal": 1, "usage": 3}
        }
        assert rows.loc[1].index.is_unique
        assert len(rows.loc[1]) == 8
    part = rows["flops"] / rows["flops"].max()
    for target in (0.8, 0.7):
        assert part[1, "usage", target] == part[1, "refit equal", target]
        assert target - 0.03 < part[1, "refit", target] <= target
    same = rows["same_class"][1]
    assert same["whole", 1.0] == 100
    assert same["refit equal", 0.7] > same["usage", 0.7]
    assert rows["tuned"].isna().groupby("method").all().to_dict() == {
        **{"fine-tuning": False, "whole": True, "refit": False, "refit equal": True},
        **{"usage": False},
    }


@pytest.mark.parametrize(
    ("gap", "verb"), [(5, "leads"), (0, "was not found to"), (-5, "is behind")]
)
def test_the_table_says_who_leads(gap, verb, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    rows = [
        {"seed": seed, "method": method, "target": target, "top1": top1, "tuned": 90.0}
        for seed in (1, 2, 3)
        for method, target, top1 in (
            ("whole", 1.0, 90.0),
            ("refit", 0.5, 80.0 + seed / 9),
            ("usage", 0.5, 80.0 - gap + seed / 7),
        )
    ]
    pd.DataFrame(rows).assign(parameters=1e6).to_csv(tmp_path / "any_size.csv")
    text = report.fill("<!-- smaller 0.5 refit usage -->\n<!-- end -->", {})
    assert f"Without training, *refit* {verb}" in text
    assert "usage (0.5)." in text
    assert f"| 0.5 | usage | 1.0 M | 3 | {80.29 - gap:.2f} | " in text
    assert ("**" in text) == bool(gap)
