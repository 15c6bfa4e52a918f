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


@pytest.fixture(autouse=True)
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


def small_vit():
    vit: Any = timm.create_model("test_vit", img_size=16, depth=2, num_classes=3, num_heads=4)
    torch.nn.init.normal_(vit.head.weight)
    return vit.eval()


def test_methods_are_measured_once(tmp_path):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        write_images(tmp_path / split, (16, 16), dict.fromkeys(CLASSES, 4), generator)
    save_model(small_vit(), tmp_path / "vit", CLASSES)
    words = [f"{tmp_path}/vit", str(tmp_path), "--seed", "1", "--work-dir", f"{tmp_path}/runs"]
    words += ["--methods", "snapvit", "usage", "--flops", "0.8", "--device", "cpu"]
    any_size.main(words)
    # Adds what is missing; neither can reach a tenth, where attention is more.
    any_size.main([*words, "--flops", "0.8", "0.1", "--rates", "0.001"])
    rows = results.read(tmp_path / "runs/results.csv").set_index(["sweep", "variant"])
    assert {*rows.index} == {
        ("any_size", "whole"),
        ("any_size", "snapvit_0.8"),
        ("any_size_baselines", "usage_0.8"),
        ("any_size_epoch", "snapvit_0.8"),
        ("any_size_baselines_epoch", "usage_0.8"),
    }
    assert rows["same_class"]["any_size", "whole"] == 100
    flops = rows["forward_flops"]
    assert (flops.drop(index="whole", level=1) <= 0.8 * flops["any_size", "whole"]).all()


@pytest.mark.parametrize("method", [*any_size.METHODS, "refit tokens", "usage tokens"])
def test_a_method_keeps_its_share_of_the_flops(method):
    if "pruning" in method:
        pytest.importorskip("torch_pruning")
    method, _, tokens = method.partition(" ")
    whole = any_size.as_tokenformer(small_vit()) if tokens else small_vit()
    flops, data = flops_of(whole), [(torch.randn(8, 3, 16, 16), torch.randint(3, (8,)))]
    models = any_size.METHODS[method](whole, data, [0.7])
    assert flops_of(whole) == flops
    assert 0.6 < flops_of(models[0.7]) / flops <= 0.7


def test_an_epoch_changes_early_layers_least():
    vit = small_vit()
    data = [(torch.randn(8, 3, 16, 16), torch.randint(3, (8,)))]
    tuned = any_size.tune(vit, data, 1e-3, seed=1)
    steps = [
        (one.mlp.fc2.weight - two.mlp.fc2.weight).abs().mean()
        for one, two in zip(tuned.blocks, vit.blocks, strict=True)
    ]
    assert 0 < steps[0] < 0.9 * steps[1]
    assert not tuned.training


def test_heads_and_neurons_that_add_nothing_go_exactly():
    vit, images = small_vit(), torch.randn(64, 3, 16, 16)
    with torch.no_grad():
        for block in vit.blocks:
            size = block.attn.head_dim
            block.attn.proj.weight[:, size : 2 * size] = 0
            block.mlp.fc2.weight[:, ::2] = 0
    small = any_size.snapvit(vit, [(images, torch.zeros(64))], 0.7)
    assert [block.attn.num_heads for block in small.blocks] == [3, 3]
    torch.testing.assert_close(small(images), vit(images), rtol=1e-3, atol=1e-3)
