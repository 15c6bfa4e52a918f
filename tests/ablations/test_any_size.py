"""Smaller ViTs are measured once, before and after an epoch, and the command goes on."""

import copy
from argparse import Namespace
from typing import Any

import any_size
import pytest
import results
import timm
import torch
import vits
from safetensors.torch import save_file


def test_smaller_vits_are_measured_before_and_after_an_epoch(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.layers.set_fused_attn", lambda on: None)  # it is for the process
    torch.manual_seed(0)  # agreement depends on the weights
    weights = timm.create_model("test_vit", img_size=16).state_dict()
    save_file(weights, tmp_path / "vit.safetensors")
    words = f"--data {shared_data('cifar10')} --work-dir {tmp_path} --device cpu --no-compile"
    words += f" --weights {tmp_path}/vit.safetensors --image 16 --limit 96 --epochs 1"
    words += " --batch-size 32 --vit test_vit --methods refit_equal usage --tuned usage"
    words += " --targets 0.8 0.7 --seeds"
    with pytest.raises(
        any_size.InputError, match="no rate of fine-tuned by seed 0: give --seeds 0"
    ):
        any_size.main(f"{words} 1".split())
    any_size.main(f"{words} 0".split())
    first = results.read(path := tmp_path / "results.csv")
    counts = first.groupby(["variant", "examples"]).size().to_dict()
    assert counts == {("fine-tuned_1", 72): 3, ("usage_0.7", 72): 3}  # at the last target alone
    first.loc[first["lr"] == 1e-4, "top1"] = 101.0  # the best
    first.to_csv(path, index=False)
    any_size.main(f"{words} 0 1".split())
    any_size.main(f"{words} 0 1".split())
    rows = results.read(path).iloc[len(first) :].set_index(["lr", "variant"])
    assert [*rows.loc[1e-4].index] == ["fine-tuned_1", "usage_0.8", "usage_0.7"]
    assert {"whole_1", "refit_equal_0.8", "usage_0.7"} < {*rows.loc[0.0].index}
    assert rows.index.is_unique


@pytest.mark.parametrize("method", any_size.METHODS)
def test_a_method_keeps_its_share_of_the_flops(method):
    if method.startswith("torch-pruning"):
        pytest.importorskip("torch_pruning")
    vit: Any = timm.create_model("test_vit", img_size=16, depth=2)
    share = 1.0 if method == "whole" else 0.7
    small = any_size.METHODS[method](vit, torch.randn(8, 3, 16, 16), share)
    assert share - 0.05 < any_size.flops_of(small) / any_size.flops_of(vit) <= share


def test_a_training_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    how = {"image": 16, "epochs": 3, "batch_size": 4, "compile": False}
    args = Namespace(**how, device=torch.device("cpu"))
    data = torch.randn(10, 3, 16, 16), torch.arange(10)
    whole = timm.create_model("test_vit", img_size=16, num_classes=10, depth=1)
    resumed = copy.deepcopy(whole)
    vits.train(whole, args, data, 1e-3, 0)
    with monkeypatch.context() as stopped:
        stopped.setattr(vits, "trange", lambda start, stop, **how: range(2))
        vits.train(resumed, args, data, 1e-3, 0, tmp_path / "last.pt")
    vits.train(resumed, args, data, 1e-3, 0, tmp_path / "last.pt")
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
