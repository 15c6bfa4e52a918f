"""A ViT is made smaller by several methods, each to its share of the FLOPs, and measured once."""

from typing import Any

import any_size
import numpy as np
import pytest
import results
import timm
import torch

from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.vision.compression import flops_of

from ..samples import CLASSES, write_images


def small_vit():
    vit: Any = timm.create_model("test_vit", img_size=16, depth=2, num_classes=3)
    torch.nn.init.normal_(vit.head.weight)
    return vit.eval()


def test_methods_are_measured_once(tmp_path):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        write_images(tmp_path / split, (16, 16), dict.fromkeys(CLASSES, 4), generator)
    save_model(small_vit(), tmp_path / "vit", CLASSES)
    words = [f"{tmp_path}/vit", str(tmp_path), "--seed", "1", "--work-dir", f"{tmp_path}/runs"]
    words += ["--methods", "refit_equal", "usage", "--flops", "0.8", "--device", "cpu"]
    any_size.main(words)
    rows = results.read(tmp_path / "runs/results.csv").set_index("variant")
    assert list(rows["sweep"]) == ["any_size", "any_size", "any_size_baselines"]
    assert rows["same_class"]["whole"] == 100
    assert rows["forward_flops"]["usage_0.8"] <= 0.8 * rows["forward_flops"]["whole"]
    saved = timm.create_model(f"local-dir:{tmp_path}/runs/usage_0.8_seed1", pretrained=True)
    fused = timm.utils.reparameterize_model(saved)
    assert sum(map(torch.numel, fused.parameters())) == rows["parameters"]["usage_0.8"]
    with pytest.raises(any_size.results.InputError, match="has a row"):
        any_size.main(words)


@pytest.mark.parametrize("method", any_size.METHODS)
def test_a_method_keeps_its_share_of_the_flops(method):
    if method == "torch-pruning_inner":
        pytest.importorskip("torch_pruning")
    vit = small_vit()
    small = any_size.smaller(method, vit, [torch.randn(8, 3, 16, 16)], 0.7)
    assert 0.65 < flops_of(small) / flops_of(vit) <= 0.7
